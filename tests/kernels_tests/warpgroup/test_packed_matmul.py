"""Launches of packed_matmul.py, as far as they are decided without a device; the order of its kernels: test_pingpong_ring.py."""

import dataclasses
import types

import offline
import pytest
import torch
from launches import check_arguments, no_work

packed = pytest.importorskip("mmqc.kernels.warpgroup.packed_matmul")
pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")
from mmqc.kernels.matmul import mixed_matmul as mixed  # noqa: E402
from mmqc.kernels.matmul import scaled_matmul as scaled  # noqa: E402
from mmqc.kernels.matmul import scaled_matmul_epilogue as epilogues  # noqa: E402
from mmqc.kernels.matmul.configs import MatmulConfig  # noqa: E402
from mmqc.kernels.matmul.epilogue_tiles import Epilogue  # noqa: E402
from mmqc.kernels.matmul.linears import Linear  # noqa: E402
from mmqc.kernels.shared.row_scale import Rows, row_scale  # noqa: E402

TILE = MatmulConfig(128, 128, 64, 4, 4, split_k=4, per_sm=2, variant="registers")
M, N, LOW, HIGH = 300, 264, 288, 48


def check_launch(launch) -> None:
    """That it gives the kernel every argument by its name, and that what TMA copies are matrices."""
    check_arguments(launch)
    for name in launch.descriptors:
        rows, columns = launch.args[name].shape
        assert rows in (M, N)
        assert columns in (LOW // 2, HIGH, N)


def one_part(tile=TILE, count=1):
    x, w, scale = torch.zeros(M, LOW, dtype=torch.int8), torch.zeros(N, LOW // 2, dtype=torch.uint8), torch.ones(N)
    y = torch.zeros(M, N, dtype=torch.bfloat16)
    linears = [Linear(w, scale, None, y)] * count
    return packed.launch(x, linears, row_scale(torch.ones(1), M), tile, Epilogue(dtype=y.dtype), no_work)


def two_parts():
    x = Rows(torch.zeros(M, LOW + HIGH, dtype=torch.int8), torch.ones(M, 2), torch.zeros(M, 2))
    low, high = torch.zeros(N, LOW // 2, dtype=torch.uint8), torch.zeros(N, HIGH, dtype=torch.int8)
    scale, sums, y = torch.ones(N, 2), torch.zeros(N, 2, dtype=torch.int32), torch.zeros(M, N, dtype=torch.bfloat16)
    return packed.mixed_launch(x, low, high, scale, sums, None, y, TILE, no_work)


def few_rows(rows: int, slots: int, count: int = 1, **more: int):
    return one_part(dataclasses.replace(TILE, block_m=rows, num_stages=slots, **more), count)


MADE = {
    "one part": one_part,
    "two parts": two_parts,
    "64 rows": lambda: few_rows(64, 6),
    "32 rows": lambda: few_rows(32, 8),
    "16 rows": lambda: few_rows(16, 9),
    "q, k, v": lambda: few_rows(64, 6, 3),
    "gate, up; 128 columns": lambda: few_rows(64, 4, 2, block_n=64, block_k=128),
}


def made(what: str):
    """A launch whose last tiles four programs share, for offline.py."""
    launch = MADE[what]()
    return launch._replace(constants=launch.constants | {"PARTS": 4} | ({"ADDED": True} if "rows" in what else {}))


@pytest.mark.parametrize("what", MADE)
def test_launch__gives_the_kernel_its_arguments(what):
    check_launch(made(what))


@pytest.mark.parametrize("m", [packed.ADDED, packed.ADDED + 1])
def test_launch__parts_of_few_rows_are_added_up(m):
    asked = []

    def work(*wanted):
        asked.append(wanted[5])
        return no_work(*wanted)

    x, y = torch.zeros(m, LOW, dtype=torch.int8), torch.zeros(m, N, dtype=torch.bfloat16)
    linear = Linear(torch.zeros(N, LOW // 2, dtype=torch.uint8), torch.ones(N), None, y)
    launch = packed.launch(x, [linear], row_scale(torch.ones(1), m), TILE, Epilogue(dtype=y.dtype), work)
    assert asked == [launch.constants["ADDED"]] == [m == packed.ADDED]


@pytest.mark.parametrize("variant", ["pingpong", "registers"])
def test_launch__is_that_of_the_tile_for_every_product_of_one_linear(variant, monkeypatch):
    launches = []
    fake = types.SimpleNamespace(run=lambda: launches.append("run"))
    monkeypatch.setitem(scaled.GLUON, variant, lambda x, linears, *_: launches.append(linears[0].w) or fake)
    monkeypatch.setattr(mixed, "supports", lambda *_: None)
    x, y, tile = (torch.zeros(M, LOW, dtype=torch.int8), torch.zeros(M, N, dtype=torch.bfloat16), TILE.with_variant(variant))
    w = torch.zeros(N, LOW // 2, dtype=torch.uint8) if variant == "registers" else torch.zeros(N, LOW, dtype=torch.int8)
    linears, rows = [Linear(w, torch.ones(N), None, y)], row_scale(torch.ones(1), M)
    scaled.multiply(x, linears, rows, config=tile)
    epilogues.scaled_matmul_epilogue(x, linears, rows, Epilogue(), tile)
    weight = mixed.Weight(w, None, torch.ones(N, 1), torch.zeros(N, 1, dtype=torch.int32))
    mixed.mixed_matmul(Rows(x, torch.ones(M, 1), torch.zeros(M, 1)), weight, out=y, config=tile)
    assert len(launches) == 6
    assert all(found is w for found in launches[::2])
    assert launches[1::2] == ["run"] * 3


def test_epilogue__weights_are_written_out_in_front_of_codes(monkeypatch):
    launches = []
    fake = types.SimpleNamespace(run=lambda: None)
    w = torch.zeros(N, LOW // 2, dtype=torch.uint8)
    for variant in ("pingpong", "registers"):
        monkeypatch.setitem(
            scaled.GLUON, variant, lambda x, linears, *_, name=variant: launches.append((name, linears[0].w)) or fake
        )
    monkeypatch.setattr(
        scaled, "tile_of", lambda x, linear, *_: TILE.with_variant("pingpong" if linear.w.dtype == torch.int8 else "registers")
    )
    for m, y, codes in ((600, torch.bfloat16, False), (600, torch.int8, True), (M, torch.int8, False)):
        x, rows = torch.zeros(m, LOW, dtype=torch.int8), row_scale(torch.ones(1), m)
        linear = Linear(w, torch.ones(N), None, torch.zeros(m, N, dtype=y))
        epilogues.scaled_matmul_epilogue(x, [linear], rows, Epilogue("relu", torch.bfloat16, rows if codes else None))
    assert [name for name, _ in launches] == ["registers", "pingpong", "registers"]
    assert launches[0][1] is launches[2][1] is w
    assert torch.equal(launches[1][1], torch.full((N, LOW), -8, dtype=torch.int8))


@pytest.mark.parametrize("what", MADE)
def test_kernels__compile_to_products_that_queue_up(what):
    """Ptxas does not wait for each of them, hardly anything is spilled, and two programs fit the shared memory."""
    told, shared = offline.compiled("test_packed_matmul", what)
    assert 2 * (shared + 1024) <= 233_472
    assert "serialized" not in told, told
    assert offline.spilled(told) < 512, told


@pytest.mark.parametrize(("item_bytes", "kept", "count"), [(1, 128, 1), (2, 128, 2), (4, 128, 4), (2, 1152, 4), (4, 1152, 8)])
def test_shares__as_few_as_fit(item_bytes, kept, count):
    assert packed.shares(TILE, item_bytes, kept) == count


def test_shares__refuses_tiles_of_other_kernels():
    with pytest.raises(ValueError, match="more than 2 slots"):
        packed.shares(MatmulConfig(128, 128, 128, 4, 2, variant="registers"), 2, 0)
    with pytest.raises(ValueError, match="no shared memory"):
        packed.shares(MatmulConfig(256, 128, 64, 4, 4, per_sm=2, variant="registers"), 2, 0)


def test_why_not__says_what_it_cannot_do():
    x, w, y = torch.zeros(8, 64, dtype=torch.int8), torch.zeros(8, 32, dtype=torch.uint8), torch.zeros(8, 8)
    assert "Hopper" in packed.why_not(x, w, y, 64)
    assert packed.fits(3136)
    assert not packed.fits(72)
