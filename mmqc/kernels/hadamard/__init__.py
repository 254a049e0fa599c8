"""Hadamard transforms of rows, and what stands in front of and behind them; few rows by token end in a kernel of ``rows``."""
