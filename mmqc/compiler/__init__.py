"""What `torch.compile(backend="mmqc")` and `mmqc.compiled_loop` need around the passes and the lowering."""
