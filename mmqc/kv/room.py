"""How much memory a cache takes for tokens, so that the next call finds it large enough, where it was.

A compiled step knows a cache's shapes, and a CUDA graph its addresses: where the next prompt is a little longer, both stay.
"""

from __future__ import annotations

CHUNK, QUARTERS = 64, 4
TIMES = 4  # as much memory is used again for as few tokens


def room_for(tokens: int) -> int:
    """Tokens that memory for ``tokens`` has room for: a multiple of 64, or of a quarter of the power of two below."""
    step = max(CHUNK, (1 << tokens.bit_length() - 1) // QUARTERS)
    return -(-tokens // step) * step
