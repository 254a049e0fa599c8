"""Launches of byte_matmul.py, as far as they are decided without a device; its products: test_weight_only_matmul.py, on one."""

import dataclasses

import offline
import pytest
import torch
from launches import check_arguments, no_work

bytes_of = pytest.importorskip("mmqc.kernels.warpgroup.byte_matmul")
pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")
from mmqc.kernels.matmul.configs import MatmulConfig  # noqa: E402
from mmqc.kernels.matmul.linears import Linear  # noqa: E402

TILE = MatmulConfig(64, 256, 64, 8, 8, split_k=4, variant="registers")
M, N, K = 300, 520, 304


def operands(dtype=torch.bfloat16):
    x, w = torch.zeros(M, K, dtype=dtype), torch.zeros(N, K, dtype=torch.int8)
    return x, Linear(w, torch.ones(N), None, torch.zeros(M, N, dtype=dtype))


TILES = {
    "256 rows of w": TILE,
    "128 rows of w": dataclasses.replace(TILE, block_n=128, num_warps=4, num_stages=6, per_sm=2),
    "128 tokens": dataclasses.replace(TILE, block_m=128, block_n=128, num_stages=7),
    "32 tokens": dataclasses.replace(TILE, block_m=32, num_stages=9),
}


def made(what: str):
    """A launch whose last tiles four programs share, for offline.py."""
    launch = bytes_of.launch(*operands(), TILES[what], no_work)
    return launch._replace(constants=launch.constants | {"PARTS": 4})


@pytest.mark.parametrize("what", TILES)
def test_launch__gives_the_kernel_its_arguments(what):
    check_arguments(made(what))


@pytest.mark.parametrize("what", TILES)
def test_kernel__compiles_to_products_that_queue_up(what):
    """Ptxas does not wait for each of them, hardly anything is spilled, and the programs of a tile fit the shared memory."""
    told, shared = offline.compiled("test_byte_matmul", what)
    assert TILES[what].per_sm * (shared + 1024) <= 233_472
    assert "serialized" not in told, told
    assert offline.spilled(told) < 64, told


def test_shares__refuses_tiles_of_other_kernels():
    assert [bytes_of.shares(TILE, item) for item in (2, 4)] == [1, 2]
    with pytest.raises(ValueError, match="more than 2 slots of 64"):
        bytes_of.shares(dataclasses.replace(TILE, block_n=64), 2)
    with pytest.raises(ValueError, match="no shared memory"):
        bytes_of.shares(dataclasses.replace(TILE, num_stages=10), 2)


def test_why_not__says_what_it_cannot_do(monkeypatch):
    x, linear = operands()
    assert "Hopper" in bytes_of.why_not(x, linear, None, 0)
    monkeypatch.setattr(bytes_of, "has_warpgroup_products", lambda device: True)
    assert bytes_of.why_not(x, linear, None, 0) is None
    assert bytes_of.why_not(x, linear, None, K) is None
    assert "one scale" in bytes_of.why_not(x, linear, None, 128)
    assert "one scale" in bytes_of.why_not(x, linear, torch.zeros(N), 0)
    assert "not torch.float32" in bytes_of.why_not(*operands(torch.float32), None, 0)
    assert "16 bytes" in bytes_of.why_not(x[:, 1:], linear, None, 0)
