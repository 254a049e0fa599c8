"""The op of a process alone: its sum is what it gives."""

from __future__ import annotations

import torch

import mmqc.ops  # noqa: F401

op = torch.ops.mmqc.all_reduce.default


def test_all_reduce__is_the_collective_in_a_new_tensor(group):
    x = torch.randn(2, 3, 8).transpose(0, 1)
    y = op(x, group.group_name)
    assert torch.equal(y, x)
    assert y.is_contiguous()
    assert y.data_ptr() != x.data_ptr()
    torch.library.opcheck(op, (x, group.group_name), test_utils=("test_schema", "test_faketensor"))
