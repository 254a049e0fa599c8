"""How the shipped samples were made."""
