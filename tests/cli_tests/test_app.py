"""The command line, the environment check and the demo's bookkeeping, on stand-ins where the real thing is slow."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer
from commands import invoke
from rich.console import Console
from torch import nn

import mmqc
from mmqc.cli import app as cli
from mmqc.cli import config as cli_config
from mmqc.cli import demo, doctor

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("cell", "image")


def console() -> Console:
    return Console(record=True, width=160)


# --- recipes and configs ----------------------------------------------------------------------------------------------


def test_make_config__passes_settings_to_the_recipe():
    config = cli_config.make_config("mquant", ["weight_bits=8", "msq=false", "solver=rtn"])
    assert config == mmqc.recipes.mquant(weight_bits=8, msq=False, solver="rtn")


@pytest.mark.parametrize(
    ("recipe", "settings", "names"),
    [
        ("nosuch", [], "mquant"),
        ("mquant", ["bits=4"], "weight_bits"),
        ("mquant", ["weight_bits"], "key=value"),
        ("rtn", ["weight_bits=5"], "WeightSpec.bits"),
    ],
)
def test_make_config__says_what_is_allowed(recipe, settings, names):
    with pytest.raises(typer.BadParameter, match=re.escape(names)):
        cli_config.make_config(recipe, settings)


def test_read_config__reads_a_config_and_a_report(tmp_path):
    config = mmqc.recipes.mquant(weight_bits=8)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config.to_dict()))
    assert cli_config.read_config(path) == config
    path.write_text(json.dumps({"config": config.to_dict(), "layers": []}))
    assert cli_config.read_config(path) == config


def test_read_config__names_an_unknown_key(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**mmqc.recipes.rtn(8).to_dict(), "no_such_key": 1}))
    with pytest.raises(typer.BadParameter, match="no_such_key"):
        cli_config.read_config(path)


def test_load__names_the_samples_for_an_unknown_model(tmp_path):
    with pytest.raises(typer.BadParameter, match="digits-vqa-stress"):
        cli.load(str(tmp_path), "digits-vqa")


def test_help__lists_every_command():
    result = invoke("--help")
    assert result.exit_code == 0
    commands = ("demo", "quantize", "eval", "bench", "report", "explain", "export", "doctor", "passes")
    assert all(name in result.output for name in commands)


# --- doctor -----------------------------------------------------------------------------------------------------------


def test_doctor__supported_versions_are_those_of_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for package, (first, beyond) in doctor.SUPPORTED.items():
        wanted = f"{package}>={'.'.join(map(str, first))},<{'.'.join(map(str, beyond))}"
        assert wanted in project["dependencies"]


def test_doctor__finds_the_pinned_packages_supported():
    checks = {c.name: c for c in doctor.examine(smoke=False)}
    assert all(checks[name].status == "ok" for name in ("python", *doctor.SUPPORTED))


def test_doctor__a_missing_compiler_is_a_problem(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    checks = doctor.examine(smoke=False)
    assert not doctor.sound(checks)
    assert any("no-such-compiler" in c.found for c in checks)
    assert any("install g++" in line for line in doctor.fallbacks(checks))
    assert invoke("doctor", "--no-smoke").exit_code == 1


def test_doctor__an_unsupported_version_is_a_problem(monkeypatch):
    monkeypatch.setattr(doctor, "installed", lambda package: {"torch": "2.10.1"}.get(package, "99"))
    checks = {c.name: c for c in doctor.examine(smoke=False)}
    assert checks["torch"].status == "problem"
    assert "2.11 or newer" in checks["torch"].advice


def test_doctor__a_failing_smoke_test_is_reported_not_raised():
    def broken():
        raise RuntimeError("the compiler fell over\nmore")

    check = doctor._guard("compiled int8", broken)
    assert check.status == "problem"
    assert check.found == "RuntimeError: the compiler fell over"


def test_doctor__compiled_int8_equals_eager():
    check = doctor._guard("compiled int8", doctor._smoke)
    assert check.status == "ok", check.found


@pytest.mark.parametrize(("text", "parts"), [("2.13.0+cpu", (2, 13, 0)), ("5.17", (5, 17)), ("2.14.0a0", (2, 14, 0))])
def test_doctor__version_numbers(text, parts):
    assert doctor.numbers(text)[: len(parts)] == parts


# --- passes -----------------------------------------------------------------------------------------------------------


def test_passes__prints_the_recipe_in_order():
    result = invoke("passes", "--recipe", "mquant")
    assert result.exit_code == 0, result.output
    order = ("raise_ops", "fold_norm_scale", "fuse_rotation", "insert_hadamard", "quantize_weights")
    places = [result.output.index(name) for name in order]
    assert places == sorted(places)


def test_passes__an_exact_recipe_has_no_quantizing_passes():
    result = invoke("passes", "--recipe", "rotate")
    assert result.exit_code == 0, result.output
    assert "quantize_weights" not in result.output


# --- quantize, eval ---------------------------------------------------------------------------------------------------


def test_quantize__saves_a_model_that_eval_loads(tmp_path):
    result = invoke("quantize", "digits-vqa", "-o", str(tmp_path), "-r", "rtn", "--w", "8", "--calibration", "0")
    assert result.exit_code == 0, result.output
    saved = json.loads((tmp_path / "quantization.json").read_text(encoding="utf-8"))
    assert len(saved["layers"]) > 40
    assert (tmp_path / "quantization.html").exists()
    assert (tmp_path / "model.safetensors").exists()
    result = invoke("eval", str(tmp_path), "-n", "5")
    assert result.exit_code == 0, result.output
    assert float(re.search(r"accuracy\W+(\d+\.\d) %", result.output).group(1)) > 50


# --- demo -------------------------------------------------------------------------------------------------------------


class FakeSample:
    """Two kinds of question; a model answers right in proportion to its `skill`."""

    def __init__(self, name: str = "digits-vqa") -> None:
        self.name = name
        self.model = nn.Linear(4, 4)
        self.model.skill = 1.0

    def calibration(self, n):
        return [{"input_ids": torch.zeros(1, 2)} for _ in range(n)]

    def questions(self, n):
        return [SimpleNamespace(kind=KINDS[i % 2], images=[], question=f"q{i}", answer=str(i)) for i in range(n)]

    def scores(self, model, n):
        from mmqc.samples.scoring import Score

        right = round(model.skill * n)
        rows = enumerate(self.questions(n))
        return [Score(q.kind, q.answer if i < right else "?", q.answer, float(i < right), 0.1) for i, q in rows]


def fake_quantize(model, config, calibration, progress):
    from mmqc.report.report import QuantReport

    assert len(calibration) == (demo.CACHE_PROMPTS if config.kv else 3)
    assert not progress
    model.skill = 0.5 if config == mmqc.recipes.rtn(8, activation_bits=8) else 0.9
    model.half()
    return QuantReport(config=config)


def test_demo__measures_prints_and_writes(monkeypatch, tmp_path):
    written = {}
    monkeypatch.setattr(mmqc, "samples", SimpleNamespace(load=FakeSample), raising=False)
    monkeypatch.setattr(mmqc, "quantize_", fake_quantize, raising=False)
    monkeypatch.setattr("mmqc.report.html.write_html", lambda path, data: written.update(data) or path)
    out = console()
    result = demo.run(demo.Options(tmp_path, questions=20, calibration=3, compile=False), out)
    assert [row["model"] for row in result.table] == ["float", "rtn w8a8, one scale", "mquant w8a8", "mquant w4a8"]
    assert [row["recovery"] for row in result.table] == [1.0, 0.5, 0.9, 0.9]
    assert [row["size"] for row in result.table] == [80, 40, 40, 40]
    assert len(result.ablation) == 1 + len(demo.ablation_configs())
    assert set(written) == {"title", "table", "ablation", "reports", "examples", "answers", "kernels", "environment"}
    text = out.export_text()
    assert all(word in text for word in ("recov.", "90.0", "step by step", "report.html"))


def test_demo__ablation_adds_one_switch_a_step():
    configs = list(demo.ablation_configs().values())
    switches = [(c.language.activation.per_modality, c.rewrites.rotate, c.rewrites.suppress) for c in configs]
    assert switches == [(False, False, False), (True, False, False), (True, True, False), (True, True, True)]


def test_demo__size_counts_shared_tensors_once():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    assert demo.size(model) == 4 * 4 * 4


def test_demo__examples_show_differences_first_and_every_kind():
    sample = FakeSample()
    worse = nn.Linear(4, 4)
    worse.skill = 0.8
    pair = [demo.Outcome(n, m, sample.scores(m, 20), {}) for n, m in (("float", sample.model), ("q", worse))]
    rows = demo.examples(sample.questions(20), *pair)
    assert rows[0]["float"] != rows[0]["quantized"]
    assert {"0", "1"} <= {row["answer"] for row in rows}


# --- export -----------------------------------------------------------------------------------------------------------


def test_export__gives_the_chosen_prompt_and_programs_to_the_exporter(monkeypatch, tmp_path):
    calls = []

    def export(model, example, out, programs, say):
        calls.append((model, example, programs))
        say("prefill: tracing")
        out.write_bytes(bytes(2**20))

    source = SimpleNamespace(prompts=lambda n: [f"prompt {i}" for i in range(n)])
    monkeypatch.setattr(mmqc, "export", export)
    monkeypatch.setattr(cli, "load", lambda model, sample: (model, source))
    done = invoke("export", "digits-vqa", str(tmp_path / "m.pt2"), "-p", "prefill", "-p", "decode", "--data", "3")
    assert done.exit_code == 0, done.output
    assert calls == [("digits-vqa", "prompt 2", ["prefill", "decode"])]
    assert "prefill: tracing" in done.output
    assert "m.pt2: 1.0 MiB" in done.output
