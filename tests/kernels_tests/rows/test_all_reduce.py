"""Sums over ranks in one process, in the interpreter: what later ranks send is there already, and they send it again."""

from __future__ import annotations

import pytest
import torch
from poison import poisoned
from tolerance import assert_close

from mmqc.kernels.rows import all_reduce, all_reduce_norm_quantize
from mmqc.kernels.rows.norm_quantize import Norm
from mmqc.kernels.shared.inboxes import Inboxes
from mmqc.kernels.shared.row_scale import row_scale
from mmqc.ops import norm_quantize as op

ROWS = 3


def inboxes(ranks: int, width: int) -> list[Inboxes]:
    """Of ranks that share this process."""
    memory = torch.zeros(ranks, 2, ranks, ROWS, width, dtype=torch.int32)
    peers = torch.tensor([m.data_ptr() for m in memory])
    return [Inboxes(peers, torch.zeros(ROWS, dtype=torch.int32), r, ROWS, width, memory[r]) for r in range(ranks)]


def words(x: torch.Tensor, count: int) -> torch.Tensor:
    return (x.view(torch.int16).int() & 0xFFFF) | (count << 16)


def send(x: torch.Tensor, sender: int, to: Inboxes) -> None:
    """What ``sender``'s kernel writes."""
    for row, count in enumerate(to.counts[: len(x)].tolist()):
        to.mine[(count + 1) & 1, sender, row] = words(x[row], count + 1)


@pytest.mark.parametrize(("ranks", "width"), [(2, 40), (3, 17)])
def test_plan__sums_of_calls_with_different_numbers_of_rows(ranks, width):
    boxes = inboxes(ranks, width)
    for rows in (1, 3, 2, 3):
        xs = [torch.randn(rows, width).half() for _ in range(ranks)]
        expected = torch.stack(xs).float().sum(0).half()
        for rank, (x, box) in enumerate(zip(xs, boxes, strict=True)):
            for later in range(rank + 1, ranks):
                send(xs[later], later, box)
            y = all_reduce.plan(x, box, poisoned(x)).run()
            assert torch.equal(y, expected)
    assert boxes[0].counts.tolist() == [4, 3, 2]
    assert torch.equal(boxes[0].mine[0, 1, 0], words(xs[1][0], 4)), "the last rank has sent what was there for it"


def test_plan__a_row_that_does_not_come_is_not_a_number():
    box = inboxes(2, 32)[0]
    assert torch.isnan(all_reduce.plan(torch.ones(1, 32).half(), box).run()).all()


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


def test_plan__refuses_what_the_inboxes_do_not_hold():
    (box, _), x = inboxes(2, 32), torch.ones(1, 32).half()
    for given, why in ((x.expand(4, 32), "4 rows"), (x[:, :16], "rows of 16"), (x.float(), "float32")):
        assert why in str(all_reduce.plan(given, box))
