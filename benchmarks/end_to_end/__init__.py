"""Whole models: compiling, generating, quantizing, decoding."""
