"""The report as one self-contained web page: tables, plots and sample images, nothing loaded from elsewhere.

The page is page.html.jinja; this file has what it calls. A report comes as ``QuantReport.to_dict()`` has it.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from mmqc.report import captions, plots, scores
from mmqc.report.headline import cache_of, comparison, headline
from mmqc.report.score_histogram import ScoreHistogram
from mmqc.report.tables import MODALITIES, Row, count, decibels, megabytes, totals, tower_rows
from mmqc.report.whole_file import write_text

HERE = Path(__file__).parent
COLUMNS = 10  # of a table as wide as the page
PARTS: dict[str, Any] = {
    **{"results": [], "speed": [], "ablation": [], "answers": [], "examples": []},
    **{"reports": {}, "kernels": {}, "environment": {}},
}
MEANINGS = {
    "accuracy": "accuracy is the share of right answers to questions that calibration has not seen",
    "recovery": "recovery is accuracy as a share of the float model's",
    "nll": "nll is the negative log-likelihood of the right answer, in nats a token",
    "perplexity": "perplexity is that of the given text",
    "SQNR": "SQNR is the ratio of signal to quantization noise in the logits",
    "[": "brackets hold 95 % intervals",
    "size": "size is that of parameters and buffers",
    "seconds": "seconds are those of quantization",
}
HEADS = {"first_token_seconds": "first token", "tokens_per_s": "tokens/s", "recovery": "recovery"}


def write_html(path: str | Path, data: Mapping[str, Any]) -> Path:
    """Writes one self-contained web page about one or several quantized models; matplotlib draws the plots.

    Args:
        path: of the file.
        data: any of "title"; "table": one dict per model, the columns in order ("recovery" is also drawn as bars);
            "ablation": the same for the steps of an ablation; "speed": one dict per measurement (rows whose "model" is the
            name of a report are in its headline); "shown": the report whose numbers stand on top; "reports": QuantReport,
            or what its ``to_dict`` gave, by name; "kernels": ``Explanation.to_dict()`` by name; "examples": dicts with
            images, question, answer, float, quantized; "answers": dicts of what a compiled model was asked;
            "environment": names and versions.

    Raises:
        ImportError: jinja2 or matplotlib is not installed.
    """
    path = Path(path)
    write_text(path, page(data))
    return path


def page(data: Mapping[str, Any]) -> str:
    """The whole document; see ``write_html`` for ``data``."""
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError as e:
        raise ImportError("an HTML report needs jinja2: pip install 'mmqc[report]', or save to a .json or .txt file") from e
    jinja = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    jinja.filters["capitalize_first"] = lambda text: text[:1].upper() + text[1:]
    jinja.globals |= {function.__name__: function for function in CALLED}
    given = {"results" if name == "table" else name: value for name, value in data.items() if value}
    reports = {
        name: _prepared(report if isinstance(report, Mapping) else report.to_dict())
        for name, report in given.pop("reports", {}).items()
    }
    parts = PARTS | given
    lines = {name: headline(name, report, parts["results"], parts["speed"]) for name, report in reports.items()}
    shown = parts.pop("shown", next(iter(lines), None) if len(lines) == 1 else None)
    parts["title"] = str(parts.pop("title", "Quantization report"))
    several = len(reports) > 1
    return jinja.get_template("page.html.jinja").render(parts, reports=reports, lines=lines, shown=shown, several=several)


def _prepared(report: Row) -> Row:
    """With infinity and NaN again, which JSON has no name for, and with histograms."""
    layers = [
        {
            **layer,
            "sqnr": {m: math.inf if v is None else v for m, v in layer["sqnr"].items()},
            "weight_error": math.nan if layer["weight_error"] is None else layer["weight_error"],
        }
        for layer in report["layers"]
    ]
    incoherence = {fqn: [math.nan if v is None else v for v in pair] for fqn, pair in report["incoherence"].items()}
    histograms = [ScoreHistogram.from_dict(row) for row in report.get("kv_scores", ())]
    return {**report, "layers": layers, "incoherence": incoherence, "scores": histograms}


def alignment(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """The class of every column: "n" sets it to the right, where all cells start with a digit, a sign or a dash."""
    return ["n" if all(_numeric(str(row[i])) for row in rows) else "" for i in range(len(head))]


def _numeric(cell: str) -> bool:
    text = cell.split(">", 1)[1] if cell.startswith("<span") else cell
    return text in ("", "-") or text[:1].isdigit() or (text[:1] in "-+−" and text[1:2].isdigit())


def by_key(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Head and cells of dicts: a column for every key that one of them has, or a line where a page has no room for columns."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    head = [HEADS.get(key, key.replace("accuracy/", "").replace("_", " ")) for key in keys]
    cells = [[_cell(key, row.get(key)) for key in keys] for row in rows]
    if len(keys) <= COLUMNS or len(rows) >= len(keys):
        return head, cells
    turned = [list(line) for line in zip(head, *cells, strict=True)]
    return turned[0], turned[1:]


def _cell(key: str, value: Any) -> str:
    """A value by what its column's name says it is: a share, a size, a time."""
    if value is None:
        return "-"
    if isinstance(value, float) and math.isnan(value):
        return "undefined"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if any(word in key for word in ("recovery", "accuracy", "share", "contains")):
        text = f"{100 * value:.1f} %"
        return _markup('<span class="bad">{}</span>', text) if "recovery" in key and value < 0.9 else text
    if any(word in key for word in ("size", "bytes")) and value > 1e4:
        return f"{value / 1e6:.2f} MB" if value < 1e9 else megabytes(value)
    if any(word in key for word in ("second", "time")) or key == "s":
        return f"{value:.1f} s" if value >= 1 else f"{1e3 * value:.0f} ms" if value else "-"
    if any(word in key for word in ("nll", "perplexity")):
        return f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _markup(form: str, value: Any) -> str:
    """``value``, escaped, in markup."""
    from markupsafe import Markup

    return Markup(form).format(value)


