"""Quantized models as files: mmqc's own, transformers', compressed-tensors', torchao's; and the way back."""
