"""What `mmqc.quantize_` does between a model and its report."""
