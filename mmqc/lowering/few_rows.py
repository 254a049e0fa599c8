"""weight_only_matmul of a few rows on the CPU: one pass over the stored weight, nothing of it written to memory.

    y[m, n] = sum over i, j, t of  s[n, k // g] q[n, k] x[m, k]        k = t h + i c + j,  t in {0, 1},  j < c

Shapes:  x [M, K], M <= 16   byte [N, h] holds q[n, k] and q[n, h + k], h = ceil(K/2)   s [N, ceil(K/g)]
         8 bits: h = K and t = 0 alone;   g = 0: s[n] is a factor of the sum
Why:     a decode step reads every weight once and uses it M times, so bytes are what it costs: K/2 a row instead of the 4 K
         that dequantizing writes and the 4 K that a matmul reads back.
Exact:   codes, scales and sums in float32 (float64 for float64 inputs), one rounding to x's dtype at the end; the weight is
         not rounded to it in between as the reference does.

The loops are (n; i, j): n over threads, j over lanes, and the scale a scalar there.  That takes chunks of c columns that lie
in one group in both halves of a row, c = gcd(g, h), and c >= 16 to fill a vector.  The rows of x are one reduction each over
the same loops: the scheduler makes one loop nest of them, which reads and unpacks a byte once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from sympy import Integer

from mmqc.lowering.inductor import FloorDiv, TensorBox, convert, lowerings, ops, row_sums, static_int
from mmqc.ops.pack import OFFSET, packed_width

aten = torch.ops.aten

MAX_ROWS = 16  # one accumulator each; with more the matmul's reuse of a tile wins
LANES = 16  # float32 in the widest CPU vector


def chunk_of(stored: int, group_size: int) -> int:
    """Columns of a stored row whose codes have one scale (two, one per nibble)."""
    return math.gcd(group_size, stored) if group_size else stored


def is_few(rows: Any) -> bool:
    """Whether the number of rows is known and small; a graph for any number of rows has to be good for prefill."""
    return isinstance(rows, int | Integer) and 0 < rows <= MAX_ROWS


def why_not(rows: Any, width: int, weight_bits: int, group_size: int) -> str | None:
    """None, or why few rows are multiplied with a dequantized copy of the weight; many rows are, and it is no fallback."""
    stored = packed_width(width, weight_bits)
    if not is_few(rows) or not group_size or chunk_of(stored, group_size) >= LANES:
        return None
    return (
        f"groups of {group_size} and stored rows of {stored} bytes have no common chunk of {LANES} columns: the weight is "
        "dequantized into memory"
    )


def _codes(byte: Any, weight_bits: int, dtype: torch.dtype) -> list[Any]:
    """The codes of a stored byte: of its column, and for 4 bits of the column half a row further."""
    if weight_bits == 8:
        return [ops.to_dtype(byte, dtype)]
    # int32, not uint8: its lanes are those of the float that comes next, so one byte load feeds both streams.
    word = ops.to_dtype(byte, torch.int32)
    low = ops.bitwise_and(word, ops.constant(15, torch.int32))
    high = ops.bitwise_right_shift(word, ops.constant(4, torch.int32))
    return [ops.to_dtype(ops.sub(v, ops.constant(OFFSET, torch.int32)), dtype) for v in (low, high)]


def multiply(
    x: TensorBox, w_q: TensorBox, w_scale: TensorBox, bias: TensorBox | None, weight_bits: int, group_size: int
) -> TensorBox:
    """The formula for x [M, K], where ``why_not`` has nothing against it."""
    rows, width = (static_int(size) for size in x.get_size())
    n, stored = (static_int(size) for size in w_q.get_size())
    chunk = chunk_of(stored, group_size)
    dtype, wide = x.get_dtype(), torch.promote_types(x.get_dtype(), torch.float32)
    x = convert(x, wide)
    if weight_bits == 4 and width % 2:
        x = lowerings[aten.constant_pad_nd.default](x, [0, 1], 0)  # the column of the odd row's spare nibble
    x.realize()  # else what produced x is computed again for every output channel
    load_x, load_w, load_scale = x.make_loader(), w_q.make_loader(), w_scale.make_loader()

    def term(m: int) -> Callable[[Sequence[Any], Sequence[Any]], Any]:
        def inner(index: Sequence[Any], reduced: Sequence[Any]) -> Any:
            (channel,), (i, j) = index, reduced
            total = None
            for half, code in enumerate(_codes(load_w([channel, i * chunk + j]), weight_bits, wide)):
                value = ops.mul(code, load_x([Integer(m), half * stored + i * chunk + j]))
                if group_size:
                    # chunk divides both, so the quotient is one of whole chunks
                    group: Any = FloorDiv(half * (stored // chunk) + i, Integer(group_size // chunk))
                    value = ops.mul(value, ops.to_dtype(load_scale([channel, group]), wide))
                total = value if total is None else ops.add(total, value)
            return total

        return inner

    sums = [row_sums(x, wide, term(m), n, [stored // chunk, chunk]) for m in range(rows)]
    y = lowerings[aten.cat.default]([lowerings[aten.view.default](s, [1, n]) for s in sums], 0)
    if not group_size:
        y = lowerings[aten.mul.Tensor](y, convert(w_scale, wide))
    if bias is not None:
        y = lowerings[aten.add.Tensor](y, convert(bias, wide))
    return convert(y, dtype)
