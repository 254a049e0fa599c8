"""Attention to tokens with a scale per token, head and block of channels (ops/kv_token_attention.py): nothing is dequantized.

    parts of the sums, each of a stretch of one sequence's tokens  ->  sum of the parts

Shapes:  those of the op, any number of queries; fp16 | bf16 (fp32 in the interpreter)   D to 256, at most 32 blocks
Splits:  from the room for tokens and the number of multiprocessors, never from counts, which are read on the device: a launch is
         the same at any length, and can be captured in a CUDA graph.
Exact:   codes, and so the products of queries and keys but for their float32 sums.  Rounded to q's dtype is p s_V.  In fp16 it
         is stored times 64 (8 bits) or 4 (4 bits): the widest block cannot overflow, and of one wider than 2^-12 no bit of the
         largest p is lost.
Why:     scales by block are moved onto scores and probabilities, of which there are fewer than codes; query heads are rows of
         one product, so that a KV head's tokens are read once for 16 of them, or for as many as its blocks leave room for.
Arch:    Ampere and newer.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mmqc.kernels.kv.kv_token_attention_tiles import kv_token_combine_kernel, kv_token_parts_kernel
from mmqc.kernels.shared.device_facts import INTERPRETED, ceil_div, has_inline_ptx, multiprocessors, power_of_two, why_not_here
from mmqc.kernels.shared.plan import Refusal
from mmqc.ops.kv_token_attention import BITS

DTYPES = (torch.float16, torch.bfloat16, *((torch.float32,) if INTERPRETED else ()))
UP = {4: 4.0, 8: 64.0}
SUMS = 8192  # float32 sums of one program at most: 64 registers of each of 128 threads


@dataclass(frozen=True)
class TokenConfig:
    """How the launches share the device.

    Attributes:
        per_sm: programs a multiprocessor.
        tokens: a step's, a power of two, at least 16.
        warps, stages: of a program; steps whose loads are under way.
        registers: a thread's at most; 0: any.
    """

    per_sm: int = 4
    tokens: int = 32
    warps: int = 4
    stages: int = 3
    registers: int = 0

    def replace(self, **changes: int) -> TokenConfig:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)


def table(bits: int, sums: int) -> TokenConfig:
    """The answer for programs with so many float32 sums: what the registers have room for."""
    return TokenConfig(registers=128 if bits == 4 else 168) if sums <= 2048 else TokenConfig()


def why_not_heads(dtype: torch.dtype, width: int, bits: int, block: int) -> str | None:
    """None, or why heads of ``width`` channels in a model of ``dtype`` cannot be attended to."""
    checks = (
        (dtype in DTYPES, f"queries are one of {DTYPES}, not {dtype}"),
        (bits in BITS, f"bits = {bits}: one of {BITS}"),
        (width <= 256, f"heads have 256 channels at most, not {width}"),
        (width <= 32 * block, f"heads have at most 32 blocks, not {width // block}"),
    )
    return next((why for ok, why in checks if not ok), None)


def why_not(
    q: Tensor, k_codes: Tensor, k_scale: Tensor, k_offset: Tensor, v_codes: Tensor, v_scale: Tensor, v_offset: Tensor,
    count: Tensor, bits: int,
) -> str | None:
    """None, or why these operands cannot be attended to here."""
    d, blocks = q.shape[3], k_scale.shape[3]
    given = (q, k_codes, k_scale, k_offset, v_codes, v_scale, v_offset)
    checks = (
        (k_codes.shape == v_codes.shape and k_scale.shape == v_scale.shape, "keys and values have one width and block"),
        (all(t.stride(3) == 1 for t in given), "channels and blocks are contiguous"),
        (all(t.stride(2) == t.shape[3] for t in given[1:]), "the tokens of a head are contiguous"),
        (k_scale.stride() == k_offset.stride() and v_scale.stride() == v_offset.stride(), "scales lie as offsets do"),
        (all(t.shape[2] * t.stride(2) < 2**31 for t in given), "a head's tokens are addressed with 32 bits"),
        (k_codes.shape[0] * k_codes.shape[1] < 2**16, "at most 65,535 sequences times heads"),
    )
    found = next((why for ok, why in checks if not ok), None)
    return found or why_not_heads(q.dtype, d, bits, d // blocks) or why_not_here(*given, count)


def alignment(*tensors: Tensor) -> int:
    """Bytes, 16 at most, that every token starts at a multiple of.

    A view of a cache leaves out place 0, so it starts at a multiple of 8, say, and Triton knows of 16 or nothing.
    """
    starts = [n for t in tensors for n in (t.data_ptr(), *(i * t.element_size() for i in t.stride()[:3]))]
    return math.gcd(16, *starts)


def rows_together(rows: int, sums: int) -> int:
    """How many of a KV head's ``rows`` of queries read its tokens together, where each has so many float32 sums."""
    return min(power_of_two(rows), 16, max(1, SUMS // sums))


def kv_token_attention(
    q: Tensor, k_codes: Tensor, k_scale: Tensor, k_offset: Tensor, v_codes: Tensor, v_scale: Tensor, v_offset: Tensor,
    count: Tensor, bits: int, scaling: float, *, config: TokenConfig | None = None,
) -> tuple[Tensor, Tensor] | Refusal:
    """(y, lse) of the op, or why it is not had here."""
    if reason := why_not(q, k_codes, k_scale, k_offset, v_codes, v_scale, v_offset, count, bits):
        return Refusal(reason)
    (batch, q_heads, length, d), (heads, room, bytes_) = q.shape, k_codes.shape[1:]
    rows, blocks = q_heads // heads * length, k_scale.shape[3]
    y = torch.empty((batch, q_heads, length, d), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, q_heads, length), dtype=torch.float32, device=q.device)
    if not lse.numel():
        return y, lse
    planes, columns = power_of_two(bytes_, 16), power_of_two(blocks)
    together = rows_together(rows, columns * planes * 8 // bits)
    c = config or table(bits, together * columns * planes * 8 // bits)
    groups, tiles = ceil_div(rows, together), ceil_div(room, c.tokens)
    programs = c.per_sm * multiprocessors(q.device) // (batch * heads * groups)
    steps = max(1, ceil_div(tiles, max(1, programs)))
    splits = ceil_div(tiles, steps)
    new = lambda *shape: torch.empty((batch * heads, splits, rows, *shape), dtype=torch.float32, device=q.device)  # noqa: E731
    part, sums, tops = new(d), new(), new()
    if splits:
        kv_token_parts_kernel[(splits, groups, batch * heads)](
            q, k_codes, k_scale, k_offset, v_codes, v_scale, v_offset, count, part, sums, tops, heads, length, rows, scaling,
            steps, splits, *q.stride()[:3], *k_codes.stride()[:2], *k_scale.stride()[:2], *v_codes.stride()[:2],
            *v_scale.stride()[:2], BITS=bits, BLOCK=d // blocks, NB=blocks, NBP=columns, D=d, W=bytes_, WP=planes, RB=together,
            BT=c.tokens, UP=UP[bits] if q.dtype == torch.float16 else 1.0, CODES_ALIGN=alignment(k_codes, v_codes),
            RANGES_ALIGN=alignment(k_scale, k_offset, v_scale, v_offset), PTX=has_inline_ptx(q.device), num_warps=c.warps,
            num_stages=c.stages, enable_fp_fusion=True, **({"maxnreg": c.registers} if c.registers else {}),
        )
    kv_token_combine_kernel[(lse.numel(),)](
        part, sums, tops, y, lse, rows, splits, D=d, DP=power_of_two(d, 16), BP=16, num_warps=4, enable_fp_fusion=True,
    )
    return y, lse
