"""LoRA adapters (arXiv:2106.09685) on quantized models: trained on them, or carried over from the float model."""
