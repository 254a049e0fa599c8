"""Codes of 2, 3 or 4 bits in bytes: stretches of a row lie side by side in the bits of one byte.

    u = q + 2^(b-1)
    4 bits   byte[j] = u[j] | u[j + L] << 4                                            L = ceil(K/2)
    2 bits   byte[j] = u[j] | u[j + L] << 2 | u[j + 2 L] << 4 | u[j + 3 L] << 6        L = ceil(K/4)
    3 bits   the two low bits like that with L = 2 E, then the high ones in E more bytes,  E = ceil(K/8):
             byte[L + i] = sum over t < 8 of (u[i + t E] >> 2) << t

Shapes:  q int8 [N, K], -2^(b-1) <= q < 2^(b-1)   packed uint8 [N, packed_width(K, b)]
Why:     the codes of a byte are a stretch apart, not neighbours, so unpacking is contiguous streams (no interleaving of lanes,
         on CPU and GPU alike).  Codes are offset, so none needs its sign extended.  Columns past K are the code 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

PACKED = (2, 3, 4)
FLOAT8 = torch.float8_e4m3fn  # codes of 8 bits may be floats
STRETCHES = {2: 4, 3: 4, 4: 2, 8: 1}  # of a row, stored in the same bytes


def stored_bits(bits: int, integer_inputs: bool) -> int:
    """In how many bits a code of ``bits`` is stored: with quantized inputs 4 or 8, which is what tensor cores are fed from."""
    if bits > 4:
        return 8
    return 4 if integer_inputs or bits not in PACKED else bits


def offset(bits: int) -> int:
    """What is added to a code of so many bits before it is stored."""
    return 2 ** (bits - 1)


def stretch(width: int, bits: int) -> int:
    """L: columns of a row that are stored in the same bits of their bytes."""
    return {2: -(-width // 4), 3: 2 * -(-width // 8), 4: -(-width // 2), 8: width}[bits]


def packed_width(width: int, bits: int) -> int:
    """Bytes that a row of ``width`` codes takes."""
    return stretch(width, bits) * 3 // 2 if bits == 3 else stretch(width, bits)


def _planes(u: Tensor, bits: int, length: int) -> Tensor:
    """Stretches of ``length`` columns or-ed together, each ``bits`` further up."""
    parts = u.split(length, dim=-1)
    return torch.stack([part << (bits * t) for t, part in enumerate(parts)]).sum(0).to(torch.uint8)


def pack(q: Tensor, bits: int) -> Tensor:
    """Int8 codes [..., K] -> bytes [..., packed_width(K, bits)]."""
    width, length = q.shape[-1], stretch(q.shape[-1], bits)
    u = (q.to(torch.int16) + offset(bits)).to(torch.int32)
    u = torch.nn.functional.pad(u, (0, STRETCHES[bits] * length - width), value=offset(bits))
    if bits == 3:
        return torch.cat((_planes(u & 3, 2, length), _planes(u >> 2, 1, length // 2)), dim=-1)
    return _planes(u, bits, length)


def pack_int4(q: Tensor) -> Tensor:
    """Pack codes of 4 bits."""
    return pack(q, 4)


def _streams(packed: Tensor, bits: int, count: int) -> Tensor:
    mask = 2**bits - 1
    return torch.cat([(packed >> (bits * t)) & mask for t in range(count)], dim=-1)


def unpack(w_q: Tensor, width: int, bits: int) -> Tensor:
    """Stored weight -> int8 codes [..., width]."""
    if bits == 8:
        return w_q
    length = stretch(width, bits)
    if bits == 3:
        u = _streams(w_q[..., :length], 2, 4) | (_streams(w_q[..., length:], 1, 8) << 2)
    else:
        u = _streams(w_q, bits, 8 // bits)
    return u[..., :width].to(torch.int8) - offset(bits)


def check_packed(w_q: Tensor, width: int, weight_bits: int) -> None:
    """Raise unless ``w_q`` is a stored weight of ``width`` input channels."""
    if weight_bits not in (*PACKED, 8):
        raise ValueError(f"weight_bits = {weight_bits}: a weight is stored in 2, 3, 4 or 8 bits")
    dtype = torch.uint8 if weight_bits != 8 else FLOAT8 if w_q.dtype == FLOAT8 else torch.int8
    if w_q.dtype != dtype or w_q.dim() != 2 or w_q.shape[1] != packed_width(width, weight_bits):
        raise ValueError(
            f"a {weight_bits}-bit weight for inputs of width {width} is {dtype} [N, {packed_width(width, weight_bits)}], "
            f"not {w_q.dtype} {list(w_q.shape)}"
        )
