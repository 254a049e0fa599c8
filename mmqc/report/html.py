"""The report as one self-contained web page: tables, plots and sample images, nothing loaded from elsewhere."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from mmqc.report.plots import incoherence_plot, ranges_plot, recovery_plot, sqnr_plot
from mmqc.report.report import MODALITIES, LayerReport, QuantReport, count, decibels, pass_row, tower_row
from mmqc.report.score_histogram import CALIBRATED
from mmqc.report.scores import error_plot, scores_plot
from mmqc.report.style import CSS

Row = Mapping[str, Any]


def page(data: Mapping[str, Any]) -> str:
    """The whole document; see ``mmqc.report.write_html`` for ``data``."""
    title = str(data.get("title", "Quantization report"))
    reports: Mapping[str, QuantReport] = data.get("reports") or {}
    body = [
        f"<header><h1>{escape(title)}</h1></header>",
        _results(data.get("table") or []),
        _speed(data.get("speed") or []),
        _ablation(data.get("ablation") or []),
        _answers(data.get("answers") or []),
        _examples(data.get("examples") or []),
        _ranges(reports),
        _sqnr(reports),
        _incoherence(reports),
        *(_scores(name, report, alone=len(reports) == 1) for name, report in reports.items()),
        *(_model(name, report, alone=len(reports) == 1) for name, report in reports.items()),
        *(_kernels(name, found) for name, found in (data.get("kernels") or {}).items()),
        _environment(data.get("environment") or {}),
    ]
    viewport = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    head = f'<meta charset="utf-8">{viewport}<title>{escape(title)}</title><style>{CSS}</style>'
    main = "\n".join(part for part in body if part)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body><main>\n{main}\n</main></body></html>\n'


def section(title: str, lead: str, *parts: str) -> str:
    """A titled block with one sentence of introduction."""
    lead = f'<p class="lead">{lead}</p>' if lead else ""
    return f"<section><h2>{escape(title)}</h2>{lead}{''.join(parts)}</section>"


def picture(uri: str | None, what: str) -> str:
    """An embedded plot, or nothing."""
    return f'<div class="scroll"><img class="plot" alt="{escape(what)}" src="{uri}"></div>' if uri else ""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """An HTML table of finished cells; cells that start with a digit, a sign or a dash are set to the right."""
    rows = list(rows)
    right = [all(_numeric(row[i]) for row in rows) for i in range(len(head))]
    css = ["n" if r else "" for r in right]
    top = "".join(f'<th class="{c}">{escape(h)}</th>' for h, c in zip(head, css, strict=True))
    lines = ["".join(f'<td class="{c}">{v}</td>' for v, c in zip(row, css, strict=True)) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _numeric(cell: str) -> bool:
    text = cell.split(">", 1)[1] if cell.startswith("<span") else cell
    return text in ("", "-") or text[:1].isdigit() or (text[:1] in "-+−" and text[1:2].isdigit())


def _results(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    lead = (
        "Accuracy on data that calibration has not seen; recovery is its share of the float model's; nll is the negative "
        "log-likelihood of the right answer; size is that of parameters and buffers; seconds are those of quantization."
    )
    return section("What quantization costs", lead, _dict_table(rows), picture(recovery_plot(_recovery(rows)), "recovery"))


def _speed(rows: Sequence[Row]) -> str:
    lead = "One prompt at a time: seconds to the first token, then tokens per second; size of parameters and buffers."
    return section("Size and speed", lead, _dict_table(rows)) if rows else ""


def _answers(rows: Sequence[Row]) -> str:
    lead = "Questions to the compiled model, one after the other; the first answers include compilation."
    return section("The compiled model", lead, _dict_table(rows)) if rows else ""


def _ablation(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    lead = (
        "One ingredient of the recipe after the other, on the model that was made hard to quantize. Once the accuracy is "
        "the float model's, a further step can show in the answers' negative log-likelihood (nll) only."
    )
    return section("What each step brings", lead, _dict_table(rows), picture(recovery_plot(_recovery(rows)), "recovery"))


def _recovery(rows: Sequence[Row]) -> list[tuple[str, float]]:
    return [(_name(row), float(row["recovery"])) for row in rows if isinstance(row.get("recovery"), int | float)]


def _name(row: Row) -> str:
    return next((str(v) for v in row.values() if isinstance(v, str)), "")


def _dict_table(rows: Sequence[Row]) -> str:
    keys = list(dict.fromkeys(key for row in rows for key in row))
    return table([_heading(k) for k in keys], [[_cell(k, row.get(k)) for k in keys] for row in rows])


def _heading(key: str) -> str:
    return key.replace("accuracy/", "").replace("_", " ")


def _cell(key: str, value: Any) -> str:
    """A value by what its column's name says it is: a share, a size, a time."""
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return escape(str(value))
    if any(word in key for word in ("recovery", "accuracy", "share")):
        text = f"{100 * value:.1f} %"
        return f'<span class="bad">{text}</span>' if "recovery" in key and value < 0.9 else text
    if any(word in key for word in ("size", "bytes")) and value > 1e4:
        return f"{value / 1e6:.2f} MB"
    if any(word in key for word in ("second", "time")) or key == "s":
        return f"{value:.1f} s" if value >= 1 else f"{1e3 * value:.0f} ms" if value else "-"
    if any(word in key for word in ("nll", "perplexity")):
        return f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _ranges(reports: Mapping[str, QuantReport]) -> str:
    decoder = ranges_plot(reports, ("projector", "language"))
    vision = ranges_plot(reports, ("vision",))
    if not decoder and not vision:
        return ""
    lead = (
        "Smallest and largest value that reaches each layer, on a logarithmic scale. Where visual tokens (orange) span "
        "far more than text tokens (blue), one static scale for both wastes the codes of the text: each modality needs "
        "its own."
    )
    tower = f"<details><summary>Vision tower</summary>{picture(vision, 'ranges in the vision tower')}</details>"
    return section("Activation ranges by modality", lead, picture(decoder, "ranges in the decoder"), tower if vision else "")


