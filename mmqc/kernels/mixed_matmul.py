"""The linear in two precisions (ops/mixed_matmul.py): two scale groups in one walk over one accumulator.

Shapes:  x: quantize_per_token.py   w low int8 | fp8e4nv [N, L], or packed uint8 [N, ceil(L/2)], which is written out first
         w high int8 | fp16 [N, K - L]   s_w float32 [N, P]   c int32 [N, P]   b [N]   y [M, N] fp16 | bf16 | fp32
Exact:   with int8 the low sums are exact; high products are, and their sums float32.  fp8 sums keep what the tensor
         core keeps.
Arch:    Hopper and newer: operands come by TMA, so rows and addresses are multiples of 16 bytes.  Elsewhere the reference.
"""

# A launch gives plain values to constexpr parameters, and options that are no parameters.
# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from mmqc.kernels.configs import MatmulConfig, key, measured
from mmqc.kernels.device_facts import ceil_div, fp8_reason, has_tensor_descriptors, multiprocessors, why_not_here
from mmqc.kernels.launch import Launch
from mmqc.kernels.mixed_matmul_tiles import mixed_matmul_kernel
from mmqc.kernels.quantize_per_token import FP8, Parts
from mmqc.kernels.unpack_weight import unpack_weight

OUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_LOW = 131_071
BLOCK_HIGH_BYTES = 128
TILES = (  # tried by benchmarks/mixed_linear.py --tune; the first is the default for large products
    MatmulConfig(128, 256, 128, 8, 3, variant="nested"),
    MatmulConfig(128, 256, 128, 8, 4, variant="nested"),
    MatmulConfig(128, 256, 64, 8, 4, variant="nested"),
    MatmulConfig(256, 128, 128, 8, 3, variant="nested"),
    MatmulConfig(128, 128, 128, 4, 3, variant="nested", per_sm=2),
    MatmulConfig(128, 128, 128, 8, 4, variant="nested"),
)


class Weight(NamedTuple):
    """A weight in one or two parts, and c, the sums of its codes."""

    low: Tensor
    high: Tensor | None
    scale: Tensor
    sum: Tensor

    def written_out(self, width: int, code: torch.dtype = torch.int8) -> Weight:
        """With its low codes unpacked as ``code``, its high ones as fp16: what the kernel reads fastest."""
        low = unpack_weight(self.low, width, bits=4, dtype=code) if self.low.dtype == torch.uint8 else self.low.to(code)
        return self._replace(low=low, high=None if self.high is None else self.high.to(torch.float16))


def supports(x: Parts, w: Weight, bias: Tensor | None, out_dtype: torch.dtype) -> str | None:
    """None, or why these operands cannot be multiplied here."""
    if (x.high is None) != (w.high is None):
        return "x and w have different parts"
    (m, low), n, parts = x.low.shape, w.low.shape[0], 1 if x.high is None else 2
    matrices = [t for t in (x.low, w.low, x.high, w.high) if t is not None]
    codes = (torch.int8, FP8)
    checks = (
        (x.low.dtype in codes and w.low.dtype == x.low.dtype, f"low codes are both int8 or fp8, not {x.low.dtype}, {w.low.dtype}"),
        (w.low.shape[1] == low, f"w has {w.low.shape[1]} low columns for {low} channels"),
        (x.high is None or w.high is None or w.high.shape == (n, x.high.shape[1]), "high parts of x and w differ in width"),
        (all(t.dtype in (torch.int8, torch.float16) for t in (x.high, w.high) if t is not None), "high codes are int8 or fp16"),
        (1 <= low <= MAX_LOW, f"L = {low}: 1 to {MAX_LOW}"),
        (all(t.shape == (m, parts) and t.is_contiguous() for t in (x.scale, x.offset)), f"x's scale and offset are [{m}, {parts}]"),
        (all(t.shape == (n, parts) and t.is_contiguous() for t in (w.scale, w.sum)), f"w's scale and sum are [{n}, {parts}]"),
        (bias is None or bias.shape == (n,), f"bias is [{n}]"),
        (out_dtype in OUT_DTYPES, f"out_dtype is one of {OUT_DTYPES}, not {out_dtype}"),
        (has_tensor_descriptors(x.low.device), "no tensor descriptors before compute capability 9.0"),
        (all(t.stride(1) == 1 and t.stride(0) * t.element_size() % 16 == 0 and t.data_ptr() % 16 == 0 for t in matrices),
         "tensor descriptors need rows and addresses that are multiples of 16 bytes"),
    )  # fmt: skip
    reason = next((why for ok, why in checks if not ok), None) or why_not_here(*x, *w, bias)
    return fp8_reason(x.low.device) if reason is None and x.low.dtype == FP8 else reason


