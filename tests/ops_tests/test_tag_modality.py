import torch

import mmqc.ops  # noqa: F401

tag_modality = torch.ops.mmqc.tag_modality


def test_tag_modality__is_a_copy() -> None:
    x, visual = torch.randn(2, 5, 8), torch.rand(2, 5) > 0.5
    y = tag_modality(x, visual)
    assert torch.equal(x, y)
    assert x.data_ptr() != y.data_ptr()


def test_tag_modality__opcheck() -> None:
    x, visual = torch.randn(2, 5, 8, requires_grad=True), torch.rand(2, 5) > 0.5
    torch.library.opcheck(tag_modality.default, (x, visual))
