"""What the report's page says under its titles: read off the values that the plot shows, not off what is usual."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

from mmqc.report.plots import distinct_inputs, short
from mmqc.report.score_histogram import CALIBRATED, ROUNDED, ScoreHistogram
from mmqc.report.tables import MODALITIES, Row, count

TWICE = 2.0  # a range so many times another leaves it half of the codes, one bit


def ranges_caption(reports: Mapping[str, Row], towers: Sequence[str]) -> list[str]:
    """A sentence a report: how far visual inputs reach in comparison with text inputs."""
    return _named(reports, lambda report: _ranges([x for x in report["layers"] if x["tower"] in towers and x["ranges"]]))


def _ranges(layers: Sequence[Row]) -> str:
    drawn = distinct_inputs(layers)
    if not drawn:
        return ""
    reach = [(x, {m: max(map(abs, ends)) for m, ends in x["ranges"].items()}) for x in drawn]
    ratios = [(r["visual"] / r["text"], x["fqn"]) for x, r in reach if r.get("visual") and r.get("text")]
    if not ratios:
        only = " and ".join(m for m in MODALITIES if any(m in x["ranges"] for x in drawn))
        return f"{only} tokens reach these layers"
    largest, place = max(ratios)
    median = statistics.median(ratio for ratio, _ in ratios)
    apart = sum(not 1 / TWICE <= ratio <= TWICE for ratio, _ in ratios)
    said = f"visual inputs reach {median:.1f} times as far as text inputs (median), at most {largest:.1f} times, in {short(place)}"
    if not apart:
        return said + "; nowhere do the two differ by more than a factor of two, so that one scale would serve both"
    return said + (
        f"; in {apart} of {count(len(ratios), 'input')} one reaches more than twice as far as the other: one static scale for both "
        "would leave the smaller one less than half of the codes"
    )


def noise_caption(reports: Mapping[str, Row]) -> list[str]:
    """A sentence a report: the medians, and the layer that loses most."""
    return _named(reports, _noise)


def _noise(report: Row) -> str:
    found = [(v, m, x["fqn"]) for x in report["layers"] for m, v in x["sqnr"].items() if math.isfinite(v)]
    if not found:
        return ""
    medians = [
        f"{statistics.median(values):.1f} dB on {m} rows" for m in MODALITIES if (values := [v for v, of, _ in found if of == m])
    ]
    lowest, modality, fqn = min(found)
    return f"median {' and '.join(medians)}; lowest {lowest:.1f} dB, on {modality} rows of {fqn}"


def spread_caption(reports: Mapping[str, Row]) -> list[str]:
    """A sentence a report: what the rewrites did to the weights' incoherence, for better and for worse."""
    return _named(reports, _spread)


def _spread(report: Row) -> str:
    pairs = {fqn: pair for fqn, pair in report["incoherence"].items() if all(map(math.isfinite, pair))}
    if not pairs:
        return ""
    before, after = (statistics.median(pair[i] for pair in pairs.values()) for i in (0, 1))
    lower = sum(b < a for a, b in pairs.values())
    higher = {fqn: (a, b) for fqn, (a, b) in pairs.items() if b > a}
    said = f"median {before:.1f} → {after:.1f}; lower after the rewrites in {lower} of {count(len(pairs), 'weight')}"
    if not higher:
        return said
    fqn, (a, b) = max(higher.items(), key=lambda item: item[1][1] / item[1][0])
    return f"{said}, higher in {len(higher)}, most of all in {fqn} ({a:.1f} → {b:.1f})"


def scores_caption(layers: Sequence[ScoreHistogram]) -> str:
    """How far rounded keys spread the scores, and what calibrating them does about it; medians over the layers."""
    kinds = [ROUNDED, *([CALIBRATED] if any(CALIBRATED in layer.error for layer in layers) else [])]
    said = [
        f"{kind}, {statistics.median(x.outside(kind) for x in layers):.1%} are beyond the exact scores and the mean squared error "
        f"of the softmax is {statistics.median(x.error_of(kind) for x in layers):.1e}"
        for kind in kinds
    ]
    return f"{'; '.join(said)} (medians of {count(len(layers), 'layer')})"


def steps_caption(rows: Sequence[Row]) -> str:
    """The first and the last step's recovery, and the step that brings most."""
    kept = [(str(next(iter(row.values()))), row["recovery"]) for row in rows if isinstance(row.get("recovery"), int | float)]
    kept = [(step, value) for step, value in kept if math.isfinite(value) and step != "float"]
    if len(kept) < 2:
        return ""
    gains = [(after - before, step) for (_, before), (step, after) in pairwise(kept)]
    gain, step = max(gains)
    most = f"; most of it by “{step.removeprefix('+ ')}” ({100 * gain:+.1f} points)" if gain > 0 else ""
    return f"{100 * kept[0][1]:.1f} % of the float model's accuracy at first, {100 * kept[-1][1]:.1f} % with all of them{most}"


def columns_caption(rows: Iterable[Row], meanings: Mapping[str, str]) -> str:
    """What the columns mean that these rows have."""
    keys = {key for row in rows for key in row}
    said = [meaning for word, meaning in meanings.items() if any(word in key for key in keys)]
    return "; ".join(said)


def _named(reports: Mapping[str, Row], sentence: Callable[[Row], str]) -> list[str]:
    said = {name: text for name, report in reports.items() if (text := sentence(report))}
    return [f"{name}: {text}." if len(reports) > 1 else f"{text[0].upper()}{text[1:]}." for name, text in said.items()]
