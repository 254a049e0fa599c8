"""Kernels that solvers call, not models."""
