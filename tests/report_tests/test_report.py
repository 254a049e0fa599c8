"""The report: its text names what matters, its JSON is plain, its page stands alone."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from mmqc import recipes
from mmqc.report.html import write_html
from mmqc.report.report import LayerReport, QuantReport, Refusal
from mmqc.report.tables import count, text_table

PASSES = [
    SimpleNamespace(name="fold_norm_scale", exact=True, n_sites=17, misses=["merger.ln_q: read by add_7"], ms=3.14),
    SimpleNamespace(name="quantize_weights", exact=False, n_sites=4, misses=(), ms=250.0),
]
LAYERS = [
    LayerReport(
        "visual.blocks.0.mlp.fc2",
        "vision",
        "down",
        "W4A8",
        ("online H4xH64",),
        {"visual": 21.5},
        {"visual": (-30.0, 41.0)},
        {"visual": 0.001},
        0.11,
        1,
        0.5,
    ),
    LayerReport("visual.merger.mlp.0", "projector", "up", "W4A8", (), {"visual": 33.0}, {"visual": (-3.0, 4.0)}),
    LayerReport(
        "layers.0.self_attn.q_proj",
        "language",
        "q",
        "W4A8",
        ("norm gain folded", "rotated in"),
        {"visual": 31.0, "text": 12.25},
        {"visual": (-9.0, 8.0), "text": (-1.0, 1.5)},
        {},
        0.12,
    ),
    LayerReport(
        "layers.0.self_attn.k_proj",
        "language",
        "k",
        "W4A8",
        (),
        {"visual": 30.0, "text": 29.0},
        {"visual": (-9.0, 8.0), "text": (-1.0, 1.5)},
        {},
        0.13,
        note="3 input channels are always zero",
    ),
]
REFUSED = [Refusal("visual.patch_embed.proj", "conv3d", "a convolution has no integer module")]


def make_report(**changes):
    config = recipes.mquant().replace(statistics={"x": {"scale": torch.tensor([0.5, float("inf")])}})
    values = {"layers": LAYERS, "refused": REFUSED, "passes": PASSES, "seconds": 2.5}
    return QuantReport(config, **{**values, "size_before": 28_000_000, "size_after": 7_000_000, **changes})


def test_summary__totals_worst_layers_passes_and_refusals():
    text = make_report().summary()
    assert text == str(make_report())
    assert "4 layers quantized, 1 refusal, 2.5 s" in text
    assert "28.0 MB -> 7.0 MB (25%)" in text
    assert re.search(r"^language +2 +W4A8 +30\.5 \(30\.0\) +20\.6 \(12\.2\) +0\.00% +12\.50% +0$", text, re.M)
    assert re.search(r"^lowest SQNR.*\nlayers\.0\.self_attn\.q_proj +W4A8 +31\.0 +12\.2\n  norm gain folded", text, re.M)
    assert re.search(r"^fold_norm_scale +exact +17 +1 +3\.1$", text, re.M)
    assert "visual.patch_embed.proj (node conv3d): a convolution has no integer module" in text


def test_summary__of_nothing():
    text = QuantReport(recipes.rotate()).summary()
    assert text == "0 layers quantized, 0 refusals, 0.0 s\nnothing quantized"


def test_refusal__reads_without_a_node_or_a_name():
    assert str(Refusal("a.weight", "", "why")) == "a.weight: why"
    assert str(Refusal("a.weight", "a.weight", "why")) == "a.weight: why"
    assert str(Refusal("", "add_1", "why")) == "the model (node add_1): why"


def test_dict__is_plain_json():
    data = make_report().to_dict()
    again = json.loads(json.dumps(data, allow_nan=False))
    assert again == data
    assert data["config"]["statistics"] == {"x": {"scale": [0.5, None]}}
    assert data["layers"][1]["weight_error"] is None
    assert data["layers"][0]["ranges"] == {"visual": [-30.0, 41.0]}
    assert data["passes"][0]["reasons"] == ["merger.ln_q: read by add_7"]


class Page(HTMLParser):
    """Collects tags and whatever a browser would fetch."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.links = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [v for k, v in attrs if k in ("src", "href") and not v.startswith("data:")]
        if tag not in ("img", "meta", "source"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def check_page(path):
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == []
    assert page.links == []
    assert "url(" not in text
    assert "@import" not in text
    return text, page


@pytest.mark.parametrize("suffix", [".html", ".json", ".txt"])
def test_save__by_suffix(tmp_path, suffix):
    path = make_report().save(tmp_path / "new" / f"report{suffix}")
    text = path.read_text(encoding="utf-8")
    assert "layers.0.self_attn.q_proj" in text
    if suffix == ".html":
        text, page = check_page(path)
        assert page.tags.count("img") == page.tags.count("source") == 3  # a plot for a wide window, one for a narrow one
        assert "3 input channels are always zero" in text


def test_save__refuses_another_suffix(tmp_path):
    with pytest.raises(ValueError, match=r"report\.pdf.*\.html, \.json, \.txt"):
        make_report().save(tmp_path / "report.pdf")


def test_page__shows_tables_images_and_marks_wrong_answers(tmp_path):
    gray = np.arange(48, dtype=np.uint8).reshape(6, 8)
    examples = [
        {
            "images": [gray, gray[..., None] / 47],
            "question": "What is <here>?",
            "answer": "1234",
            "float": "1234",
            "quantized": {"rtn": "12", "mquant": "1934"},
        },
        {"images": [Image.fromarray(gray)], "question": "And?", "answer": "no", "float": "no", "quantized": "no"},
    ]
    table = [{"model": "float", "accuracy": 0.97, "recovery": 1.0}, {"model": "rtn", "accuracy/row": 0.5, "recovery": 0.61}]
    data = {
        "title": "A & B",
        "table": table,
        "ablation": [{"step": "+ MSQ", "recovery": 0.9}],
        "reports": {"rtn": make_report(), "mquant": make_report(layers=LAYERS[2:])},
        "examples": examples,
        "environment": {"torch": "2.13"},
    }
    text, page = check_page(write_html(tmp_path / "report.html", data))
    assert page.tags.count("article") == 2
    assert "A &amp; B" in text
    assert "What is &lt;here&gt;?" in text
    assert '1<span class="wrong">9</span>34' in text
    assert '12<span class="wrong">··</span>' in text
    assert text.count("✓") == 3
    assert "merger.ln_q: read by add_7" in text
    assert '<span class="bad">61.0 %</span>' in text
    assert "97.0 %" in text


def test_page__of_nothing_is_still_a_page(tmp_path):
    check_page(write_html(tmp_path / "report.html", {}))


def test_page__escapes_everything_that_it_shows(tmp_path):
    """A value of any part of the data is text: none becomes a tag."""
    evil = "<script>alert(1)</script>"
    layer = LayerReport(evil, evil, evil, evil, (evil,), {"visual": 3.0}, {"visual": (-1.0, 1.0)}, note=evil)
    passes = [SimpleNamespace(name=evil, exact=True, n_sites=1, misses=[evil], ms=1.0)]
    fallback = {"graph": evil, "op": evil, "reason": evil}
    data = {
        **{"title": evil, "table": [{evil: evil, "recovery": 0.5}], "ablation": [{evil: evil}], "speed": [{evil: evil}]},
        **{"answers": [{evil: evil}], "environment": {evil: evil}},
        "reports": {evil: make_report(layers=[layer], passes=passes, refused=[Refusal(evil, evil, evil)]), "b": make_report()},
        "examples": [{"images": [], "question": evil, "answer": evil, "float": evil, "quantized": {evil: f"{evil}!"}}],
        "kernels": {
            evil: {"graphs": 1, "quantized_graphs": evil, "kernels": {evil: 1}, "breaks": {evil: 1}, "fallbacks": [fallback]}
        },
    }
    text, page = check_page(write_html(tmp_path / "report.html", data))
    assert "script" not in page.tags
    assert "<script" not in text
    assert text.count("&lt;script&gt;alert(1)") > 25


def test_page__without_jinja_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "jinja2", None)
    with pytest.raises(ImportError, match=r"jinja2.*mmqc\[report\].*\.json"):
        make_report().save(tmp_path / "report.html")


