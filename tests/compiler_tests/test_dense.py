"""The memory behind a tensor that is expanded."""

import torch

from mmqc.compiler.dense import dense


def test_dense__has_each_number_once() -> None:
    x = torch.arange(6.0).view(2, 1, 3)
    wide = x.expand(2, 4, 3)
    assert torch.equal(dense(wide), x)
    assert dense(wide).data_ptr() == x.data_ptr()
    assert dense(x) is x
    assert dense(torch.tensor(1.0).expand(5)).shape == (1,)
