"""What a recording keeps of a value."""

import pytest
import torch

from mmqc.graph import meta


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (1, 4, 2), (0, 3)])
def test_sketch__keeps_zeros_where_there_is_nothing_else(shape):
    zeros = torch.zeros(shape)
    assert meta.sketch(zeros).is_meta == (zeros.numel() == 0)
    if zeros.numel():
        zeros.view(-1)[-1] = 1  # behind a first row of zeros
        assert meta.sketch(zeros).is_meta
        assert meta.sketch((zeros, torch.ones(2, dtype=torch.long)))[0].is_meta
