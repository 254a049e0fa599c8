"""A decode step's attention to packed visual and plain text tokens (ops/kv_attention.py): three launches, nothing dequantized.

    scores and their range  ->  probabilities times values, by parts  ->  sum of the parts

Shapes:  those of the op with Q = 1; fp16 | bf16 | fp32 (interpreter)   D to 256   G = H_q / H to 16 query heads a KV head
Splits:  from capacities and the number of multiprocessors, never from counts, which are read on the device: a launch is the same
         at any length, and can be captured in a CUDA graph.
Exact:   codes exactly; q s_K and p are rounded to float16, q s_K relative to its largest entry; sums in float32.
Arch:    Ampere and newer.
"""

# A launch gives plain values to constexpr parameters, and options that are no parameters.
# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from mmqc.kernels.device_facts import ceil_div, has_inline_ptx, multiprocessors, why_not_here
from mmqc.kernels.kv_attention_tiles import kv_combine_kernel, kv_scores_kernel, kv_values_kernel
from mmqc.ops.kv_words import BITS, tokens_per_word

DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@dataclass(frozen=True)
class KVConfig:
    """``rows`` of words and ``text`` tokens a step, programs a multiprocessor, and how a program is run."""

    rows: int = 32
    text: int = 64
    per_sm: int = 8
    num_warps: int = 2
    num_stages: int = 2

    def replace(self, **changes: int) -> KVConfig:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)


def table(bits: int) -> KVConfig:
    """The answer for every shape.  Two warps keep Triton to mma.sync, whose operands are unpacked where they were loaded."""
    return KVConfig(rows=32 if bits <= 2 else 64)


def supports(
    q: Tensor, k_words: Tensor, v_words: Tensor, v_scale: Tensor, k_text: Tensor, v_text: Tensor, bits: int
) -> str | None:
    """None, or why these operands cannot be attended to here."""
    group = q.shape[1] // k_words.shape[1]
    checks = (
        (q.shape[2] == 1, f"one query a head, not {q.shape[2]}"),
        (q.dtype in DTYPES and k_text.dtype == v_text.dtype == q.dtype, f"q and text are one of {list(DTYPES)}, not {q.dtype}"),
        (bits in BITS, f"bits = {bits}: one of {BITS}"),
        (q.shape[3] == v_words.shape[2] <= 256, f"keys and values have one width of 256 at most, not {q.shape[3]}"),
        (group <= 16, f"at most 16 query heads a KV head, not {group}"),
        (k_words.is_contiguous() and v_words.is_contiguous(), "words are contiguous"),
        (q.stride(3) == 1 and k_text.stride(3) == 1 and v_text.stride(3) == 1, "channels are contiguous"),
        (v_scale.dtype == torch.float32, f"scales are float32, not {v_scale.dtype}"),
        (max(k_words.numel(), k_text.stride(0)) < 2**31, "a sequence's tokens are addressed with 32 bits"),
    )  # fmt: skip
    return next((why for ok, why in checks if not ok), None) or why_not_here(q, k_words, v_words, k_text, v_text)


def power_of_two(n: int, least: int) -> int:
    """The smallest one that holds n."""
    return max(least, 1 << (n - 1).bit_length())


def kv_attention(
    q: Tensor, k_words: Tensor, v_words: Tensor, k_scale: Tensor, k_offset: Tensor, v_scale: Tensor, v_offset: Tensor,
    visual_count: Tensor, k_text: Tensor, v_text: Tensor, text_count: Tensor, bits: int, scaling: float, tau1: float,
    tau2: float, *, config: KVConfig | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(y, lse) of the op."""
    reason = supports(q, k_words, v_words, v_scale, k_text, v_text, bits)
    if reason is not None:
        raise ValueError(f"kv_attention: {reason}")
    c = config or table(bits)
    batch, heads, rows, d = k_words.shape
    text, group = k_text.shape[2], q.shape[1] // heads
    y = torch.empty((batch, q.shape[1], 1, d), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, q.shape[1], 1), dtype=torch.float32, device=q.device)
    steps, splits = parts(rows, c.rows, batch * heads, q.device, c)
    text_steps, text_splits = parts(text, c.text, batch * heads, q.device, c)
    # tensor-core tiles have at least 8 queries and 16 channels; a query group of 3 takes 8 columns
    gp, dp, sp = power_of_two(group, 8), power_of_two(d, 16), power_of_two(splits + text_splits, 1)
    new = lambda *shape: torch.empty(shape, dtype=torch.float32, device=q.device)  # noqa: E731
    scores = new(batch * heads, rows * tokens_per_word(bits) + text, group)
    low, high, sums = (new(batch * heads, splits + text_splits, gp) for _ in range(3))
    partial = new(batch * heads, splits + text_splits, gp, d)
    shape = dict(G=group, GP=gp, D=d, DP=dp, SPLITS=splits, TEXT_SPLITS=text_splits)
    step = dict(
        BITS=bits, R=c.rows, BT=c.text, PTX=has_inline_ptx(q.device), num_warps=c.num_warps, num_stages=c.num_stages
    )
    grid = (splits + text_splits, heads, batch)
    kv_scores_kernel[grid](
        q, k_words, k_scale, k_offset, visual_count, k_text, text_count, scores, low, high, rows, text, heads, scaling,
        q.stride(0), q.stride(1), *k_text.stride()[:3], steps, text_steps, **shape, **step,
    )  # fmt: skip
    kv_values_kernel[grid](
        v_words, v_scale, v_offset, visual_count, v_text, text_count, scores, low, high, partial, sums, rows, text, heads,
        tau1, tau2, *v_text.stride()[:3], steps, text_steps, PER_TOKEN=v_scale.shape[3] == 1 and d != 1, SP=sp,
        DOT=DTYPES[q.dtype], **shape, **step,
    )  # fmt: skip
    kv_combine_kernel[(group, heads, batch)](
        partial, sums, low, high, y, lse, heads, tau1, tau2, SP=sp, num_warps=1, **shape,
    )  # fmt: skip
    return y, lse


def parts(length: int, block: int, rows: int, device: torch.device, c: KVConfig) -> tuple[int, int]:
    """(steps a program, programs) for one sequence and KV head, so that some programs run on every multiprocessor."""
    blocks = ceil_div(length, block)
    splits = max(1, min(blocks, ceil_div(c.per_sm * multiprocessors(device), rows)))
    steps = ceil_div(blocks, splits)
    return steps, ceil_div(blocks, steps) if steps else 0
