"""The linear in two precisions on CUDA: importing this file registers it.

    mmqc::mixed_matmul   on CUDA   ->  the Triton kernels, rows flattened, int8 codes in one matrix

What a kernel cannot take goes to the reference.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmqc.kernels.matmul import mixed_matmul as mixed_kernel
from mmqc.kernels.matmul.unpack_weight import unpack_weight
from mmqc.kernels.shared.row_scale import Rows
from mmqc.ops import mixed_matmul as mixed_op
from mmqc.ops.define import use_on_cuda


def _rows(x: Tensor) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def mixed_matmul(
    x_q: Tensor, x_scale: Tensor, x_offset: Tensor, w_q: Sequence[Tensor], w_scale: Tensor, w_sum: Tensor,
    bias: Tensor | None, widths: Sequence[int], weight_bits: Sequence[int], out_dtype: torch.dtype,
) -> Tensor:
    """``mmqc::mixed_matmul`` on CUDA: packed weights are unpacked on the way, or written out and then multiplied."""
    mixed_op.check(x_q, x_scale, x_offset, w_q, w_scale, w_sum, widths, weight_bits)
    rows, s, o = _rows(x_q), *(t.reshape(-1, len(widths)).contiguous() for t in (x_scale, x_offset))
    given = Rows(rows, s, o)
    y = torch.empty(len(rows), len(w_scale), dtype=out_dtype, device=rows.device)
    low, *rest = zip(w_q, widths, strict=True)
    high = [unpack_weight(w, width, bits=4) if w.dtype == torch.uint8 else w for w, width in rest]
    weight = mixed_kernel.Weight(low[0], high[0] if high else None, w_scale, w_sum)
    if len(high) > 1 or mixed_kernel.why_not(given, weight, bias, y) is not None:
        return mixed_op.reference(x_q, x_scale, x_offset, w_q, w_scale, w_sum, bias, widths, weight_bits, out_dtype)
    mixed_kernel.mixed_matmul(given, weight, bias, out_dtype=out_dtype, out=y)
    return y.view(*x_q.shape[:-1], len(w_scale))


use_on_cuda(mixed_matmul)
