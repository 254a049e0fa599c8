"""MMQC_TRACE: files in the order in which passes ran, each with what the pass did; nothing where nobody asked."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from blocks import MODELS
from fusion_cases import Readers, linear
from models import tiny_qwen2_vl
from torch import nn

import mmqc
from mmqc.graph.program import PassRecord
from mmqc.graph.record import record
from mmqc.graph.runner import run
from mmqc.pipeline import FACTS, exact_passes, quantizing_passes

CONFIG = mmqc.recipes.mquant(8, solver="rtn")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MMQC_TRACE", str(tmp_path / "new" / "trace"))
    return tmp_path / "new" / "trace"


def check_run(folder: Path, records: list[PassRecord]) -> None:
    """One file of each kind for every pass with sites, numbered as it ran; each diff starts where the last one ended."""
    ran = [f"{i:02d}_{r.name}" for i, r in enumerate(records, 1) if r.sites]
    assert 0 < len(ran) < len(records), "some of them find nothing"
    files = ["00_captured.txt", *sorted(f"{stem}.{kind}" for stem in ran for kind in ("diff", "txt"))]
    assert sorted(path.name for path in folder.iterdir()) == files
    before = (folder / "00_captured.txt").read_text(encoding="utf-8")
    for stem, item in zip(ran, (r for r in records if r.sites), strict=True):
        diff, after = ((folder / f"{stem}.{kind}").read_text(encoding="utf-8") for kind in ("diff", "txt"))
        head = f"# after {item.name}: {item.n_sites} sites, {len(item.misses)} refused, {item.ms:.1f} ms"
        assert diff.splitlines()[0] == after.splitlines()[0] == head
        lines = diff.splitlines()
        assert [line.removeprefix("# site     ") for line in lines if line.startswith("# site ")] == item.sites
        assert [line.removeprefix("# refused  ") for line in lines if line.startswith("# refused ")] == list(map(str, item.misses))
        changed = [line for line in lines if line[:1] in ("-", "+")]
        assert {line[1:] for line in changed if line[0] == "-"} <= set(before.splitlines()), stem
        assert {line[1:] for line in changed if line[0] == "+"} <= set(after.splitlines()), stem
        before = after


def test_trace__quantize_then_compile_are_numbered_in_that_order(folder: Path, without_inductor: None) -> None:
    model, batch = tiny_qwen2_vl()
    report = mmqc.quantize_(model, CONFIG, [batch], progress=False)
    with mmqc.backend.collect_records() as graphs, torch.no_grad():
        torch.compile(Readers(linear(8), linear(16)), backend="mmqc", fullgraph=True)(torch.randn(3, 32))
    assert [path.name for path in sorted(folder.iterdir())] == ["000_recorded", "001_graph_Readers.forward"]
    check_run(folder / "000_recorded", report.passes)
    (graph,) = graphs
    check_run(folder / "001_graph_Readers.forward", graph.passes)
    text = (folder / "001_graph_Readers.forward" / "00_captured.txt").read_text(encoding="utf-8")
    assert "readers.1.qweight" in text, "as the model calls it"
    assert "l_self_modules" not in text


def test_trace__backend_that_quantizes_by_itself(folder: Path, without_inductor: None) -> None:
    model, batch = MODELS["pre_ln"]()
    options = {"config": mmqc.recipes.rtn(8)}
    with mmqc.backend.collect_records() as graphs, torch.no_grad():
        torch.compile(model, backend="mmqc", options=options)(**batch)
    (graph,) = graphs
    first, second = sorted(folder.iterdir())
    assert [path.name for path in (first, second)] == ["000_graph_Text.forward", "001_graph_Text.forward"]
    count = len((*exact_passes(options["config"]), *quantizing_passes()))
    check_run(first, graph.passes[:count])
    check_run(second, graph.passes[count:])


def test_trace__equation_changed_lines_and_formulas_of_weights(folder: Path) -> None:
    model, batch = MODELS["pre_ln"]()
    run(record(model, batch), exact_passes(mmqc.recipes.rotate()), FACTS)
    (path,) = folder.glob("000_recorded/*_fold_norm_scale.diff")
    text = path.read_text(encoding="utf-8")
    first = "# Fold a norm's gain and bias into the linears that read it.\n#\n"
    equation = f"{first}#     W (g * n(x) + β) + b  =  (W diag(g)) n(x) + (b + W β)\n#\n"
    assert equation in text
    assert re.search(r"^-mul.* = mul\(rms_norm", text, re.MULTILINE)
    assert re.search(r"^\+\S+\.weight <- ", text, re.MULTILINE)


def test_trace__a_second_process_counts_on(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "007_recorded").mkdir()
    model, batch = MODELS["pre_ln"]()
    run(record(model, batch), exact_passes(mmqc.recipes.rotate()), FACTS)
    assert [path.name for path in sorted(folder.iterdir())] == ["007_recorded", "008_recorded"]


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(32, 32), 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return self.linear(x)


def test_trace__a_folder_that_cannot_be_written_is_an_error_before_work_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_inductor: None
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MMQC_TRACE", str(tmp_path / "file" / "trace"))
    model, said = Counted(), rf"MMQC_TRACE={tmp_path}/file/trace: no trace can be written there"
    with pytest.raises(mmqc.errors.MmqcError, match=said):
        mmqc.quantize_(model, mmqc.recipes.rtn(8, 8), [{"x": torch.randn(2, 32)}], progress=False)
    with pytest.raises(OSError, match=said):
        mmqc.plan(model, mmqc.recipes.rotate(), {"x": torch.randn(2, 32)})
    assert model.calls == 0
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=said):
        torch.compile(Readers(linear(8)), backend="mmqc")(torch.randn(3, 32))


@pytest.mark.parametrize("value", [None, ""])
def test_trace__is_not_even_imported_where_nobody_asked(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MMQC_TRACE", raising=False)
    if value is not None:
        monkeypatch.setenv("MMQC_TRACE", value)
    monkeypatch.delitem(sys.modules, "mmqc.graph.trace", raising=False)
    model, batch = MODELS["pre_ln"]()
    prog = run(record(model, batch), exact_passes(mmqc.recipes.rotate()), FACTS)
    assert "mmqc.graph.trace" not in sys.modules
    assert prog.traced is None
    assert {r.before + r.after for r in prog.records} == {""}
