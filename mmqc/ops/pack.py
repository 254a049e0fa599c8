"""Two int4 codes in a byte.

    byte[n, j] = (q[n, j] + 8) | (q[n, j + h] + 8) << 4        h = ceil(K / 2),  q in [-8, 7]

Shapes:  q int8 [N, K]   packed uint8 [N, h]
Why:     the two nibbles of a byte are half a row apart, not neighbours, so unpacking is two contiguous streams (no
         interleaving of lanes, on CPU and GPU alike).  Codes are offset by 8, so a nibble needs no sign extension.
         The last high nibble of an odd row is the code 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

OFFSET = 8


def pack_int4(q: Tensor) -> Tensor:
    """Pack int8 codes in [-8, 7] along the last axis."""
    width = q.shape[-1]
    half = (width + 1) // 2
    nibbles = (q.to(torch.int16) + OFFSET).to(torch.uint8)
    low, high = nibbles[..., :half], nibbles[..., half:]
    if width % 2:
        high = torch.nn.functional.pad(high, (0, 1), value=OFFSET)
    return low | (high << 4)


def unpack_int4(packed: Tensor, width: int) -> Tensor:
    """The int8 codes of a packed row of ``width`` columns."""
    low, high = packed & 15, packed >> 4
    return torch.cat((low, high), dim=-1)[..., :width].to(torch.int8) - OFFSET


def packed_width(width: int, weight_bits: int) -> int:
    """Bytes that a row of ``width`` codes takes."""
    return (width + 1) // 2 if weight_bits == 4 else width


def unpack(w_q: Tensor, width: int, weight_bits: int) -> Tensor:
    """Stored weight -> int8 codes [N, width]."""
    return unpack_int4(w_q, width) if weight_bits == 4 else w_q


def check_packed(w_q: Tensor, width: int, weight_bits: int) -> None:
    """Raise unless ``w_q`` is a stored weight of ``width`` input channels."""
    if weight_bits not in (4, 8):
        raise ValueError(f"weight_bits = {weight_bits}: a weight is stored in 4 or 8 bits")
    dtype = torch.uint8 if weight_bits == 4 else torch.int8
    if w_q.dtype != dtype or w_q.dim() != 2 or w_q.shape[1] != packed_width(width, weight_bits):
        raise ValueError(
            f"a {weight_bits}-bit weight for inputs of width {width} is {dtype} [N, {packed_width(width, weight_bits)}], "
            f"not {w_q.dtype} {list(w_q.shape)}"
        )
