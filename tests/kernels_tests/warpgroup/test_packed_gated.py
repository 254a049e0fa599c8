"""Launches of packed_gated.py, as far as they are decided without a device."""

import offline
import pytest
import torch
from launches import check_arguments, no_work

gated = pytest.importorskip("mmqc.kernels.warpgroup.packed_gated")
pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")
from mmqc.kernels.matmul.epilogue_tiles import Epilogue  # noqa: E402
from mmqc.kernels.matmul.linears import Linear  # noqa: E402
from mmqc.kernels.shared.row_scale import row_scale  # noqa: E402

N, K = 264, 288


def launch(rows: int, dtype: torch.dtype, bias: bool = False):
    x, weights = torch.zeros(rows, K, dtype=torch.int8), [torch.zeros(N, K // 2, dtype=torch.uint8) for _ in range(2)]
    y, scale = torch.zeros(rows, N, dtype=dtype), torch.ones(N)
    codes = row_scale(torch.ones(1), rows) if dtype == torch.int8 else None
    epilogue = Epilogue("silu", torch.bfloat16, codes)
    linears = [Linear(w, scale, scale.bfloat16() if bias else None, y) for w in weights]
    return gated.launch(x, linears, row_scale(torch.ones(1), rows), gated.tile(rows), epilogue, no_work)


MADE = {
    "codes": lambda: launch(64, torch.int8),
    "bfloat16": lambda: launch(64, torch.bfloat16, True),
    "32 rows": lambda: launch(32, torch.int8),
}


def made(what: str):
    """A launch whose last tiles four programs share, for offline.py."""
    launch = MADE[what]()
    return launch._replace(constants=launch.constants | {"PARTS": 4, "LINES": 4})


@pytest.mark.parametrize("what", MADE)
def test_launch__gives_the_kernel_its_arguments(what):
    check_arguments(made(what))


@pytest.mark.parametrize("what", MADE)
def test_kernel__two_programs_fit_a_multiprocessor(what):
    told, shared = offline.compiled("test_packed_gated", what)
    assert "serialized" not in told, told
    assert offline.spilled(told) == 0, told
    assert 2 * (shared + 1024) <= 228 * 1024


@pytest.mark.parametrize(("rows", "takes"), [(16, False), (17, True), (64, True), (65, False)])
def test_takes__a_few_dozen_rows(rows, takes):
    assert gated.takes(rows) is takes
