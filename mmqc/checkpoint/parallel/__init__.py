"""Models that several ranks share, each with a part of the linears."""
