"""Channel spaces: which channels of a program have to be transformed together, and who reads and writes them."""
