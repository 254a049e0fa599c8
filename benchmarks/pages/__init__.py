"""Pages of docs/results and their figures, from the files in benchmarks/results."""
