"""Exact integer matrix product, the inner loop of every quantized linear.

    acc[m, n] = sum_k x[m, k] w[n, k]        int8 x int8 -> int32, exact for K <= 131,072

Shapes:  x int8 [M, K]   w int8 [N, K]   acc int32 [M, N]
Why:     ``aten::_int_mm`` is the fast path, but it has limits (CUDA: M > 16, N and K multiples of 8), may saturate its
         16-bit partial sums on CPUs without VNNI, and reads a transposed weight of one column wrongly (CPU, K = 1:
         both strides of the view are 1).  ``why_not_int_mm`` names what is in the way, for eager mode and the lowering
         alike; both then pad (CUDA) or multiply in float64 (CPU), which is exact and slow.
         On x86 without VNNI ``_int_mm`` is a plain loop: 702 ms for 2,048 x 256 by 1,024, against 64 in float64 (EPYC with AVX2,
         one thread, torch 2.13).  There float64, which reads the weight eight times as wide, is taken from two rows on.
"""

from __future__ import annotations

import functools
import platform

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

CUDA_MIN_ROWS = 17
CUDA_ALIGN = 8
CUDA_NARROW = 128  # fewer inputs than these, and cuBLAS has no algorithm for some N that are no multiples of 16 (4,136 outputs)


@functools.cache
def cpu_int_mm_is_exact() -> bool:
    """Whether ``_int_mm`` on this CPU keeps the largest sums (it saturates without VNNI)."""
    # A surrounding trace must not see this probe.
    with torch.device("cpu"), _disable_current_modes():
        x = torch.full((2, 64), -128, dtype=torch.int8)
        x[1] = 127
        acc = torch._int_mm(x, x.t().contiguous())
    return acc.tolist() == [[64 * 16384, -64 * 16256], [-64 * 16256, 64 * 16129]]


@functools.cache
def cpu_int_mm_is_a_loop() -> bool:
    """Whether this CPU is one for which ``_int_mm`` has no better than three nested loops (x86 without VNNI)."""
    return platform.machine().lower() in ("x86_64", "amd64") and not torch.cpu._is_vnni_supported()


def why_not_int_mm(device: str, rows_known_large: bool, n: int, k: int, one_row: bool = False) -> str | None:
    """None, or why ``_int_mm`` cannot take the operands as they are, or should not."""
    if device == "cpu":
        if k == 1:
            return "_int_mm misreads a weight of one column: float64 matmul instead"
        if not one_row and cpu_int_mm_is_a_loop():
            return "_int_mm is a plain loop on this CPU (no VNNI): float64 matmul instead"
        return None if cpu_int_mm_is_exact() else "_int_mm saturates on this CPU (no VNNI): float64 matmul instead"
    if device == "cuda":
        _, dn, dk = cuda_padding(CUDA_MIN_ROWS, n, k)
        if dn or dk:
            align = f"N and K to be multiples of {CUDA_ALIGN}, and N of {2 * CUDA_ALIGN} where K is under {CUDA_NARROW}"
            return f"_int_mm needs {align}, not N={n}, K={k}: padded with zeros"
        return None if rows_known_large else f"_int_mm needs {CUDA_MIN_ROWS} rows: padded with zeros"
    return f"no integer matmul for device {device}: float64 matmul instead"


def cuda_padding(m: int, n: int, k: int) -> tuple[int, int, int]:
    """Rows, outputs and inputs to add so that CUDA's ``_int_mm`` takes the operands."""
    return max(CUDA_MIN_ROWS - m, 0), -n % (CUDA_ALIGN if k >= CUDA_NARROW else 2 * CUDA_ALIGN), -k % CUDA_ALIGN


def _row_major(t: Tensor) -> Tensor:
    # A tensor of one row may call itself contiguous with any row stride; aten's CPU kernel takes it for the width.
    return t.contiguous().as_strided(t.shape, (t.shape[1], 1))


def int_matmul(x: Tensor, w: Tensor) -> Tensor:
    """Multiply x and wᵀ in int32."""
    m, n, k = x.shape[0], w.shape[0], w.shape[1]
    device = x.device.type
    if why_not_int_mm(device, m >= CUDA_MIN_ROWS, n, k, m == 1) is None:
        return torch._int_mm(_row_major(x), _row_major(w).t())
    if device == "cuda":
        dm, dn, dk = cuda_padding(m, n, k)
        return torch._int_mm(_row_major(F.pad(x, (0, dk, 0, dm))), _row_major(F.pad(w, (0, dk, 0, dn))).t())[:m, :n]
    return (x.double() @ w.double().t()).to(torch.int32)
