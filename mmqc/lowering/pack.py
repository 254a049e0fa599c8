"""Unpacking codes of 2, 3 or 4 bits as pointwise IR: contiguous stretches, one after the other (ops/pack.py).

    q[n, t, j] = (byte[n, j] >> b t & 2^b - 1) - 2^(b-1)        t < 8/b;  [N, 8/b, L] read as [N, K]
    3 bits: two bits like that, the third from another byte of the row

Shapes:  byte uint8 [N, packed_width(K, b)]   q int8 [N, K]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mmqc.lowering.inductor import FloorDiv, ModularIndexing, Pointwise, TensorBox, lowerings, ops, static_int
from mmqc.ops.pack import STRETCHES, offset, stretch


def field(word: Any, shift: Any, bits: int) -> Any:
    """``bits`` of an int32 from ``shift`` on."""
    moved = ops.bitwise_right_shift(word, ops.index_expr(shift, torch.int32))
    return ops.bitwise_and(moved, ops.constant(2**bits - 1, torch.int32))


def code(load: Callable[[Sequence[Any]], Any], n: Any, t: Any, j: Any, bits: int, length: int) -> Any:
    """Code j of stretch t in int32.  In int32 a vector takes a shift of its own; uint8 is shifted lane by lane (torch 2.13)."""
    plain = 2 if bits == 3 else bits  # bits of a byte that belong to one code
    word = lambda at: ops.to_dtype(load([n, at]), torch.int32)  # noqa: E731
    low = field(word(j), plain * t, plain)
    if bits == 3:
        half = length // 2
        high = field(word(length + ModularIndexing(j, 1, half)), 2 * t + FloorDiv(j, half), 1)
        low = ops.add(low, ops.mul(high, ops.constant(4, torch.int32)))
    return ops.sub(low, ops.constant(offset(bits), torch.int32))


def unpack(w_q: TensorBox, width: int, weight_bits: int) -> TensorBox:
    """Stored weight -> int8 codes [N, width]."""
    if weight_bits == 8:
        return w_q
    rows, length = static_int(w_q.get_size()[0]), stretch(width, weight_bits)
    count = STRETCHES[weight_bits]
    load = w_q.make_loader()

    def inner(index: Sequence[Any]) -> Any:
        n, t, j = index  # t is an outer loop, so its shift is a scalar there, and j runs over lanes
        return ops.to_dtype(code(load, n, t, j, weight_bits, length), torch.int8)

    codes = Pointwise.create(device=w_q.get_device(), dtype=torch.int8, inner_fn=inner, ranges=[rows, count, length])
    # A buffer of three axes: fused into a flat view, t would become a division per element.
    codes.realize()
    codes = lowerings[torch.ops.aten.view.default](codes, [rows, count * length])
    return codes if count * length == width else lowerings[torch.ops.aten.slice.Tensor](codes, 1, 0, width)
