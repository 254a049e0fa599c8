"""The modules that take the place of a model's own: quantized linears, embeddings, norms, Hadamards; the mask of modalities."""