def _code(value: Any) -> str:
    return _markup("<code>{}</code>", value)


def recovery(rows: Sequence[Row]) -> list[tuple[str, float]]:
    """The rows that have it, by the first text in them."""
    named = [(next((v for v in row.values() if isinstance(v, str)), ""), row.get("recovery")) for row in rows]
    return [(name, float(value)) for name, value in named if isinstance(value, int | float) and math.isfinite(value)]


def meanings(rows: Sequence[Row]) -> str:
    """What the columns of these rows are."""
    return captions.columns_caption(rows, MEANINGS)


def drawn(plot: Callable[..., str | None], *data: Any) -> tuple[str, str] | None:
    """The plot for a wide and for a narrow window; None where it has nothing to show."""
    wide = plot(*data, width=plots.WIDE)
    return None if wide is None else (wide, plot(*data, width=plots.NARROW) or wide)


def models(example: Row) -> dict[str, str]:
    """The answers by model, the floating-point one first."""
    quantized = example["quantized"]
    found = {"float": example["float"], **(quantized if isinstance(quantized, Mapping) else {"quantized": quantized})}
    return {name: str(text) for name, text in found.items()}


def runs(text: str, answer: str) -> list[tuple[bool, str]]:
    """An answer in stretches of right and of wrong or missing characters."""
    padded = text + "·" * max(0, len(answer) - len(text))
    marked = [(answer[i : i + 1] == char, char) for i, char in enumerate(padded)]
    return [(good, "".join(char for _, char in run)) for good, run in groupby(marked, key=lambda pair: pair[0])]


def image_uri(image: Any) -> str:
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


def pass_rows(passes: Iterable[Row]) -> list[list[str]]:
    """A line a pass."""
    kinds = {True: "exact", False: "lossy"}
    return [[r["name"], kinds[r["exact"]], str(r["sites"]), str(r["refused"]), f"{r['ms']:.1f}"] for r in passes]


def reason_rows(passes: Iterable[Row]) -> list[list[str]]:
    """A line for everything that a pass left alone."""
    return [[r["name"], reason] for r in passes for reason in r["reasons"]]


def refusal_rows(refused: Iterable[Row]) -> list[list[str]]:
    """A line a refusal."""
    return [[_code(r["fqn"]), r["node"], r["reason"]] for r in refused]


def layer_rows(layers: Iterable[Row]) -> list[list[str]]:
    """A line a layer."""
    return [
        [
            _markup('<code class="name">{}</code>', layer["fqn"]),
            layer["scheme"],
            *(decibels(layer["sqnr"].get(m)) for m in MODALITIES),
            *(_interval(layer["ranges"].get(m)) for m in MODALITIES),
            str(layer["outliers"]),
            ", ".join([*layer["transforms"], *([layer["note"]] if layer["note"] else [])]),
        ]
        for layer in layers
    ]


def _interval(ends: Sequence[float] | None) -> str:
    return f"{ends[0]:.3g} … {ends[1]:.3g}".replace("-", "−") if ends else "-"


def kernel_rows(found: Row) -> list[list[str]]:
    """How often the compiled model calls each kernel."""
    return [[_code(kernel), str(calls)] for kernel, calls in found["kernels"].items()]


def fallback_rows(found: Row) -> list[list[str]]:
    """Where an op did without its kernel."""
    return [[str(f["graph"]), _code(f["op"]), f["reason"]] for f in found["fallbacks"]]


def break_rows(found: Row) -> list[list[str]]:
    """Where a graph ended."""
    return [[str(times), reason] for reason, times in found["breaks"].items()]


CALLED: tuple[Callable[..., Any], ...] = (
    *(alignment, by_key, cache_of, comparison, count, drawn, image_uri, meanings, megabytes, models, recovery, runs, totals),
    *(captions.noise_caption, captions.ranges_caption, captions.scores_caption, captions.spread_caption, captions.steps_caption),
    *(tower_rows, pass_rows, reason_rows, refusal_rows, layer_rows, kernel_rows, fallback_rows, break_rows),
    *(plots.incoherence_plot, plots.ranges_plot, plots.recovery_plot, plots.sqnr_plot, scores.error_plot, scores.scores_plot),
)
