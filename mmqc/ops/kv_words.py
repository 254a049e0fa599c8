"""Codes of cached keys and values in bytes: a byte of keys has 8/b tokens of one channel, one of values 8/b channels of one token.

    keys    byte[m, c]  = (sum over t < P of  u[m P + t, c] << (b t)) xor 128       P = 8/b,  b = 1, 2, 4, 8
    values  byte[c', n] = (sum over v < P of  u[n, c' P + v] << (b v)) xor 128

Shapes:  u integer [..., N, D], 0 <= u < 2^b, for values D a multiple of P
         keys are stored as int16 words [..., R, D], whose bytes in memory are [..., 2 R, D]; values as [..., D, R], whose bytes
         are [..., D b/8, N'];  N' = N rounded up to 16 tokens, R = N' b/16
Why:     ``byte & (2^b - 1) << b t`` is u 2^(b t): one AND makes four 8-bit tensor-core operands of a register.  The factor 2^(b t)
         is one number for all that a byte's place holds; keys share a byte along tokens and values along channels, so that it goes
         to the score and to the output, never into a sum.  The tensor cores' bytes are signed, and the highest place has the sign:
         with its top bit flipped, it is worth (u - 2^(b-1)) 2^(8-b), and what is missing is one number for the query.
         Appendix A.1 of CalibQuant (arXiv:2502.14882) packs keys along channels, too, and looks every code up.
"""

from __future__ import annotations

import torch
from torch import Tensor

BITS = (1, 2, 4, 8)
BLOCK = 16  # tokens: b words of a channel


def tokens_per_word(bits: int) -> int:
    """Codes in one word."""
    return 16 // bits


def words_for(tokens: int, bits: int) -> int:
    """R: words of one channel for so many tokens."""
    return -(-tokens // BLOCK) * bits


def pack_words(codes: Tensor, bits: int, transposed: bool = False) -> Tensor:
    """Codes [..., N, D] -> int16 [..., R, D] of keys or, ``transposed``, [..., D, R] of values; spare tokens are the code 0."""
    check_bits(bits)
    per_byte, (tokens, width) = 8 // bits, codes.shape[-2:]
    rows = words_for(tokens, bits)
    u = torch.nn.functional.pad(codes.to(torch.int32), (0, 0, 0, rows * tokens_per_word(bits) - tokens))
    u = (u.mT if transposed else u).unflatten(-2, (-1, per_byte))
    shifts = bits * torch.arange(per_byte, device=codes.device, dtype=torch.int32)
    packed = (u << shifts[:, None]).sum(-2, dtype=torch.int32) ^ 128
    packed = (packed - ((packed >> 7) << 8)).to(torch.int8).contiguous()
    shape = (*codes.shape[:-2], *((width, rows) if transposed else (rows, width)))
    return packed.flatten(-2).view(torch.int16).view(shape)


def unpack_words(words: Tensor, bits: int, transposed: bool = False) -> Tensor:
    """int16 [..., R, D], ``transposed`` [..., D, R] -> codes int16 [..., N', D]."""
    rows, width = words.shape[-2:] if not transposed else (words.shape[-1], words.shape[-2])
    tokens = rows * tokens_per_word(bits)
    inner = (width * bits // 8, tokens) if transposed else (2 * rows, width)
    packed = words.contiguous().view(torch.int8).reshape(*words.shape[:-2], *inner)
    shifts = bits * torch.arange(8 // bits, device=words.device, dtype=torch.int32)
    u = ((packed.to(torch.int32) ^ 128).unsqueeze(-2) >> shifts[:, None]) & (2**bits - 1)
    u = u.to(torch.int16).flatten(-3, -2)
    return u.mT if transposed else u


def check_bits(bits: int) -> None:
    """Raise unless words hold codes of so many bits."""
    if bits not in BITS:
        raise ValueError(f"bits = {bits}: cached tokens are packed with 1, 2, 4 or 8 bits")


def check_width(width: int, bits: int) -> None:
    """Raise unless values of so many channels fill bytes."""
    if width % (8 // bits):
        raise ValueError(f"values have {width} channels: with {bits} bits, a multiple of {8 // bits} can be packed")
