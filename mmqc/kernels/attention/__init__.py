"""Attention of many rows of queries at once."""
