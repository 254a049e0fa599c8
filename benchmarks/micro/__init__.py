"""One kernel, or a few in a row, against the best peer; on one GPU."""
