"""Sums of many rows over two ranks in one process, in the interpreter: what the second one sends is there already."""

from __future__ import annotations

import pytest
import torch
from one_process import SLOTS, inboxes, send, send_many, slot_inbox
from poison import poisoned

from mmqc.kernels.rows import all_reduce


@pytest.mark.parametrize("width", [40, 17])
def test_plan__sums_of_calls_with_few_rows_and_many(width):
    boxes, dtype = inboxes(2, width), torch.float16
    for rows in (4, 7, 2, 2 * SLOTS, 4):
        xs = [torch.randn(rows, width).to(dtype) for _ in boxes]
        expected = (xs[0].float() + xs[1].float()).to(dtype)
        (send_many if rows > boxes[0].rows else send)(xs[1], 1, boxes[0])
        for x, box in zip(xs, boxes, strict=True):
            assert torch.equal(all_reduce.plan(x, box, poisoned(x)).run(), expected)
    assert boxes[0].counts.tolist() == [1, 1, 0, 6, 6, 5, 5, 3]
    numbers, flags = slot_inbox(boxes[1], dtype)
    assert flags[0].tolist() == [6, 6, 5, 5, 3], "the first rank has told the second one of each row"
    assert torch.equal(numbers[0, 0, 0], xs[0][0])


def test_plan__a_row_that_does_not_come_is_not_a_number_and_the_others_are():
    (box, _), x = inboxes(2, 32), torch.ones(4, 32).half()
    send_many(x, 1, box)
    slot_inbox(box, x.dtype)[1][1, 2] = 0
    y = all_reduce.plan(x, box).run()
    assert y.isnan().all(1).tolist() == [False, False, True, False]
    assert (y[[0, 1, 3]] == 2).all()


def test_plan__a_flag_that_is_one_ahead_is_not_late():
    (box, _), x = inboxes(2, 32), torch.ones(4, 32).half()
    send_many(x, 1, box)
    slot_inbox(box, x.dtype)[1][1] += 1
    assert (all_reduce.plan(x, box).run() == 2).all()
