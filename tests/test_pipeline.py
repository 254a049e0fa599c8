"""The order of passes is the pipeline's: in runs, in the reference; and a pass is what its docstring says."""

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from models import tiny_qwen2_vl

import mmqc
from mmqc import recipes
from mmqc.config import Bases, ChannelScales, QuantConfig, Rewrites
from mmqc.graph.runner import Pass
from mmqc.pipeline import FACTS, phases, run_time_passes

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = (ROOT / "docs/reference/passes.md").read_text(encoding="utf-8")
EVERYTHING = recipes.mquant(8).replace(
    rewrites=Rewrites(fold_norms=True, rotate=True, hadamard=True, suppress=True, scales=ChannelScales(), bases=Bases())
)


def listed(config: QuantConfig) -> list[Pass]:
    return [item for items in phases(config).values() for item in items]


PASSES = {item.name: item for item in reversed(listed(EVERYTHING))}  # of a pass that runs twice, the first
ORDER = list(dict.fromkeys(item.name for item in listed(EVERYTHING)))


def is_in_order(some: Iterable[str], whole: Iterable[str]) -> bool:
    """Whether ``some`` is what is left of ``whole`` when others are taken out."""
    rest = iter(whole)
    return all(name in rest for name in some)


def test_pipeline__has_every_pass_of_the_folder() -> None:
    files = {path.stem for path in (ROOT / "mmqc/passes").glob("*.py")} - {"__init__", "facts"}
    assert set(ORDER) == files


def test_pipeline__changes_numerics_from_one_place_on() -> None:
    exact = {phase: {item.exact for item in items} for phase, items in phases(EVERYTHING).items()}
    assert [phase for phase, found in exact.items() if found != {True}] == ["quantize"]


def test_pipeline__reference_has_its_order_and_its_facts() -> None:
    assert re.findall(r"^\| `(\w+)` \|", REFERENCE, re.MULTILINE) == ORDER
    rows = re.findall(r"^\| `(\w+\.\w+)` \| .* \| (.*) \| (.*) \|$", REFERENCE, re.MULTILINE)
    named = {fact: [set(re.findall(r"`(\w+)`", part)) for part in parts] for fact, *parts in rows}
    assert named == {
        fact: [{n for n, p in PASSES.items() if fact in p.gives}, {n for n, p in PASSES.items() if fact in p.needs}]
        for fact in FACTS
    }


@pytest.mark.parametrize(
    ("config", "measured"),
    [
        (recipes.mquant(4, solver="rtn"), []),
        (recipes.awq(4, 16, solver="rtn"), ["fold_channel_scale"]),
        (recipes.smoothquant(8, 8, solver="rtn"), ["fold_channel_scale"]),
        (recipes.resq(solver="rtn"), ["fuse_rotation"]),
    ],
    ids=["mquant", "awq", "smoothquant", "resq"],
)
def test_pipeline__quantize_runs_passes_in_its_order(config: QuantConfig, measured: list[str]) -> None:
    model, batch = tiny_qwen2_vl()
    report = mmqc.quantize_(model, config, [batch], progress=False)
    found = phases(config)
    assert [item.name for item in found["measured"]] == measured
    assert is_in_order((r.name for r in report.passes), (item.name for item in listed(config)))
    missing = {item.name for items in list(found.values())[:-1] for item in items} - {r.name for r in report.passes}
    assert missing <= {"quantize_mixed"}, "which has no record where nothing is quantized by token"


def header(item: Any) -> dict[str, str]:
    """The lines of a pass's docstring, by the word in front."""
    text = sys.modules[type(item).__module__].__doc__ or ""
    found = re.findall(r"^(\w+): +(.*(?:\n {9}.*)*)", text, re.MULTILINE)
    return dict(found)


@pytest.mark.parametrize("name", ORDER)
def test_pass__docstring_says_what_is_checked(name: str) -> None:
    item = PASSES[name]
    lines = header(item)
    assert {"Needs", "Gives", "Exact", "Refuses"} <= lines.keys()
    for word, facts in (("Needs", item.needs), ("Gives", item.gives)):
        assert set(re.findall(r"\b[a-z]+\.[a-z]+\b", lines[word])) == facts, word
        assert facts <= FACTS.keys()
        assert facts or lines[word].startswith("nothing"), word
    assert re.match(r"\w+", lines["Exact"])[0] == ("yes" if item.exact else "no")  # type: ignore[index]


def test_pipeline__auto_is_the_order_that_measured_faster() -> None:
    assert run_time_passes("auto") == run_time_passes("sequence")
    assert run_time_passes("modality", "auto") == run_time_passes("modality", "gather")
    assert run_time_passes("modality", "gather") != run_time_passes("modality", "unified")
