"""The same question put to many models, packages or machines."""
