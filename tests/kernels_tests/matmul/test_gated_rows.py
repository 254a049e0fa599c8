"""The pass behind gate and up."""

import pytest
import torch
from tolerance import assert_close

pytest.importorskip("triton")
from mmqc.kernels.matmul import gated_rows
from mmqc.kernels.matmul.epilogue_tiles import Epilogue
from mmqc.kernels.shared.row_scale import row_scale
from mmqc.ops.scaled_matmul_epilogue import activated


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "none"])
@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize(("m", "n"), [(1, 1), (3, 1030), (9, 77)])
def test_launch__is_what_follows_both(m, n, codes, activation, device):
    gate, up = (torch.randn(m, n + 3, device=device)[:, :n] for _ in range(2))
    visual, scale = torch.rand(m, device=device) < 0.5, torch.tensor([0.02, 0.03], device=device)
    y = torch.full((m, n), -77 if codes else float("nan"), dtype=torch.int8 if codes else torch.float32, device=device)
    gated_rows.launch(gate, up, y, Epilogue(activation, torch.float32, row_scale(scale, m, visual) if codes else None)).run()
    expected = activated([gate, up], activation)
    if codes:
        off = (y - torch.ops.mmqc.quantize(expected, scale, visual, 8)).abs()
        assert int(off.max()) <= 1
        assert float(off.float().mean()) < 0.01
    else:
        assert_close(y, expected)