def test_page__of_saved_data_is_that_of_the_report(tmp_path):
    report = make_report(incoherence={"a": (9.0, float("nan")), "b": (5.0, 2.0)}, towers={"b": "vision"}, layers=LAYERS[1:2])
    data = json.loads(report.save(tmp_path / "quantization.json").read_text(encoding="utf-8"))
    pages = [write_html(tmp_path / f"{i}.html", {"reports": {"r": r}}).read_text() for i, r in enumerate((report, data))]
    assert pages[0] == pages[1]
    assert "33.0" in pages[0]


def test_plots__without_matplotlib_say_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"mmqc\[report\].*\.json"):
        make_report().save(tmp_path / "report.html")


def test_text__columns_line_up_and_nouns_agree():
    assert text_table(("name", "n"), [("a", 1), ("long", 20)]) == "name   n\na      1\nlong  20"
    assert [count(1, "pass"), count(2, "pass"), count(0, "layer")] == ["1 pass", "2 passes", "0 layers"]


def long() -> QuantReport:
    layers = [replace(layer, fqn=f"layers.{i}.<b>") for i in range(300) for layer in LAYERS]
    statistics = {"linears": {layer.fqn: {"outliers": list(range(100))} for layer in layers}}
    refused = [Refusal(f"<script>{i}", "", "x < y") for i in range(30)]
    return QuantReport(recipes.mquant().replace(statistics=statistics), layers, refused, seconds=8.1, size_before=9, size_after=3)


def test_report__repr_is_a_line() -> None:
    assert repr(long()) == "QuantReport(1200 layers quantized, 30 refusals, 8.1 s)"
    assert len(repr(long().config)) < 3000
    assert "statistics" not in repr(long().config)


def test_report__notebook_shows_a_small_table() -> None:
    shown = long()._repr_html_()
    assert len(shown) < 4000
    assert shown.count("<tr>") == 4  # the head and three towers
    assert "<td>projector</td><td>300</td>" in shown
    assert "&lt;script&gt;9: x &lt; y" in shown
    assert "... and 20 more in report.refused" in shown
    assert "<script>" not in shown
    assert QuantReport(recipes.rotate())._repr_html_() == "<p>0 layers quantized, 0 refusals, 0.0 s<br>nothing quantized</p>"
