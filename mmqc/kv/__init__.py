"""Quantized keys and values: caches, the attention that reads them, their calibration."""
