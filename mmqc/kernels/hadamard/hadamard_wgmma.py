"""The transform of hadamard_quantize.py for many rows on Hopper: copies and products in warps of their own.

Shapes:  x [M, n] fp16 | bf16, n = a · 128, 64 <= a <= 192   y as there, or codes, with scales of every kind
How:     A takes the core and some of the twos, B = H2 ⊗ H the other 128: Y = A X Bᵀ (hadamard_wgmma_tiles.py).  Sums are float32,
         rounded to x's dtype twice: X, and A X (H2 ⊗ I), which is halved there, as A's entries are made for: exact.
Gated:   silu(x) ∘ u is written out first (silu_multiply.py): 9 n bytes a row in 16 bits instead of 5 n, and still faster.
Arch:    Hopper (wgmma), as pingpong_matmul.py and for the same launches; rows and addresses are multiples of 16 bytes.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from mmqc.kernels.hadamard import hadamard_plan as plans
from mmqc.kernels.hadamard.hadamard_plan import HadamardPlan, Tiling
from mmqc.kernels.hadamard.hadamard_tiles import Written
from mmqc.kernels.shared.device_facts import (
    CONSUMER_REGISTERS,
    SHARED_BYTES,
    WARPGROUP_ROWS,
    ceil_div,
    has_inline_ptx,
    has_warpgroup_products,
    multiprocessors,
)
from mmqc.kernels.shared.launch import Launch

COLUMNS = 128
LEAST_WIDTH = 8192  # below, the other kernel is as fast
BLOCK, BYTES, CONSUMERS = 64, 2, 2  # hadamard_wgmma_tiles.py's
MOST_SLOTS = 6
DTYPES = (torch.float16, torch.bfloat16)


@functools.cache
def tiling(n: int) -> Tiling | None:
    """How rows of width n are cut, or None where they are not of this kind."""
    cut = (n // COLUMNS, COLUMNS)
    if n < LEAST_WIDTH or n % COLUMNS or cut not in plans.cuts(n):
        return None
    found = plans.tiling(*cut)
    return found if slots(found, BYTES) >= 2 else None


def blocks(t: Tiling) -> int:
    """Blocks of rows of A."""
    return ceil_div(t.A1 + t.A2, BLOCK)


def places(item_bytes: int) -> int:
    """Blocks of y a consumer has room for."""
    return 3 - item_bytes


def slots(t: Tiling, item_bytes: int) -> int:
    """Tiles of x that fit beside the matrices and the blocks of y."""
    matrices = BYTES * (blocks(t) * BLOCK * (t.A1 + t.A2) + COLUMNS**2 // 4)
    written = CONSUMERS * places(item_bytes) * BLOCK * COLUMNS * item_bytes
    return min(MOST_SLOTS, (SHARED_BYTES - matrices - written) // (BYTES * (t.A1 + t.A2) * COLUMNS))


def why_not(x: Tensor) -> str | None:
    """None, or why rows like x are not transformed in this way."""
    if not has_warpgroup_products(x.device):
        return "warpgroup products are Hopper's"
    if x.shape[0] <= WARPGROUP_ROWS:
        return f"{x.shape[0]} rows: more than {WARPGROUP_ROWS} have been measured"
    if x.dtype not in DTYPES or tiling(x.shape[1]) is None:
        return f"{x.dtype} rows of {x.shape[1]} are not cut into tiles of {COLUMNS} columns"
    return None


def why_not_at(x: Tensor, y: Tensor) -> str | None:
    """None, or why TMA copies no rows from where x is to where y is; a compiled graph's tensors are not anywhere yet."""
    if x.stride(0) * x.dtype.itemsize % 16 or x.data_ptr() % 16 or y.data_ptr() % 16:
        return "tensor descriptors need rows and addresses that are multiples of 16 bytes"
    return None


@functools.lru_cache(maxsize=64)
def matrices(n: int, device: torch.device, dtype: torch.dtype) -> HadamardPlan:
    """The matrices, A's entries halved."""
    whole = plans.hadamard_plan(n, device, dtype, (n // COLUMNS, COLUMNS))
    return HadamardPlan(whole.tiling, whole.outer / 2, whole.inner)


def launch(x: Tensor, written: Written) -> Launch:
    """Fill what is written of x; ``why_not`` has found nothing."""
    from mmqc.kernels.hadamard.hadamard_wgmma_tiles import hadamard_wgmma_kernel

    (m, n), y = x.shape, written.y
    p = matrices(n, x.device, x.dtype)
    t = p.tiling
    cubes = [tensor.unflatten(1, (t.a, t.b)) for tensor in (x, y)]
    copied = {
        "x_desc": (1, t.A1, COLUMNS), "rest_desc": (1, max(t.A2, 16), COLUMNS),
        "y_desc": (1, BLOCK, COLUMNS), "outer_desc": (BLOCK, t.A1),
        "outer_rest_desc": (BLOCK, max(t.A2, 16)), "inner_desc": (COLUMNS // 2, COLUMNS // 2),
    }
    args: dict[str, Any] = dict(
        x_desc=cubes[0], rest_desc=cubes[0], y_desc=cubes[1], outer_desc=p.outer, outer_rest_desc=p.outer, inner_desc=p.inner,
        M=m, a=t.a, **written.scale_args(p.outer), **written.token_args(p.outer),
    )
    programs, size = min(m, multiprocessors(x.device)), y.dtype.itemsize
    constants = dict(
        SCALE=2 / (plans.outer_factor(t) * math.sqrt(t.a * t.b)), A1=t.A1, A2=t.A2, COLUMNS=COLUMNS, SLOTS=slots(t, size),
        PLACES=places(size), PROGRAMS=programs, REGISTERS=CONSUMER_REGISTERS, PTX=has_inline_ptx(x.device), **written.constants(),
    )
    filled = ("y_desc", "token_ptr", "offset_ptr")
    return Launch(hadamard_wgmma_kernel, (programs,), args, constants, filled, 4, 1, 0, copied, early=True)
