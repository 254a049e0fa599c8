"""What other engines make of a checkpoint: which linears they take, and which kernel runs them."""
