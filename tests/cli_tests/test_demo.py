"""The demo's bookkeeping, on stand-ins for models and quantization."""

import math
from types import SimpleNamespace

import torch
from rich.console import Console
from torch import nn

import mmqc
from mmqc.cli import demo

KINDS = ("cell", "image")


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
    out = Console(record=True, width=160)
    result = demo.run(demo.Options(tmp_path, questions=20, calibration=3, compile=False), out)
    assert [row["model"] for row in result.table] == ["float", "rtn w8a8, one scale", "mquant w8a8", "mquant w4a8"]
    assert [row["recovery"] for row in result.table] == [1.0, 0.5, 0.9, 0.9]
    assert [row["size"] for row in result.table] == [80, 40, 40, 40]
    assert len(result.ablation) == 1 + len(demo.ablation_configs())
    parts = ("title", "table", "ablation", "reports", "shown", "examples", "answers", "kernels", "environment")
    assert set(written) == set(parts)
    assert written["shown"] in written["reports"]
    text = out.export_text()
    assert all(word in text for word in ("recov.", "90.0", "step by step", "report.html"))


def test_demo__a_float_model_that_is_never_right_leaves_nothing_to_recover():
    sample = FakeSample()
    sample.model.skill = 0.0
    outcome = demo.Outcome("float", sample.model, sample.scores(sample.model, 4), {"accuracy": 0.0, "nll": 1.0})
    assert math.isnan(outcome.row(outcome)["recovery"])


def test_demo__ablation_adds_one_switch_a_step():
    configs = list(demo.ablation_configs().values())
    switches = [(c.language.activation.per_modality, c.rewrites.rotate, c.rewrites.suppress) for c in configs]
    assert switches == [(False, False, False), (True, False, False), (True, True, False), (True, True, True)]


def test_demo__examples_show_differences_first_and_every_kind():
    sample = FakeSample()
    worse = nn.Linear(4, 4)
    worse.skill = 0.8
    pair = [demo.Outcome(n, m, sample.scores(m, 20), {}) for n, m in (("float", sample.model), ("q", worse))]
    rows = demo.examples(sample.questions(20), *pair)
    assert rows[0]["float"] != rows[0]["quantized"]
    assert {"0", "1"} <= {row["answer"] for row in rows}
