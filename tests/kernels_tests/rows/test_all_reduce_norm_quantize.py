"""Sum over ranks, residual, norm and codes in one process, in the interpreter, against the op's parts."""

from __future__ import annotations

import pytest
import torch
from one_process import inboxes, send, send_many
from tolerance import assert_close

from mmqc.kernels.rows import all_reduce_norm_quantize
from mmqc.kernels.rows.norm_quantize import Norm
from mmqc.kernels.shared.row_scale import row_scale
from mmqc.ops import norm_quantize as op


@pytest.mark.parametrize("rows", [2, 7])
@pytest.mark.parametrize("center", [False, True])
def test_plan__sum_residual_norm_and_codes(center, rows):
    width, scale = 48, torch.tensor([0.03])
    boxes, gain = inboxes(2, width), torch.rand(width).half() + 0.5
    xs, r = [torch.randn(rows, width).half() for _ in range(2)], torch.randn(rows, width).half()
    total = torch.stack(xs).float().sum(0).half()
    q, h = op.reference(r, total, gain, None, 1e-6, center, True, scale, None, 8)
    (send_many if rows > boxes[0].rows else send)(xs[1], 1, boxes[0])
    for x, box in zip(xs, boxes, strict=True):
        norm = Norm(1e-6, gain, None, r, True, center)
        found = all_reduce_norm_quantize.plan(x, box, norm, row_scale(scale, rows)).run()
        assert_close(found.total, h)
        assert (found.q.int() - q.int()).abs().max() <= 1
        assert (found.q == q).float().mean() > 0.97
