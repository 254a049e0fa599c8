"""Measurements; run as modules from the project's root: `python -m benchmarks.micro.linear --help`."""
