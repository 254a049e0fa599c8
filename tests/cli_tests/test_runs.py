"""The page of several runs: rows carry the models' names, an interval is one cell."""

import json
import re

from mmqc import recipes
from mmqc.cli import runs
from mmqc.report.report import LayerReport, QuantReport


def test_intervals__are_one_cell():
    figures = {"accuracy": 0.5, "accuracy difference": 0.012, "accuracy difference low": -0.005, "accuracy difference high": 0.029}
    figures |= {"nll/row": 1.0, "yields low": 3.0, "nll difference": -0.1, "nll difference low": -0.2, "nll difference high": 0.0}
    assert runs.with_intervals(figures) == {
        "accuracy": 0.5,
        "accuracy difference, points [95 %]": "+1.2 [-0.5, +2.9]",
        "yields low": 3.0,
        "nll difference [95 %]": "-0.1 [-0.2, +0]",
    }


def test_page__names_rows_after_models(tmp_path):
    model = tmp_path / "llava-w4"
    model.mkdir()
    layer = LayerReport("a.q", "language", "q", "W8A16", weight_error=0.1)
    QuantReport(recipes.rtn(8), [layer], size_before=8, size_after=4).save(model / "quantization.json")
    wrote = {
        "e": {"model": str(model), "data": "vqa", "eval": {"recovery": 0.979}},
        "b": {"model": str(model), "bench": [{"how": "eager", "first_token_seconds": 0.5, "tokens_per_s": 99.0, "size": 4}]},
        "k": {
            "model": "org/other",
            "explain": {"graphs": 1, "quantized_graphs": 0, "kernels": {}, "breaks": {}, "fallbacks": []},
        },
        "old": {"eval": {"recovery": 1.0}},
    }
    for name, figures in wrote.items():
        runs.write_json(tmp_path / f"{name}.json", figures)
    assert json.loads((tmp_path / "e.json").read_text()) == wrote["e"]
    runs.write_json(None, {"nothing": 0})
    paths = [tmp_path / "e.json", model, *(tmp_path / f"{name}.json" for name in ("b", "k", "old"))]
    text = runs.page(paths, tmp_path / "page.html").read_text(encoding="utf-8")
    cells = re.findall(r'data-name="model">([^<]*)<', text)
    assert cells == ["llava-w4", "old", "llava-w4"]
    assert "<dd>97.9 %</dd>" in text
    assert "<dd>99 tokens/s</dd>" in text
    assert "Compiled: org/other" in text
