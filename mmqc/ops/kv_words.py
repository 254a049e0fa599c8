"""Codes of cached keys and values in 16-bit words: a word holds 16/b tokens of one channel.

    word[r, c] = sum over t < P of  u[r P + t, c] << (b t)        P = 16/b,  b = 1, 2, 4, 8

Shapes:  u integer [..., N, D], 0 <= u < 2^b   words int16 [..., ceil(N/P), D]; values are stored transposed, [..., D, ceil(N/P)]
Why:     tokens share a word, channels do not.  ``word & (2^b - 1) << b t`` with b t < 8 is, read as a float16, the subnormal
         u 2^(b t - 24): two codes of the neighbours in a 32-bit register become tensor-core operands by one AND, and their factor
         2^(b t - 24) is one number per word's place, which goes to the score (keys) or to the probability (values).
         Appendix A.1 of CalibQuant (arXiv:2502.14882) packs along channels and looks every code up.
"""

from __future__ import annotations

import torch
from torch import Tensor

BITS = (1, 2, 4, 8)


def tokens_per_word(bits: int) -> int:
    """P: codes in one word."""
    return 16 // bits


def words_for(tokens: int, bits: int) -> int:
    """Words of one channel that hold so many tokens."""
    return -(-tokens // tokens_per_word(bits))


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Codes [..., N, D] -> int16 [..., ceil(N/P), D]; what the last word has to spare is the code 0."""
    per_word, (tokens, width) = tokens_per_word(bits), codes.shape[-2:]
    rows = words_for(tokens, bits)
    u = torch.nn.functional.pad(codes.to(torch.int32), (0, 0, 0, rows * per_word - tokens))
    u = u.unflatten(-2, (rows, per_word))
    shifts = bits * torch.arange(per_word, device=codes.device, dtype=torch.int32)
    words = (u << shifts[:, None]).sum(-2, dtype=torch.int32)
    return (words - ((words >> 15) << 16)).to(torch.int16).reshape(*codes.shape[:-2], rows, width)


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """int16 [..., R, D] -> codes int16 [..., R P, D]."""
    per_word = tokens_per_word(bits)
    shifts = bits * torch.arange(per_word, device=words.device, dtype=torch.int32)
    u = (words.to(torch.int32).unsqueeze(-2) >> shifts[:, None]) & (2**bits - 1)
    return u.to(torch.int16).flatten(-3, -2)


def check_bits(bits: int) -> None:
    """Raise unless words hold codes of so many bits."""
    if bits not in BITS:
        raise ValueError(f"bits = {bits}: cached tokens are packed with 1, 2, 4 or 8 bits")
