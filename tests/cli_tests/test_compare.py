"""`mmqc compare` on the shipped sample, and which recipes are on the front."""

import json

import pytest
from commands import invoke

from mmqc.cli.compare import front, recipes_of


def test_front__is_what_nothing_undercuts():
    assert front([(4, 1), (2, 3), (3, 3), (1, 9), (2, 8)]) == [3, 1, 0]
    assert front([(2, 3), (2, 3)]) == [0, 1]  # alike: both
    assert front([]) == []


def test_recipes__with_arguments():
    found = recipes_of("rtn:weight_bits=8, mquant:weight_bits=4:rotate=false")
    assert list(found) == ["rtn:weight_bits=8", "mquant:weight_bits=4:rotate=false"]
    assert [config.language.weight.bits for config in found.values()] == [8, 4]


@pytest.mark.slow
def test_compare__table_figures_and_picture(tmp_path):
    pytest.importorskip("matplotlib")
    out, picture = tmp_path / "c.json", tmp_path / "front.png"
    recipes = "rtn:weight_bits=8,rtn:weight_bits=3"
    result = invoke(
        "compare",
        "digits-vqa",
        "--recipes",
        recipes,
        "--calibration",
        "0",
        "-n",
        "5",
        "--json",
        str(out),
        "--picture",
        str(picture),
    )
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())["compare"]
    full, eight, three = found["recipes"]
    assert full["bytes"] > 3 * eight["bytes"] > 3 * three["bytes"]
    assert 0 < eight["KL"] < three["KL"]
    assert eight["KL low"] <= eight["KL"] <= eight["KL high"]
    assert found["front"] == ["rtn:weight_bits=3", "rtn:weight_bits=8"]
    assert "on the front of KL over bytes: rtn:weight_bits=3, rtn:weight_bits=8" in result.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 10_000
