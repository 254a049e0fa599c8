"""weight_only_matmul of a few rows on the CPU: one pass over the stored weight, nothing of it written to memory.

    y[m, n] = sum over i, j, t of  s[n, k // g] q[n, k] x[m, k]        k = t L + i c + j,  j < c

Shapes:  x [M, K], M <= 16   byte [N, ...] holds q[n, t L + j], t < 4 for 2 and 3 bits, t < 2 for 4 (ops/pack.py)
         8 bits: L = K and t = 0 alone   s [N, ceil(K/g)];   g = 0: s[n] is a factor of the sum
Why:     a decode step reads every weight once and uses it M times, so bytes are what it costs: K b/8 a row instead of the 4 K
         that dequantizing writes and the 4 K that a matmul reads back.
Exact:   codes, scales and sums in float32 (float64 for float64 inputs), one rounding to x's dtype at the end; the weight is
         not rounded to it in between as the reference does.

Codes of 2, 4 and 8 bits in float32 are few_rows_cpp.py's, where it takes them.  Else the loops are (n; i, j): n over threads,
j over lanes, and the scale a scalar there.  That takes chunks of c columns that lie in one group in every stretch of a row,
c = gcd(g, L) (of L/2 for 3 bits), and c >= 16 to fill a vector.  The rows of x are one reduction each over the same loops: the
scheduler makes one loop nest of them, which reads and unpacks a byte once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from sympy import Integer

from mmqc.lowering import few_rows_cpp
from mmqc.lowering.inductor import FloorDiv, ModularIndexing, Pointwise, TensorBox, convert, lowerings, ops, row_sums, static_int
from mmqc.lowering.pack import field
from mmqc.ops.pack import STRETCHES, offset, stretch

aten = torch.ops.aten

MAX_ROWS = 16  # one accumulator each; with more the matmul's reuse of a tile wins
LANES = 16  # float32 in the widest CPU vector


def chunk_of(width: int, weight_bits: int, group_size: int) -> int:
    """Columns of a stretch whose codes have one scale in every stretch, and their bits in the same places."""
    length = stretch(width, weight_bits)
    length = length // 2 if weight_bits == 3 else length
    return math.gcd(group_size, length) if group_size else length


def is_few(rows: Any) -> bool:
    """Whether the number of rows is known and small; a graph for any number of rows has to be good for prefill."""
    return isinstance(rows, int | Integer) and 0 < rows <= MAX_ROWS


def why_not(rows: Any, width: int, weight_bits: int, group_size: int) -> str | None:
    """None, or why few rows are multiplied with a dequantized copy of the weight; many rows are, and it is no fallback."""
    if not is_few(rows) or not group_size or chunk_of(width, weight_bits, group_size) >= LANES:
        return None
    return (
        f"groups of {group_size} and stretches of {stretch(width, weight_bits)} columns have no common chunk of {LANES} columns: "
        "the weight is dequantized into memory"
    )


def codes(load: Callable[[Sequence[Any]], Any], n: Any, i: Any, j: Any, chunk: int, bits: int, length: int) -> list[Any]:
    """Codes of column i c + j of every stretch, in int32: its lanes are those of the float that comes next."""
    column = i * chunk + j
    if bits == 8:
        return [ops.to_dtype(load([n, column]), torch.int32)]
    low, plain = ops.to_dtype(load([n, column]), torch.int32), 2 if bits == 3 else bits
    found = [field(low, plain * t, plain) for t in range(8 // plain)]
    if bits == 3:
        half = length // 2
        high = ops.to_dtype(load([n, length + ModularIndexing(i, 1, half // chunk) * chunk + j]), torch.int32)
        place = FloorDiv(i, Integer(half // chunk))  # a chunk lies in one half of its stretch
        tops = [ops.mul(field(high, 2 * t + place, 1), ops.constant(4, torch.int32)) for t in range(4)]
        found = [ops.add(u, top) for u, top in zip(found, tops, strict=True)]
    return [ops.sub(u, ops.constant(offset(bits), torch.int32)) for u in found]


def multiply(
    x: TensorBox, w_q: TensorBox, w_scale: TensorBox, bias: TensorBox | None, weight_bits: int, group_size: int
) -> TensorBox:
    """The formula for x [M, K], where ``why_not`` has nothing against it."""
    rows, width = (static_int(size) for size in x.get_size())
    n, length = static_int(w_q.get_size()[0]), stretch(width, weight_bits)
    chunk, count = chunk_of(width, weight_bits, group_size), STRETCHES[weight_bits]
    dtype, wide = x.get_dtype(), torch.promote_types(x.get_dtype(), torch.float32)
    x = convert(x, wide)
    if width < count * length:
        x = lowerings[aten.constant_pad_nd.default](x, [0, count * length - width], 0)  # what the last bytes have to spare
    x.realize()  # else what produced x is computed again for every output channel
    if few_rows_cpp.takes(x, w_q, w_scale, weight_bits):
        y = few_rows_cpp.multiply(x, w_q, w_scale, weight_bits, group_size, chunk)
        y = lowerings[aten.view.default](y, [rows, n])
        return scaled(y, w_scale, bias, group_size, wide, dtype)
    load_x, load_w, load_scale = x.make_loader(), w_q.make_loader(), w_scale.make_loader()

    def term(m: int) -> Callable[[Sequence[Any], Sequence[Any]], Any]:
        def inner(index: Sequence[Any], reduced: Sequence[Any]) -> Any:
            (channel,), (i, j) = index, reduced
            total = None
            for t, value in enumerate(codes(load_w, channel, i, j, chunk, weight_bits, length)):
                value = ops.mul(ops.to_dtype(value, wide), load_x([Integer(m), t * length + i * chunk + j]))
                if group_size:
                    # chunk divides both, so the quotient is one of whole chunks
                    group: Any = FloorDiv(t * (length // chunk) + i, Integer(group_size // chunk))
                    value = ops.mul(value, ops.to_dtype(load_scale([channel, group]), wide))
                total = value if total is None else ops.add(total, value)
            return total

        return inner

    sums = [row_sums(x, wide, term(m), n, [length // chunk, chunk]) for m in range(rows)]
    return scaled(_rows(sums, n), w_scale, bias, group_size, wide, dtype)


def _rows(sums: Sequence[TensorBox], n: int) -> TensorBox:
    """[M, N] of M sums [N]; Inductor's own ``cat`` may ask for the value of the node, which is a list where linears are fused."""
    loaders = [s.make_loader() for s in sums]

    def inner(index: Sequence[Any]) -> Any:
        row, channel = index
        value = loaders[-1]([channel])
        for number, load in reversed(list(enumerate(loaders[:-1]))):
            here = ops.eq(ops.index_expr(row, torch.int32), ops.constant(number, torch.int32))
            value = ops.where(here, load([channel]), value)
        return value

    return Pointwise.create(device=sums[0].get_device(), dtype=sums[0].get_dtype(), inner_fn=inner, ranges=[len(sums), n])


def scaled(
    y: TensorBox, w_scale: TensorBox, bias: TensorBox | None, group_size: int, wide: torch.dtype, dtype: torch.dtype
) -> TensorBox:
    """Sums [M, N] times the scales of channels, the bias added, in x's dtype."""
    if not group_size:
        y = lowerings[aten.mul.Tensor](y, convert(w_scale, wide))
    if bias is not None:
        y = lowerings[aten.add.Tensor](y, convert(bias, wide))
    return convert(y, dtype)
