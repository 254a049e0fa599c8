"""Launches of packed_matmul.py, as far as they are decided without a device; the order of its kernels: test_pingpong_ring.py."""

import pytest
import torch

packed = pytest.importorskip("mmqc.kernels.packed_matmul")
pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")
from mmqc.kernels.configs import MatmulConfig  # noqa: E402
from mmqc.kernels.epilogue_tiles import Epilogue  # noqa: E402
from mmqc.kernels.linears import Linear  # noqa: E402
from mmqc.kernels.quantize_per_token import Rows  # noqa: E402
from mmqc.kernels.row_scale import row_scale  # noqa: E402

TILE = MatmulConfig(128, 128, 64, 4, 4, split_k=4, per_sm=2, variant="registers")
M, N, LOW, HIGH = 300, 264, 288, 48


def no_work(device, rest, size, count, dtype):
    return torch.empty(0, dtype=dtype), torch.zeros(1, dtype=torch.int32)


def check_launch(launch) -> None:
    """That it gives the kernel every argument by its name, and that what TMA copies are matrices."""
    names = set(launch.kernel.arg_names)
    assert set(launch.args) | set(launch.constants) == names
    assert set(launch.outputs) <= set(launch.args)
    assert set(launch.descriptors) == {name for name in names if name.endswith("_desc")}
    for name in launch.descriptors:
        rows, columns = launch.args[name].shape
        assert rows in (M, N)
        assert columns in (LOW // 2, HIGH, N)


def test_launch__gives_the_kernel_its_arguments():
    x, w, scale = torch.zeros(M, LOW, dtype=torch.int8), torch.zeros(N, LOW // 2, dtype=torch.uint8), torch.ones(N)
    y = torch.zeros(M, N, dtype=torch.bfloat16)
    rows = row_scale(torch.ones(1), M)
    check_launch(packed.launch(x, Linear(w, scale, None, y), rows, None, TILE, Epilogue(), no_work))


def test_launch__of_two_parts_gives_the_kernel_its_arguments():
    x = Rows(torch.zeros(M, LOW + HIGH, dtype=torch.int8), torch.ones(M, 2), torch.zeros(M, 2))
    low, high = torch.zeros(N, LOW // 2, dtype=torch.uint8), torch.zeros(N, HIGH, dtype=torch.int8)
    scale, sums, y = torch.ones(N, 2), torch.zeros(N, 2, dtype=torch.int32), torch.zeros(M, N, dtype=torch.bfloat16)
    check_launch(packed.mixed_launch(x, low, high, scale, sums, None, y, TILE, no_work))


@pytest.mark.parametrize(
    ("item_bytes", "kept", "count"), [(1, 128, 1), (2, 128, 2), (4, 128, 4), (2, 1152, 4), (4, 1152, 8)]
)
def test_shares__as_few_as_fit(item_bytes, kept, count):
    assert packed.shares(TILE, item_bytes, kept) == count


def test_shares__refuses_tiles_of_other_kernels():
    with pytest.raises(ValueError, match="4 slots of 64"):
        packed.shares(MatmulConfig(128, 128, 128, 4, 2, variant="registers"), 2, 0)
    with pytest.raises(ValueError, match="no shared memory"):
        packed.shares(MatmulConfig(256, 128, 64, 4, 4, per_sm=2, variant="registers"), 2, 0)


def test_why_not__says_what_it_cannot_do():
    x, w, y = torch.zeros(8, 64, dtype=torch.int8), torch.zeros(8, 32, dtype=torch.uint8), torch.zeros(8, 8)
    assert "Hopper" in packed.why_not(x, w, y, 64)
    assert packed.fits(3136)
    assert not packed.fits(72)
