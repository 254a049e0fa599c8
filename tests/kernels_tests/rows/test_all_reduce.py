"""Sums over ranks in one process, in the interpreter: what later ranks send is there already, and they send it again."""

from __future__ import annotations

import pytest
import torch
from one_process import inboxes, send, word_inbox, words
from poison import poisoned

from mmqc.kernels.rows import all_reduce


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
    assert boxes[0].counts[:3].tolist() == [4, 3, 2]
    assert torch.equal(word_inbox(boxes[0])[0, 1, 0], words(xs[1][0], 4)), "the last rank has sent what was there for it"


def test_plan__a_row_that_does_not_come_is_not_a_number():
    box = inboxes(2, 32)[0]
    assert torch.isnan(all_reduce.plan(torch.ones(1, 32).half(), box).run()).all()


def test_plan__refuses_what_the_inboxes_do_not_hold():
    (box, *_), x = inboxes(3, 32), torch.ones(1, 32).half()
    for given, why in ((x.expand(4, 32), "4 rows"), (x[:, :16], "rows of 16"), (x.float(), "float32")):
        assert why in str(all_reduce.plan(given, box))
