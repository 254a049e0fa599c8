"""Sum over ranks, residual, norm and codes in one process, in the interpreter, against the op's parts."""

from __future__ import annotations

import pytest
import torch
from one_process import inboxes, send
from tolerance import assert_close

from mmqc.kernels.rows import all_reduce_norm_quantize
from mmqc.kernels.rows.norm_quantize import Norm
from mmqc.kernels.shared.row_scale import row_scale
from mmqc.ops import norm_quantize as op


@pytest.mark.parametrize("center", [False, True])
def test_plan__sum_residual_norm_and_codes(center):
    width, scale = 48, torch.tensor([0.03])
    boxes, gain = inboxes(2, width), torch.rand(width).half() + 0.5
    xs, r = [torch.randn(2, width).half() for _ in range(2)], torch.randn(2, width).half()
    total = torch.stack(xs).float().sum(0).half()
    q, h = op.reference(r, total, gain, None, 1e-6, center, True, scale, None, 8)
    send(xs[1], 1, boxes[0])
    for x, box in zip(xs, boxes, strict=True):
        norm = Norm(1e-6, gain, None, r, True, center)
        found = all_reduce_norm_quantize.plan(x, box, norm, row_scale(scale, 2)).run()
        assert_close(found.total, h)
        assert (found.q.int() - q.int()).abs().max() <= 1
        assert (found.q == q).float().mean() > 0.97
