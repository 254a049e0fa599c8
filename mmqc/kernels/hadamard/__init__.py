"""Hadamard transforms, with the quantization of what they give."""
