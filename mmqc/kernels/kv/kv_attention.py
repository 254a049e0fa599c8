"""A decode step's attention to packed visual and plain text tokens (ops/kv_attention.py): nothing is dequantized.

    [visual scores and their range, where g needs it]  ->  parts of the sums  ->  sum of the parts

Shapes:  those of the op with Q = 1; fp16 | bf16 (fp32 in the interpreter)   D to 256   G = H_q / H to 16 query heads a KV head
Splits:  from capacities and the number of multiprocessors, never from counts, which are read on the device: a launch is the same
         at any length, and can be captured in a CUDA graph.
Exact:   integer dot products.  Rounded are q s_K, to 16 bits relative to its largest entry, and p, to multiples of 1 / 32512 of the
         power of two above the largest p of a part (calibrated, of the sequence): a visual token with less than 2^-16 of that
         counts as nothing.  With a scale per token, the product of the two is rounded.
Memory:  the parts' sums; and where g needs a range, 4 bytes for every score of one layer's call: K again would be more work.
Why:     one AND unpacks four codes to one register of a tensor-core operand (kv_words.py), which 16-bit operands would need two
         for; the digits of q and p fill the eight columns that four queries would leave half empty.
Arch:    Ampere and newer.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from mmqc.kernels.kv.kv_attention_tiles import kv_parts_kernel, kv_range_of_scores_kernel
from mmqc.kernels.kv.kv_combine import kv_combine_kernel
from mmqc.kernels.shared.device_facts import INTERPRETED, capability, ceil_div, multiprocessors, power_of_two, why_not_here
from mmqc.kernels.shared.plan import Refusal
from mmqc.ops.kv_words import BITS, tokens_per_word

DTYPES = (torch.float16, torch.bfloat16, *((torch.float32,) if INTERPRETED else ()))


@dataclass(frozen=True)
class KVConfig:
    """How the launches share the device.

    Attributes:
        per_sm: programs of one warp a multiprocessor.
        range_per_sm: the same of the launch for scores and their range, whose threads have fewer registers.
        registers: a thread's at most; 0: any.
        text: tokens a step.
        ahead: in that launch, load a step's keys under the step before it.
        early: start a launch before the one before it has ended (programmatic dependent launch; Hopper and newer).
    """

    per_sm: int = 16
    range_per_sm: int = 16
    registers: int = 0
    text: int = 16
    ahead: bool = False
    early: bool = False

    def replace(self, **changes: int) -> KVConfig:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)


def table(bits: int, chunks: int = 2, queries: int = 4, ranged: bool = False) -> KVConfig:
    """The answer for ``chunks`` of 64 channels and ``queries``, at least 4, a KV head: what was fastest on an H100.

    Wider heads and more queries were not timed: few programs, for threads with many registers.
    """
    if bits > 4 or chunks > 2 or queries > 4:
        return KVConfig(per_sm=6)
    if bits == 1:
        return KVConfig(per_sm=12) if ranged else KVConfig(per_sm=16, registers=128)
    return KVConfig(per_sm=20) if bits == 4 and not ranged else KVConfig(per_sm=12, registers=128, ahead=True)


def rows_a_step(bits: int) -> int:
    """Byte rows of keys that a step reads: 64 tokens, 128 at 1 bit, for at least the 16 rows of a tensor-core tile."""
    return max(16, 8 * bits)


def why_not(
    q: Tensor, k_words: Tensor, v_words: Tensor, v_scale: Tensor, k_text: Tensor, v_text: Tensor, bits: int
) -> str | None:
    """None, or why these operands cannot be attended to here."""
    group = q.shape[1] // k_words.shape[1]
    checks = (
        (q.shape[2] == 1, f"one query a head, not {q.shape[2]}"),
        (q.dtype in DTYPES and k_text.dtype == v_text.dtype == q.dtype, f"q and text are one of {DTYPES}, not {q.dtype}"),
        (bits in BITS, f"bits = {bits}: one of {BITS}"),
        (q.shape[3] == v_words.shape[2] <= 256, f"keys and values have one width of 256 at most, not {q.shape[3]}"),
        (group <= 16, f"at most 16 query heads a KV head, not {group}"),
        (k_words.is_contiguous() and v_words.is_contiguous(), "words are contiguous"),
        (q.stride(3) == 1 and k_text.stride(3) == 1 and v_text.stride(3) == 1, "channels are contiguous"),
        (v_scale.dtype == torch.float32, f"scales are float32, not {v_scale.dtype}"),
        (k_words.shape[2] * tokens_per_word(bits) <= 2**17, "the sums of 131,072 tokens fill 32 bits"),
        (k_text.stride(0) < 2**31 and v_text.stride(0) < 2**31, "a sequence's text is addressed with 32 bits"),
    )
    return next((why for ok, why in checks if not ok), None) or why_not_here(q, k_words, v_words, k_text, v_text)


def kv_attention(
    q: Tensor, k_words: Tensor, v_words: Tensor, k_scale: Tensor, k_offset: Tensor, v_scale: Tensor, v_offset: Tensor,
    visual_count: Tensor, k_text: Tensor, v_text: Tensor, text_count: Tensor, bits: int, scaling: float, tau1: float,
    tau2: float, *, config: KVConfig | None = None,
) -> tuple[Tensor, Tensor] | Refusal:
    """(y, lse) of the op, or why it is not had here."""
    if reason := why_not(q, k_words, v_words, v_scale, k_text, v_text, bits):
        return Refusal(reason)
    batch, heads, words, d = k_words.shape
    rows, tokens, text, group = rows_a_step(bits), words * tokens_per_word(bits), k_text.shape[2], q.shape[1] // heads
    y = torch.empty((batch, q.shape[1], 1, d), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, q.shape[1], 1), dtype=torch.float32, device=q.device)
    # tensor-core tiles have 16 rows and 8 columns: two digits of 4 queries
    gp, chunks, ranged = power_of_two(group, 4), power_of_two(ceil_div(d, 64), 1), tau1 != tau2
    c = config or table(bits, chunks, gp, ranged)
    early = c.early and capability(q.device) >= 90
    step, each = rows * 8 // bits, multiprocessors(q.device) / (batch * heads)
    steps, splits, text_splits = parts(ceil_div(tokens, step), ceil_div(text, c.text), int(c.per_sm * each))
    range_steps, ranges, _ = parts(ceil_div(tokens, step), 0, int(c.range_per_sm * each) if ranged else 0)
    new = lambda *shape: torch.empty(shape, dtype=torch.float32, device=q.device)  # noqa: E731
    low, high = (new(batch * heads, ranges if ranged else 0, gp) for _ in range(2))
    scores = new(batch * heads, ceil_div(tokens, step) * step if ranged else 0, gp)
    part = new(batch * heads, splits + text_splits, group, d)
    sums, tops = (new(batch * heads, splits + text_splits, group) for _ in range(2))
    shape = dict(BITS=bits, G=group, GP=gp, D=d, C=chunks, R=rows, EARLY=early, num_warps=1)
    follows = {"launch_pdl": True} if early else {}
    k_bytes, v_bytes = k_words.view(torch.int8), v_words.view(torch.int8)
    if ranged and splits:
        kv_range_of_scores_kernel[(ranges, heads, batch)](
            q, k_bytes, k_scale, k_offset, visual_count, low, high, scores, 2 * words, heads, scaling, q.stride(0), q.stride(1),
            range_steps, ranges, AHEAD=c.ahead, enable_fp_fusion=True, **shape,
        )
    if splits + text_splits:
        kv_parts_kernel[(splits + text_splits, heads, batch)](
            q, k_bytes, v_bytes, k_scale, k_offset, v_scale, v_offset, visual_count, k_text, v_text, text_count, low, high, scores,
            part, sums, tops, tokens, heads, scaling, tau1, tau2, q.stride(0), q.stride(1), *k_text.stride()[:3],
            *v_text.stride()[:3], steps, ranges, splits, text_splits, RANGED=ranged, PER_TOKEN=v_scale.shape[3] == 1 and d != 1,
            VR=power_of_two(ceil_div(64 * chunks * bits, 8), 16), BT=c.text, SP=power_of_two(ranges, 32) if ranged else 1,
            enable_fp_fusion=True, **shape, **({"maxnreg": c.registers} if c.registers else {}),
            **(follows if ranged and splits else {}),
        )
    kv_combine_kernel[(batch * q.shape[1],)](
        part, sums, tops, y, lse, splits + text_splits, G=group, D=d, DP=power_of_two(d, 16),
        SP=power_of_two(splits + text_splits, 32), BP=32, EARLY=early and splits + text_splits > 0, num_warps=4,
        enable_fp_fusion=True,
        **(follows if splits + text_splits else {}),
    )
    return y, lse


def parts(visual: int, text: int, programs: int) -> tuple[int, int, int]:
    """(steps a program, programs for the visual steps, for the text's): so many in all, if one step each is enough."""
    steps = max(1, ceil_div(visual + text, max(1, programs)))
    return steps, ceil_div(visual, steps), ceil_div(text, steps)
