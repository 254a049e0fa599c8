"""Triton kernels, one op a file, with launchers: Ampere and newer, and Triton's interpreter on CPU tensors.

Each file holds the formula, ``supports`` (None, or why it cannot run), tile functions, the kernel and its launcher.
Importing this package alone does not import Triton; its modules do.
"""
