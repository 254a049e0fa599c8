"""The op against its two parts."""

from __future__ import annotations

import pytest
import torch

import mmqc.ops  # noqa: F401

op = torch.ops.mmqc.all_reduce_norm_quantize.default


@pytest.mark.parametrize("center", [False, True])
def test_all_reduce_norm_quantize__is_one_after_the_other(center, group):
    x, r = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    how = (torch.rand(8), None, 1e-6, center, False, torch.tensor([0.05]), None, 8)
    got = op(x, group.group_name, r, *how)
    want = torch.ops.mmqc.norm_quantize(torch.ops.mmqc.all_reduce(x, group.group_name), r, *how)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    torch.library.opcheck(op, (x, group.group_name, r, *how), test_utils=("test_schema", "test_faketensor"))
