"""A token of keys or values in bytes: the codes of its parts, their scales and their offsets, side by side.

    row = pack(q_1) … pack(q_P)  s_1 … s_P  o_1 … o_P          (pack.py: 2, 3 or 4 bits; more take a byte)

Shapes:  q int8 [..., D], ``widths[p]`` channels in ``bits[p]``   s, o float32 [..., P]   row uint8 [..., ``row_bytes``]
Why:     a row is a token, so what a cache does with tokens (append, cut, reorder, repeat) it does with rows, whatever they hold.
Size:    D = 128 in 112 channels of 4 bits and 16 of 8 is 56 + 16 + 16 = 88 bytes; 256 in 16 bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmqc.ops.pack import PACKED, pack, packed_width, unpack

Quantized = tuple[Tensor, Tensor, Tensor]


def _stored(bits: int) -> int:
    return bits if bits in PACKED else 8


def row_bytes(widths: Sequence[int], bits: Sequence[int]) -> int:
    """Bytes of a row."""
    return sum(packed_width(w, _stored(b)) for w, b in zip(widths, bits, strict=True)) + 8 * len(widths)


def to_rows(q: Tensor, scale: Tensor, offset: Tensor, widths: Sequence[int], bits: Sequence[int]) -> Tensor:
    """Codes [..., D], scales and offsets [..., P] as rows of bytes."""
    parts = [
        pack(part, _stored(b)) if b in PACKED else part.contiguous().view(torch.uint8)
        for part, b in zip(q.split(list(widths), -1), bits, strict=True)
    ]
    numbers = torch.cat((scale, offset), -1).to(torch.float32).contiguous().view(torch.uint8)
    return torch.cat((*parts, numbers), -1)


def from_rows(rows: Tensor, widths: Sequence[int], bits: Sequence[int]) -> Quantized:
    """What ``to_rows`` was given."""
    sizes = [packed_width(w, _stored(b)) for w, b in zip(widths, bits, strict=True)]
    *parts, numbers = rows.split([*sizes, 8 * len(widths)], -1)
    codes = [
        unpack(part, w, b) if b in PACKED else part.contiguous().view(torch.int8)
        for part, w, b in zip(parts, widths, bits, strict=True)
    ]
    scale, offset = numbers.contiguous().view(torch.float32).chunk(2, -1)
    return torch.cat(codes, -1), scale, offset
