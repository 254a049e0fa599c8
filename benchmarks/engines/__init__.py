"""What other engines do with mmqc's checkpoints."""
