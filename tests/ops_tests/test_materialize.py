"""The identity whose result is memory."""

import torch

import mmqc.ops  # noqa: F401

materialize = torch.ops.mmqc.materialize


def test_materialize__is_a_contiguous_copy() -> None:
    x = torch.randn(5, 8).T
    y = materialize(x)
    assert torch.equal(x, y)
    assert y.is_contiguous()
    assert x.data_ptr() != y.data_ptr()


def test_materialize__opcheck() -> None:
    torch.library.opcheck(materialize.default, (torch.randn(5, 8, requires_grad=True).T,))
