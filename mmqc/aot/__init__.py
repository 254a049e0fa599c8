"""The whole forward as exported programs, and packages of them."""
