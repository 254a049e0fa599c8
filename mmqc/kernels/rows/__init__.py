"""Kernels of rows: norms and quantization."""
