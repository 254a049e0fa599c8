"""Kernels that read by TMA, of a number of rows that only data says: Inductor passes it as int64, and coordinates are int32."""

import offline
import pytest
import torch

from mmqc.kernels.matmul import group_scaled_matmul, mixed_matmul, scaled_matmul, scaled_matmul_epilogue
from mmqc.kernels.matmul.configs import MatmulConfig
from mmqc.kernels.matmul.epilogue_tiles import Epilogue
from mmqc.kernels.matmul.linears import Linear
from mmqc.kernels.shared.row_scale import Rows, row_scale

M, N, K = 300, 256, 512
TILE = MatmulConfig(64, 128, 128, 4, 3, variant="nested")
x, scale = torch.zeros(M, K, dtype=torch.int8), row_scale(torch.ones(1), M)


def linear(groups=0):
    w_scale = torch.ones(N, groups) if groups else torch.ones(N)
    return Linear(torch.zeros(N, K, dtype=torch.int8), w_scale, None, torch.zeros(M, N))


def rows():
    return Rows(x, torch.ones(M, 2), torch.zeros(M, 2))


def weight(high):
    low = torch.zeros(N, K - (64 if high else 0), dtype=torch.int8)
    part = torch.zeros(N, 64, dtype=torch.int8) if high else None
    return mixed_matmul.Weight(low, part, torch.ones(N, 2), torch.zeros(N, 2, dtype=torch.int32))


LAUNCHES = {
    "scaled": lambda: scaled_matmul.descriptor_launch(x, linear(), scale, TILE, Epilogue()),
    "gated": lambda: scaled_matmul_epilogue._descriptor_launch(x, [linear(), linear()], scale, TILE, Epilogue("silu")),
    "groups": lambda: group_scaled_matmul.descriptor_launch(x, linear(K // 128), scale, 128, TILE),
    "one part": lambda: mixed_matmul.descriptor_launch(rows(), weight(high=False), None, torch.zeros(M, N), TILE),
    "two parts": lambda: mixed_matmul.descriptor_launch(rows(), weight(high=True), None, torch.zeros(M, N), TILE),
}


def made(what):
    """For offline.py."""
    launch = LAUNCHES[what]()
    return launch._replace(args=launch.args | {"M": 1 << 31})


@pytest.mark.parametrize("what", LAUNCHES)
def test_kernel__compiles_for_rows_that_only_data_says(what):
    told, _ = offline.compiled("test_wide_rows", what)
    assert "spill" in told
