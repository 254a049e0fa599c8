"""The page in a real browser, in a wide window and on a telephone: nothing is cut off, of a model of one layer or of 80 blocks."""

import random
from types import SimpleNamespace

import browser
import pytest
from PIL import Image

from mmqc import recipes
from mmqc.report.html import write_html
from mmqc.report.report import LayerReport, QuantReport, Refusal
from mmqc.report.score_histogram import ScoreHistogram

BROWSER = browser.browser()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason="no browser is installed")]
TOWER = "model.vision_tower.vision_model.encoder.layers"


def make_report(blocks: int, vision: int, seed: int = 0) -> QuantReport:
    """Of a decoder and a vision tower of so many blocks, with long names."""
    draw = random.Random(seed)
    layers, incoherence, towers = [], {}, {}

    def add(fqn: str, tower: str, *modalities: str) -> None:
        ranges = {m: (-draw.lognormvariate(1, 1), draw.lognormvariate(2, 1)) for m in modalities}
        sqnr = {m: draw.gauss(30, 4) for m in modalities}
        done = ("norm gain folded", "rotated in", "online H12xH64")
        layers.append(LayerReport(fqn, tower, "q", "W4A8", done, sqnr, ranges, dict.fromkeys(modalities, 0.001), 0.11, 2))
        incoherence[f"{fqn}.weight"] = (draw.lognormvariate(2.5, 0.8), draw.lognormvariate(1.7, 0.3))
        towers[f"{fqn}.weight"] = tower

    for i in range(vision):
        for name in ("self_attn.out_proj", "mlp.fc2"):
            add(f"{TOWER}.{i}.{name}", "vision", "visual")
    for i in range(blocks):
        for name in ("self_attn.q_proj", "mlp.gate_proj", "mlp.down_proj")[: 1 if blocks == 1 else 3]:
            add(f"model.language_model.layers.{i}.{name}", "language", "visual", "text")
    passes = [SimpleNamespace(name="fold_norm_scale", exact=True, n_sites=17, misses=[f"{TOWER}.ln_q: read by add_7"], ms=3.14)]
    refused = [Refusal("model.vision_tower.vision_model.embeddings.patch_embedding", "conv2d", "no integer module")]
    report = QuantReport(recipes.mquant(), layers, refused, passes, 1208.1, 14_200_000_000, 4_100_000_000, incoherence)
    report.towers, report.model = towers, "llava-hf/llava-1.5-7b-hf (LlavaForConditionalGeneration)"
    report.recipe, report.date = "mquant(weight_bits=4, activation_bits=8)", "2026-11-25 16:40 UTC"
    return report


def several() -> dict:
    counts = {"exact": [1, 5, 20, 5, 1, 0], "rounded": [10, 0, 40, 0, 20, 3], "calibrated": [1, 6, 30, 6, 1, 0]}
    error = {"rounded": 1e-3, "calibrated": 2e-4}
    scores = [ScoreHistogram(i, 1, -3.0, 3.0, counts, error, (0.1, 0.2)) for i in range(8)]
    cache = QuantReport(recipes.calibquant(1), kv_scores=scores)
    kinds = {f"accuracy/{kind}": 0.9 for kind in ("row", "cell", "yes or no", "two pages", "words", "digits", "sum", "order")}
    rows = [{"model": "float", "accuracy": 0.97, "recovery": 1.0}, {"model": "w4", "accuracy": 0.5, "recovery": 0.52, **kinds}]
    return {
        "title": "mmqc demo: digits-vqa",
        "table": [*rows, {"model": "w8", "recovery": float("nan"), "accuracy difference [95 %]": "+1.2 [-0.5, +2.9]"}],
        "speed": [{"model": "w4", "how": "backend mmqc", "first_token_seconds": 0.011, "tokens_per_s": 1424.0, "size": 4e6}],
        "reports": {
            "w4": make_report(8, 4, 1),
            "w8": make_report(8, 4, 2),
            "kv1": cache,
        },
        "shown": "w4",
        "ablation": [{"step": "static", "recovery": 0.61, "nll": 1.0}, {"step": "+ MSQ", "recovery": 0.99, "nll": 0.1}],
        "examples": [
            {
                "images": [Image.new("L", (900, 90), 200)],
                "question": "What is here? " * 9,
                "answer": "12",
                "float": "12",
                "quantized": "1" * 80,
            }
        ],
        "kernels": {
            "w4": {
                "graphs": 2,
                "quantized_graphs": 1,
                "kernels": {"mmqc::scaled_matmul_with_a_very_long_name_of_its_own": 46},
                "breaks": {"Tensor.tolist(), transformers/models/llava/modeling_llava.py:123 in get_image_features": 1},
                "fallbacks": [{"graph": 0, "op": "mmqc::hadamard", "reason": "width 11008 is no power of two times 12, 20 or 28"}],
            }
        },
        "environment": {"torch": "2.13.0+cpu", "cpu": "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz" * 2},
    }


@pytest.fixture(scope="module", params=["one layer", "80 blocks", "several"])
def page(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    if request.param == "several":
        return write_html(path, several())
    return make_report(*((1, 0) if request.param == "one layer" else (80, 32))).save(path)


@pytest.mark.parametrize("width", [1280, 400])
def test_page__nothing_is_cut_off(page, width, tmp_path):
    found = browser.layout(BROWSER, page, width, tmp_path)
    assert found["width"] == width
    assert found["cut"] == []
    top = found["text"][:700]
    assert "3.5× smaller" in top
    assert "2026-11-25 16:40 UTC" in top
    image = browser.screenshot(BROWSER, page, width, 1500, tmp_path / "page.png", tmp_path)
    picture = Image.open(image).convert("L").crop((0, 0, width, 1500))
    assert len(picture.getcolors(256)) > 20, "the page is blank"


def test_browser__sees_what_is_cut_off(tmp_path):
    page = tmp_path / "page.html"
    page.write_text("<div style='width: 500px'>wide</div><p style='overflow: auto; width: 50px'>aaaaaaaaaaaaaaaaaaaaaa</p>")
    cut = browser.layout(BROWSER, page, 400, tmp_path)["cut"]
    assert [line.split(": ")[0].split(" ")[0] for line in cut] == ["html", "div", "p"]