def _sqnr(reports: Mapping[str, QuantReport]) -> str:
    plot = sqnr_plot(reports)
    lead = "Signal-to-quantization-noise ratio of each layer's output on float inputs from calibration; 6 dB are one bit."
    return section("Noise layer by layer", lead, picture(plot, "SQNR by layer")) if plot else ""


def _incoherence(reports: Mapping[str, QuantReport]) -> str:
    plot = incoherence_plot(reports)
    lead = (
        "Incoherence μ = max|W| √(mn) / ‖W‖ of every linear weight before and after the exact rewrites. It is 1 where all "
        "entries have one magnitude; the lower, the less of the integer range goes to a few entries. Below the diagonal, "
        "the rewrites made a weight easier to round."
    )
    return section("How evenly the weights are spread", lead, picture(plot, "incoherence")) if plot else ""


def _scores(name: str, report: QuantReport, *, alone: bool) -> str:
    plot = scores_plot(report.kv_scores)
    if not plot:
        return ""
    calibrated = any(CALIBRATED in layer.counts for layer in report.kv_scores)
    lead = (
        "Attention scores q kᵀ/√d of text tokens behind an image against the image's tokens, on one calibration batch; all "
        f"heads of a layer together: exact (grey), with keys in {count(report.kv_scores[0].bits, 'bit')} (blue), "
        + ("and calibrated before the softmax (red)" if calibrated else "and not calibrated, for no layer has a τ")
        + ". After CalibQuant's Figures 1 and 2."
    )
    title = "Scores of a packed KV cache" + ("" if alone else f": {name}")
    error = picture(error_plot(report.kv_scores), "error of the softmax by layer")
    return section(title, lead, picture(plot, "histograms of scores by layer"), error)


def _examples(examples: Sequence[Row]) -> str:
    if not examples:
        return ""
    lead = "Unseen images, the question, and what the models answered; wrong characters are struck through."
    cards = "".join(_card(example) for example in examples)
    return section("Some answers", lead, f'<div class="cards">{cards}</div>')


def _card(example: Row) -> str:
    images = "".join(f'<img alt="" src="{_image(image)}">' for image in example.get("images", ()))
    quantized = example["quantized"]
    models = {"float": example["float"], **(quantized if isinstance(quantized, Mapping) else {"quantized": quantized})}
    answers = "".join(
        f"<dt>{escape(name)}</dt><dd>{_marked(str(text), str(example['answer']))}</dd>" for name, text in models.items()
    )
    question, answer = escape(str(example["question"])), escape(str(example["answer"]))
    return (
        f'<article><div class="images">{images}</div><p class="question">{question}</p>'
        f'<dl><dt>truth</dt><dd><span class="mark"></span><code>{answer}</code></dd>{answers}</dl></article>'
    )


def _marked(text: str, answer: str) -> str:
    """The answer with a tick or a cross in front, every wrong or missing character marked."""
    if text.strip() == answer.strip():
        return f'<span class="mark right">✓</span><code>{escape(text)}</code>'
    padded = text + "·" * max(0, len(answer) - len(text))
    runs: list[tuple[bool, str]] = []
    for i, char in enumerate(padded):
        good = answer[i : i + 1] == char
        runs = [*runs[:-1], (good, runs[-1][1] + char)] if runs and runs[-1][0] == good else [*runs, (good, char)]
    body = "".join(escape(run) if good else f'<span class="wrong">{escape(run)}</span>' for good, run in runs)
    return f'<span class="mark cross">✗</span><code>{body}</code>'


