"""The gate that is written out in front of a transform of many rows, against torch."""

import pytest
import torch
from tolerance import assert_close
from torch.nn import functional as F

kernel = pytest.importorskip("mmqc.kernels.hadamard.silu_multiply")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(5, 100), (2, 3584), (1, 1)])
def test_silu_multiply__every_entry_of_longer_rows(shape, dtype, device):
    gate, up = torch.randn(shape[0], 2 * shape[1], device=device).to(dtype).chunk(2, 1)
    y = torch.full(shape, float("nan"), dtype=dtype, device=device)
    kernel.launch(gate, up, y).run()
    assert_close(y, F.silu(gate) * up, dtype)
