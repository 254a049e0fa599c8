"""The linear of some rows whose weight alone is quantized, to 8 bits, on Hopper (byte_tiles.py).

    y = x (s w)ᵀ + b

Shapes:  x [M, K] fp16 | bf16   w int8 [N, K]   s float [N] or [N, 1]   b [N]   y [M, N] in x's dtype
Exact:   as weight_only_matmul.py: codes are exact in x's dtype, sums float32; the parts of a tile are added in a fixed order.
Arch:    Hopper (wgmma, TMA); rows and addresses of x, w and y are multiples of 16 bytes.  Not in the interpreter.
Bytes:   of w once; of x once for every ``block_n`` rows of w, from the L2 cache.
Why:     64 rows take 10 to 25 % less time than by the kernel of pointers, 128 rows 30 to 45 % (H200)
Tiles:   variant "registers": ``block_n`` rows of w, 64 for each of ``num_warps / 4`` warpgroups or more, and ``block_m`` of x;
         ``per_sm`` programs a multiprocessor, which share its memory; each has ``num_stages`` slots of ``block_k`` columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmqc.kernels.matmul.configs import MatmulConfig
from mmqc.kernels.matmul.linears import Linear
from mmqc.kernels.matmul.product import why_not_aligned
from mmqc.kernels.shared.device_facts import ceil_div, has_warpgroup_products
from mmqc.kernels.shared.launch import Launch
from mmqc.kernels.shared.split_k import Workspace, workspace
from mmqc.kernels.warpgroup import packed_matmul as packed
from mmqc.kernels.warpgroup import pingpong_matmul as pingpong

OP = "byte_int8"  # in configs.py
FEW, SOME = 16, 256  # kernels of pointers are faster for fewer rows, and a product of the weight written out for more
BLOCK_K = 64  # 128 bytes of a row of x: what TMA lays out without conflicts


def why_not(x: Tensor, linear: Linear, zero: Tensor | None, group_size: int) -> str | None:
    """None, or why x is not multiplied by w in this way."""
    if not has_warpgroup_products(x.device):
        return "warpgroup products are Hopper's"
    if x.dtype not in (torch.float16, torch.bfloat16) or linear.w.dtype != torch.int8:
        return f"x is float16 or bfloat16 and w int8, not {x.dtype} and {linear.w.dtype}"
    if zero is not None or 0 < group_size < x.shape[1]:
        return "a row of w has one scale, and no zero point"
    return why_not_aligned(x, linear.w, linear.y)


def shares(c: MatmulConfig, item_bytes: int) -> int:
    """Into how many shares a tile of y is cut: as few as leave room for the slots."""
    if c.block_n % (16 * c.num_warps) or c.num_warps % 4 or c.block_m % 16 or c.block_k != BLOCK_K or c.num_stages <= packed.BEHIND:
        raise ValueError(
            f"byte_matmul: 4 warps have a multiple of 64 rows of w and of 16 of x, more than {packed.BEHIND} slots of {BLOCK_K}, "
            f"not {c}"
        )
    return packed.as_few_as_fit(c, item_bytes, c.block_n)


def launch(x: Tensor, linear: Linear, c: MatmulConfig, work: Workspace = workspace) -> Launch:
    """Fill the linear's y; ``why_not`` has found nothing."""
    from mmqc.kernels.warpgroup.byte_tiles import byte_kernel

    w, w_scale, bias, y, _ = linear
    (m, k), n = x.shape, w.shape[0]
    cut, ahead = shares(c, y.dtype.itemsize), c.num_stages - packed.BEHIND
    programs, whole, rest, count = pingpong.grid(c, m, n, max(ceil_div(k, BLOCK_K), ahead), x.device, ahead)
    part, counter = work(x.device, rest, c.block_m * c.block_n, count, torch.float32)
    args: dict[str, Any] = dict(
        x_desc=x, w_desc=w, y_desc=y, w_scale_ptr=w_scale, bias_ptr=w_scale if bias is None else bias, part_ptr=part,
        counter_ptr=counter, M=m, N=n, K=k,
    )
    constants = dict(
        HAS_BIAS=bias is not None, BLOCK_M=c.block_m, BLOCK_N=c.block_n, BLOCK_K=c.block_k, GROUP_M=c.group_m, PROGRAMS=whole,
        PARTS=count, SHARES=cut, SLOTS=c.num_stages, WARPS=c.num_warps,
    )
    blocks = pingpong.blocks(c) | {"y_desc": (c.block_m // cut, c.block_n)}
    return Launch(byte_kernel, (programs,), args, constants, pingpong.OUTPUTS, c.num_warps, 1, 0, blocks, early=True)