@functools.lru_cache(maxsize=1024)
def config(fp8: bool, m: int, n: int, k: int, device: torch.device) -> MatmulConfig:
    """The tuned tile of this GPU for this shape, else a rule of thumb."""
    known = measured(device).get(key(op_name(fp8), m, n, k))
    if known is not None:
        return known
    if device.type != "cuda":  # the interpreter
        return MatmulConfig(32, 32, 32, 4, 1, variant="nested")
    if ceil_div(m, 128) * ceil_div(n, 256) < multiprocessors(device):
        return MatmulConfig(128, 128, 128, 4, 3, variant="nested", per_sm=2)
    return TILES[0]


def op_name(fp8: bool) -> str:
    """The op's name in the files of configs.py."""
    return "mixed_fp8" if fp8 else "mixed_int8"


def mixed_matmul(
    x: Parts, w: Weight, bias: Tensor | None = None, *, out_dtype: torch.dtype = torch.bfloat16, out: Tensor | None = None,
    config: MatmulConfig | None = None,
) -> Tensor:  # fmt: skip
    """Multiply; a packed weight is written out as the type of x's codes first."""
    if w.low.dtype == torch.uint8:
        w = w.written_out(x.low.shape[1], x.low.dtype)
    reason = supports(x, w, bias, out_dtype)
    if reason is not None:
        raise ValueError(f"mixed_matmul: {reason}")
    m, n = x.low.shape[0], w.low.shape[0]
    y = torch.empty(m, n, dtype=out_dtype, device=x.low.device) if out is None else out
    if y.shape != (m, n) or y.dtype != out_dtype or (n > 1 and y.stride(1) != 1):
        raise ValueError(f"mixed_matmul: out is {out_dtype} [{m}, {n}], rows contiguous; got {y.dtype} {list(y.shape)}")
    if m and n:
        launch(x, w, bias, y, config).run()
    return y


def launch(x: Parts, w: Weight, bias: Tensor | None, y: Tensor, c: MatmulConfig | None = None) -> Launch:
    """Fill ``y``."""
    (m, low), n = x.low.shape, w.low.shape[0]
    x_high, w_high = (x.low, w.low) if x.high is None or w.high is None else (x.high, w.high)
    high = 0 if x.high is None else x_high.shape[1]
    c = c or config(x.low.dtype == FP8, m, n, low + high, x.low.device)
    programs = min(c.per_sm * multiprocessors(x.low.device), ceil_div(m, c.block_m) * ceil_div(n, c.block_n))
    block_high = c.block_k if x.high is None else min(c.block_k, BLOCK_HIGH_BYTES // x_high.dtype.itemsize)
    args = dict(
        x_desc=x.low, w_desc=w.low, x_high_desc=x_high, w_high_desc=w_high, y_ptr=y, x_scale_ptr=x.scale, x_offset_ptr=x.offset,
        w_scale_ptr=w.scale, w_sum_ptr=w.sum, bias_ptr=w.scale if bias is None else bias, M=m, N=n, LOW=low, HIGH=high,
        stride_y=y.stride(0),
    )  # fmt: skip
    constants = dict(
        PARTS=1 if x.high is None else 2, HAS_BIAS=bias is not None, ACC=tl.int32 if x.low.dtype == torch.int8 else tl.float32,
        BLOCK_M=c.block_m, BLOCK_N=c.block_n, BLOCK_K=c.block_k, BLOCK_H=block_high, GROUP_M=c.group_m, PROGRAMS=programs,
    )  # fmt: skip
    blocks = {
        "x_desc": (c.block_m, c.block_k), "w_desc": (c.block_n, c.block_k),
        "x_high_desc": (c.block_m, block_high), "w_high_desc": (c.block_n, block_high),
    }  # fmt: skip
    return Launch(mixed_matmul_kernel, (programs,), args, constants, ("y_ptr",), c.num_warps, c.num_stages, 0, blocks)
