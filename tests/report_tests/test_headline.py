"""On top of the page: the model, its recipe in words, the date, and three numbers, measured ones where there are some."""

import pytest

from mmqc import recipes
from mmqc.report.headline import comparison, headline
from mmqc.report.recipe_words import recipe_words
from mmqc.report.report import LayerReport, QuantReport

LAYERS = [
    LayerReport("a.q", "language", "q", "W4A8", sqnr={"visual": 31.0, "text": 12.0}, weight_error=0.1),
    LayerReport("a.k", "language", "k", "W4A8", sqnr={"visual": 30.0, "text": 29.0}, weight_error=0.3),
]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (recipes.rtn(4, group_size=32), "W4A16-g32 rtn"),
        (recipes.rtn(8, activation_bits=8), "W8A8 rtn; one scale a tensor"),
        (
            recipes.mquant(4, vision_weight_bits=8),
            "vision W8A8 gptq, projector W8A8 gptq, language W4A8 gptq; scales by modality; "
            "rotated, online Hadamards, magnitude suppression",
        ),
        (recipes.rotate(), "rotated, online Hadamards"),
        (recipes.rtn(8) | recipes.calibquant(2), "W8A16 rtn; visual KV cache in 2 bits"),
        (recipes.calibquant(3, by_layer=True), "visual KV cache in 3 bits on average"),
        (recipes.smoothquant(alpha=0.4), "W4A4 gptq; smoothed by 0.4"),
        (
            recipes.resq(vision_bits=4),
            "W4A4 + 0.125 at 8 gptq; rotated, principal bases, online Hadamards; keys and values rounded to 4 bits",
        ),
        (recipes.rotate().replace(rewrites=recipes.rtn(4).rewrites), "nothing quantized"),
    ],
)
def test_recipe_words__say_what_is_in_the_config(config, words):
    assert recipe_words(config) == words
    assert recipe_words(config.to_dict() | {"statistics": {"unread": 1}}) == words


def line(report, results=(), speed=()):
    return headline("m", report.to_dict(), results, speed)


def test_headline__of_a_report_alone():
    told = QuantReport(recipes.rtn(8), LAYERS, size_before=14_200_000_000, size_after=4_000_000_000, seconds=2.5)
    told.model, told.recipe, told.date = "org/m (Model)", "rtn(weight_bits=8)", "2026-01-02"
    found = line(told)
    assert (found.model, found.date) == ("org/m (Model)", "2026-01-02")
    assert found.recipe == "rtn(weight_bits=8): W8A16 rtn"
    size, noise, layers = found.numbers
    assert (size.value, size.what) == ("3.5× smaller", "14.2 GB → 4.0 GB")
    assert noise.value == "20.5 dB"  # the medians are 30.5 and 20.5
    assert "lowest 12.0 dB, text rows of a.q" in noise.what
    assert (layers.value, layers.what) == ("2 layers", "quantized, 0 refusals, 2.5 s")


def test_headline__of_weights_alone_and_of_a_cache_alone():
    bare = [LayerReport("a", "language", "q", "W4A16", weight_error=e) for e in (0.1, 0.2, 0.4)]
    assert line(QuantReport(recipes.rtn(4), bare)).numbers[1].value == "20.0%"
    size, accuracy, _ = line(QuantReport(recipes.calibquant(1))).numbers
    assert (size.value, accuracy.what) == ("1 bit", "accuracy was not measured: mmqc eval does")


def test_headline__measured_rows_of_the_model_count():
    results = [{"model": "m", "recovery": 0.85}, {"model": "m", "recovery": 0.99}, {"model": "other", "recovery": 0.1}]
    speed = [
        {"model": "m", "how": "eager", "first_token_seconds": 0.2, "tokens_per_s": 468.0},
        {"model": "m", "how": "backend mmqc", "first_token_seconds": 0.0114, "tokens_per_s": 1424.4},
    ]
    told = QuantReport(recipes.rtn(8), LAYERS)
    _, accuracy, fast = line(told, results, speed).numbers
    assert (accuracy.value, accuracy.bad) == ("85.0 %", True)  # the worse of two data sets
    assert (fast.value, fast.what) == ("1,424 tokens/s", "backend mmqc; the first after 11 ms")
    undefined = line(told, [{"model": "m", "recovery": float("nan")}]).numbers[1]
    assert undefined.value == "20.5 dB"


def test_comparison__a_row_a_model_without_empty_columns():
    told = QuantReport(recipes.rtn(8), LAYERS, size_before=8, size_after=4)
    head, rows = comparison({"a": line(told), "b": line(told)})
    assert head == ("model", "recipe", "size", "accuracy or noise", "speed or layers")
    assert rows == [(name, "W8A16 rtn", "2.0× smaller", "20.5 dB", "2 layers") for name in "ab"]
