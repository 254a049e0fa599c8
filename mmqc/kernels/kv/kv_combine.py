"""The last kernel of kv_attention.py: parts of one query's sums, each relative to a power of two of its own, become y and lse."""

# Triton's values are no Python values to a type checker.
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false, reportPossiblyUnboundVariable=false
import triton
import triton.language as tl
from triton.language.extra import cuda

from mmqc.kernels.kv.kv_words import LOG2E, LOWEST


@triton.jit(do_not_specialize=("parts",))
def kv_combine_kernel(
    part_ptr, sum_ptr, top_ptr, y_ptr, lse_ptr, parts, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, SP: tl.constexpr,
    BP: tl.constexpr, EARLY: tl.constexpr,
):
    """One query: y [D] and lse."""
    if EARLY:
        cuda.gdc_wait()
    query = tl.program_id(0).to(tl.int64)
    first = query // G * parts * G + query % G
    s, d = tl.arange(0, SP), tl.arange(0, DP)
    sums = tl.load(sum_ptr + first + s * G, mask=s < parts, other=0.0)
    tops = tl.load(top_ptr + first + s * G, mask=s < parts, other=LOWEST)
    if SP == BP:  # all at once, and on their way before the shares are known
        here = (s < parts)[:, None] & (d < D)[None, :]
        values = tl.load(part_ptr + (first + s * G)[:, None] * D + d[None, :], mask=here, other=0.0)
    top = tl.max(tl.where(sums > 0, tops, LOWEST), 0)
    shares = tl.exp2(tl.minimum(tops - top, 0.0))
    total = tl.sum(sums * shares, 0)
    if SP == BP:
        acc = tl.sum(values * shares[:, None], 0)
    else:
        acc = tl.zeros((DP,), tl.float32)
        for start in range(0, parts, BP):
            i = start + tl.arange(0, BP)
            share = tl.exp2(tl.minimum(tl.load(top_ptr + first + i * G, mask=i < parts, other=LOWEST) - top, 0.0))
            here = (i < parts)[:, None] & (d < D)[None, :]
            values = tl.load(part_ptr + (first + i * G)[:, None] * D + d[None, :], mask=here, other=0.0)
            acc += tl.sum(values * share[:, None], 0)
    some = total > 0
    total = tl.where(some, total, 1.0)
    tl.store(y_ptr + query * D + d, tl.where(some, acc / total, 0.0).to(y_ptr.dtype.element_ty), mask=d < D)
    tl.store(lse_ptr + query, tl.where(some, (top + tl.log2(total)) / LOG2E, float("-inf")))
