"""Mixtures of experts whose weights are stacked in one parameter: found, calibrated, quantized, run."""
