"""The table of tiles answers for every shape, and a measured file overrides it."""

import json

import pytest
import torch

configs = pytest.importorskip("mmqc.kernels.matmul.configs")
CPU = torch.device("cpu")


@pytest.mark.parametrize("capability", [0, 80, 90])
@pytest.mark.parametrize("op", configs.OPS)
def test_table__answers_for_every_shape(op, capability, monkeypatch):
    monkeypatch.setattr(configs, "capability", lambda device: capability)
    monkeypatch.setattr(configs, "_table", configs._table.__wrapped__)  # the answers of another capability are not this one's
    for m in (1, 5, 16, 17, 33, 64, 100, 256, 917, 8192, 100_000):
        for n, k in ((1, 1), (27, 1), (3584, 18944), (37888, 3584), (1280, 4304), (3420, 27)):
            tile = configs.table(op, m, n, k, CPU)
            assert tile.block_k >= 32
            assert tile.split_k == 1 or tile.variant in ("pingpong", "registers") or tile.split_k * tile.block_k <= 2 * k
            assert capability >= 90 or tile.variant not in configs.PERSISTENT


@pytest.mark.parametrize(
    ("op", "m", "n", "k", "tile"),
    [
        ("scaled_int4", 1, 5120, 8192, (8, 32, 256, 2, 3, 3)),
        ("scaled_int4", 16, 8192, 14784, (16, 32, 256, 2, 3, 1)),
        ("scaled_int4", 16, 29568, 8192, (16, 64, 256, 4, 3, 1)),
        ("scaled_int4", 64, 8192, 14784, (64, 64, 128, 4, 4, 2)),
        ("scaled_int4", 64, 22016, 4096, (64, 64, 128, 4, 3, 1)),  # 344 tiles: three a multiprocessor
        ("scaled_int4", 64, 59136, 8192, (64, 128, 128, 4, 3, 1)),
        ("weight_int8", 1, 152064, 3584, (8, 32, 256, 2, 3, 1)),
        ("weight_int8", 64, 152064, 3584, (64, 128, 128, 4, 3, 1)),
        ("weight_int8", 16, 3584, 18944, (16, 32, 256, 2, 3, 7)),
        ("weight_int8", 64, 3584, 18944, (64, 64, 128, 4, 3, 9)),
    ],
)
def test_table__few_rows(op, m, n, k, tile, monkeypatch):
    monkeypatch.setattr(configs, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(configs, "_table", configs._table.__wrapped__)
    c = configs.table(op, m, n, k, CPU)
    assert (c.block_m, c.block_n, c.block_k, c.num_warps, c.num_stages, c.split_k) == tile


def test_bucket__is_the_smallest_that_holds_the_rows():
    assert [configs.bucket(m) for m in (1, 2, 8, 9, 16, 917, 8192, 9000)] == [1, 8, 8, 16, 16, 1024, 8192, 8192]


def test_config__measured_file_overrides_the_table(tmp_path, monkeypatch):
    tile = configs.MatmulConfig(16, 32, 64, 2, 3, split_k=2, variant="columns")
    name = configs.key("weight_int4", 1, 48, 256)
    (tmp_path / "interpreter.json").write_text(json.dumps({"configs": {name: tile.to_dict()}}))
    monkeypatch.setattr(configs, "FOLDER", tmp_path)
    configs.measured.cache_clear()
    try:
        assert configs.config("weight_int4", 1, 48, 256, CPU) == tile
        assert configs.config("weight_int4", 2, 48, 256, CPU) == configs.table("weight_int4", 2, 48, 256, CPU)
    finally:
        configs.measured.cache_clear()


def test_config__of_a_gpu_alike_where_there_is_none_of_its_own(tmp_path, monkeypatch):
    own, alike, other = (configs.MatmulConfig(16, 32, k, 2, 3) for k in (32, 64, 128))
    chip = {"capability": configs.capability(CPU), "multiprocessors": configs.multiprocessors(CPU)}
    first, second, third = (configs.key("weight_int4", 1, n, 256) for n in (48, 64, 80))
    for name, facts, tiles in (
        ("a_twin", chip, {first: alike, second: alike}),
        ("interpreter", chip, {first: own}),
        ("unlike", chip | {"multiprocessors": 1}, {third: other}),
    ):
        file = {"chip": facts, "configs": {where: tile.to_dict() for where, tile in tiles.items()}}
        (tmp_path / f"{name}.json").write_text(json.dumps(file))
    monkeypatch.setattr(configs, "FOLDER", tmp_path)
    configs.measured.cache_clear()
    try:
        assert configs.measured(CPU) == {first: own, second: alike}
    finally:
        configs.measured.cache_clear()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"block_n": 48}, "power of two"),
        ({"variant": "fast"}, "one of"),
        ({"split_k": 0}, "at least 1"),
        ({"tail": 32}, "of a persistent tile, not rows"),
        ({"tail": 8, "variant": "nested"}, "16 to 128 columns"),
        ({"tiles": 1}, "no"),
    ],
)
def test_config__refuses(change, why):
    values = {"block_m": 16, "block_n": 32, "block_k": 32, "num_warps": 4, "num_stages": 2} | change
    with pytest.raises(ValueError, match=why):
        configs.MatmulConfig.from_dict(values)


def test_config__packed_weights_are_unpacked_in_registers_unless_a_tuned_file_says_otherwise():
    for op in ("packed_int4", "packed_mixed"):
        assert configs.config(op, 2048, 4608, 3584, CPU).variant == "registers"


@pytest.mark.parametrize(
    ("n", "k", "variant"),
    [
        (5120, 8192, "columns"),  # 80 tiles of 132 programs, too many for two parts each
        (8192, 14784, "registers"),  # 128
        (3584, 18944, "registers"),  # 56, in two parts
        (4608, 3584, "registers"),
    ],
)
def test_table__long_rows_whose_tiles_leave_the_machine_idle_go_by_pointers(n, k, variant, monkeypatch):
    monkeypatch.setattr(configs, "multiprocessors", lambda _: 132)
    for m in (32, 64):
        assert configs._packed_few(m, n, k, CPU).variant == variant
