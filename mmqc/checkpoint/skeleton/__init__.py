"""What transformers knows of a model whose weights are not there yet: their names in files, and which are tied."""