def _image(image: Any) -> str:
    """A PIL image or an array [H, W] or [H, W, C] (uint8, or floating point in [0, 1]) as a data URI."""
    from PIL import Image

    if not isinstance(image, Image.Image):
        array = np.asarray(image)
        array = array.squeeze(-1) if array.ndim == 3 and array.shape[-1] == 1 else array
        if array.dtype.kind == "f":
            array = np.clip(255 * array, 0, 255).round()
        image = Image.fromarray(array.astype(np.uint8))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def _model(name: str, report: QuantReport, *, alone: bool) -> str:
    """Totals, passes, refusals and every layer of one report."""
    towers = [[escape(cell) for cell in tower_row(tower, layers)] for tower, layers in report.by_tower().items()]
    head = ("tower", "layers", "scheme", "SQNR visual, dB", "SQNR text, dB", "clipped", "weight error", "outliers")
    parts = [table(head, towers) if towers else "", _passes(report), _refused(report), _layers(report)]
    size = f", {report.size_before / 1e6:.1f} MB → {report.size_after / 1e6:.1f} MB" if report.size_before else ""
    lead = f"{report.totals()}{size}."
    if report.layers:
        lead += (
            " SQNR: median over the layers, the lowest in brackets. Clipped: the largest share of a layer's input beyond its "
            "static scale. Weight error: |W − Q| / |W|, the median. Outliers: input channels kept in higher precision."
        )
    return section("The model" if alone else f"The model: {name}", escape(lead), *parts)


def _kernels(name: str, found: Row) -> str:
    """What the compiled model calls, and where an op did without its kernel."""
    calls = sum(found["kernels"].values())
    kernels = table(("kernel", "calls"), [[f"<code>{escape(k)}</code>", str(n)] for k, n in found["kernels"].items()])
    fallbacks = [[f"{f['graph']}", f"<code>{escape(f['op'])}</code>", escape(f["reason"])] for f in found["fallbacks"]]
    breaks = [[str(n), escape(reason)] for reason, n in found["breaks"].items()]
    parts = [
        _fold(f"{count(len(found['kernels']), 'kernel')}, {count(calls, 'call')}", kernels) if calls else "",
        _fold(count(len(fallbacks), "fallback"), table(("graph", "op", "reason"), fallbacks)) if fallbacks else "",
        _fold(count(len(breaks), "graph break"), table(("times", "reason and place"), breaks)) if breaks else "",
    ]
    lead = f"{count(found['graphs'], 'graph')}, {found['quantized_graphs']} with quantized work."
    if not fallbacks:
        lead += " Every op got its kernel."
    return section(f"Compiled: {name}", escape(lead), *parts)


def _fold(what: str, body: str, *, is_open: bool = False) -> str:
    return f"<details{' open' if is_open else ''}><summary>{escape(what)}</summary>{body}</details>"


def _passes(report: QuantReport) -> str:
    records = [pass_row(record) for record in report.passes]
    rows = [
        [escape(r["name"]), "exact" if r["exact"] else "lossy", str(r["sites"]), str(r["refused"]), f"{r['ms']:.1f}"]
        for r in records
    ]
    reasons = [[escape(r["name"]), escape(reason)] for r in records for reason in r["reasons"]]
    why = table(("pass", "left alone, and why"), reasons) if reasons else ""
    return _fold(count(len(rows), "pass"), table(("pass", "", "sites", "refused", "ms"), rows) + why) if rows else ""


def _refused(report: QuantReport) -> str:
    rows = [[f"<code>{escape(r.fqn)}</code>", escape(r.node), escape(r.reason)] for r in report.refused]
    return _fold(count(len(rows), "refusal"), table(("parameter or module", "node", "reason"), rows)) if rows else ""


def _layers(report: QuantReport) -> str:
    columns: list[tuple[str, Callable[[LayerReport], str]]] = [
        ("layer", lambda x: f'<code class="name">{escape(x.fqn)}</code>'),
        ("scheme", lambda x: escape(x.scheme)),
        *((f"SQNR {m}", lambda x, m=m: decibels(x.sqnr.get(m))) for m in MODALITIES),
        *((f"{m} range", lambda x, m=m: _interval(x.ranges.get(m))) for m in MODALITIES),
        ("outliers", lambda x: str(x.outliers)),
        ("what was done", lambda x: escape(", ".join([*x.transforms, *([x.note] if x.note else [])]))),
    ]
    rows = [[cell(layer) for _, cell in columns] for layer in report.layers]
    return _fold(count(len(rows), "layer"), table([name for name, _ in columns], rows)) if rows else ""


def _interval(ends: Sequence[float] | None) -> str:
    return f"{ends[0]:.3g} … {ends[1]:.3g}".replace("-", "−") if ends else "-"


def _environment(environment: Mapping[str, Any]) -> str:
    items = "".join(f"<dt>{escape(str(k))}</dt><dd>{escape(str(v))}</dd>" for k, v in environment.items())
    return f'<footer><dl class="environment">{items}</dl></footer>' if items else ""
