"""Launches of pingpong_gated.py, as far as they are decided without a device; tests/gpu_tests/test_pingpong.py compares results."""

import dataclasses
from typing import Any

import offline
import pytest
import torch
from launches import check_arguments, no_work

gated = pytest.importorskip("mmqc.kernels.warpgroup.pingpong_gated")
pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")
from mmqc.kernels.matmul.epilogue_tiles import Epilogue  # noqa: E402
from mmqc.kernels.matmul.linears import Linear  # noqa: E402
from mmqc.kernels.shared.row_scale import row_scale  # noqa: E402
from mmqc.versions import installed, numbers  # noqa: E402

M, N, K = 700, 272, 288


def launch(dtype: torch.dtype, bias: bool = False, **tile: int):
    x, weights = torch.zeros(M, K, dtype=torch.int8), [torch.zeros(N, K, dtype=torch.int8) for _ in range(2)]
    y, scale = torch.zeros(M, N, dtype=dtype), torch.ones(N)
    epilogue = Epilogue("silu", torch.bfloat16, row_scale(torch.ones(1), M) if dtype == torch.int8 else None)
    linears = [Linear(w, scale, scale.bfloat16() if bias else None, y) for w in weights]
    c = dataclasses.replace(gated.WIDE, **tile)
    return gated.launch(x, linears, row_scale(torch.ones(1), M), c, epilogue, no_work)


MADE = {
    "codes": lambda: launch(torch.int8),
    "codes, half lines": lambda: launch(torch.int8, block_m=128, block_n=128),
    "bfloat16, biases": lambda: launch(torch.bfloat16, True, block_m=128, block_n=128),
    "one consumer": lambda: launch(torch.bfloat16, block_m=128, num_warps=8),
}

SPILLED = 256 if numbers(installed("triton") or "") < (3, 8) else 512  # bytes of a cut round, by the assembler of each


def made(what: str, parts: Any = 4):
    """A launch whose last tiles so many programs share, for offline.py."""
    launch = MADE[what]()
    return launch._replace(constants=launch.constants | {"PARTS": int(parts)})


@pytest.mark.parametrize("what", MADE)
def test_launch__gives_the_kernel_its_arguments(what):
    check_arguments(made(what))


@pytest.mark.parametrize(("what", "parts"), [("codes", 1), ("codes, half lines", 1), ("bfloat16, biases", 1), ("codes", 4)])
def test_kernel__keeps_its_sums_in_registers_but_for_a_cut_round(what, parts):
    told, shared = offline.compiled("test_pingpong_gated", what, parts)
    assert "serialized" not in told, told
    assert offline.spilled(told) <= (0 if parts == 1 else SPILLED), told
    assert shared <= 232_448


def test_launch__a_tile_has_half_of_its_columns_of_each():
    launch = MADE["codes"]()
    assert launch.descriptors["w_desc"] == launch.descriptors["w1_desc"] == (128, 128)
    assert launch.descriptors["y_desc"] == (64, 128)


@pytest.mark.parametrize(
    ("rows", "columns", "item_bytes", "wide"),
    [(2048, 18944, 1, False), (6417, 18944, 1, True), (6417, 18944, 2, False), (8192, 4096, 1, False)],
)
def test_tile__writes_whole_lines_of_what_no_cache_holds(rows, columns, item_bytes, wide):
    assert gated.tile(rows, columns, item_bytes) == (gated.WIDE if wide else gated.TILE)
