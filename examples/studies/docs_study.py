"""What recipes cost on docs-vqa, question by question: `python -m examples.studies.docs_study [--device cuda] [--only table]`.

Every run keeps each question's accuracy, NLL, KL from the float model and agreement, so that any two are compared in pairs.  What
is on file is not measured again; `--draw` makes docs/results/docs_vqa.md and its picture from the file alone.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch

import mmqc
from examples.studies.study import ROOT, about, device, store, table
from mmqc.cli.compare import front
from mmqc.config import QuantConfig
from mmqc.quantization.convert import size_of
from mmqc.report.fronts import write_front
from mmqc.samples import pairs, scoring

RESULTS, PAGE = ROOT / "docs/results/docs_vqa.json", ROOT / "docs/results/docs_vqa.md"
PICTURE = ROOT / "docs/results/docs_vqa.png"
SAMPLE, FLOAT = "docs-vqa", "float32"
R = mmqc.recipes

TABLE: dict[str, Callable[[], QuantConfig]] = {
    "rtn W8A8, one scale": lambda: R.rtn(8, activation_bits=8),
    "mquant W8A8": lambda: R.mquant(8),
    "rtn W4A8, one scale": lambda: R.rtn(4, activation_bits=8),
    "mquant W4A8": lambda: R.mquant(4),
    "awq W4A16 g128": lambda: R.awq(4, 128),
    "calibquant KV4": lambda: R.calibquant(4),
    "calibquant KV2": lambda: R.calibquant(2),
    "resq W4A4KV4": lambda: R.resq(4),
}
BY_LAYER: dict[str, Callable[[], QuantConfig]] = {  # bits where they count, so many on average
    "calibquant KV4, by layer": lambda: R.calibquant(4, by_layer=True),
    "calibquant KV2, by layer": lambda: R.calibquant(2, by_layer=True),
}
OFF = {"msq": False, "rotate": False, "suppress": False}
PARTS: dict[str, dict[str, Callable[[], QuantConfig]]] = {
    "table": TABLE,
    "ingredients": {  # MQuant, table 5
        "static": lambda: R.mquant(4, **OFF),
        "+ MSQ": lambda: R.mquant(4, **(OFF | {"msq": True})),
        "+ LN→RMSNorm, rotation": lambda: R.mquant(4, suppress=False),
        "+ RMS": lambda: R.mquant(4),
    },
    "order": {  # ResQ, table 1
        "per token W4A4KV4": lambda: R.per_token(4, 4, kv_bits=4),
        "smoothquant W4A4KV4": lambda: R.smoothquant(4, 4, kv_bits=4),
        "quik W4A4KV4": lambda: R.quik(4, kv_bits=4),
        "quarot W4A4KV4": lambda: R.quarot(4, 4, kv_bits=4),
        "outlier + rotation W4A4KV4": lambda: R.outlier_rotation(4, vision_bits=4),
        "resq W4A4KV4, vision tower too": lambda: R.resq(4, vision_bits=4),
    },
    "towers": {  # the published code of both leaves a vision tower in 16 bits
        "resq W4A4KV4": lambda: R.resq(4),
        "resq W4A4KV4, vision tower too": lambda: R.resq(4, vision_bits=4),
        "resq W4A4KV4, language alone": lambda: R.resq(4, vision_bits=None),
        "awq W4A16 g128": lambda: R.awq(4, 128),
        "awq W4A16 g128, language alone": lambda: R.awq(4, 128).with_towers("language"),
    },
    "layers": BY_LAYER,
    "cache": {  # CalibQuant's calibration of scores
        "1 bit, no tau": lambda: R.calibquant(1, shrink_keys=1.0, shrink_values=1.0),
        "1 bit": lambda: R.calibquant(1),
        "1 bit, tau by layer": lambda: R.calibquant(1, search="layer"),
        "2 bits, no tau": lambda: R.calibquant(2, shrink_keys=1.0, shrink_values=1.0),
    },
    "amplifier": {  # Integer Scale, table 7
        f"amplifier {amplifier or 'none'}": lambda amplifier=amplifier: R.integer_scale(4, amplifier=amplifier, solver="gptq")
        for amplifier in (None, 128, 512, 1024, 4096)
    },
    "weights": {
        "rtn W4A16 g128": lambda: R.rtn(4, group_size=128),
        "gptq W4A16 g128": lambda: R.gptq(4, 128),
        "rtn W3A16 g128": lambda: R.rtn(3, group_size=128),
        "awq W3A16 g128": lambda: R.awq(3, 128),
        "gptq W3A16 g128": lambda: R.gptq(3, 128),
        "gptq W2A16 g64": lambda: R.gptq(2, 64),
    },
}
# GPTQ's default in 2 bits; all other runs count a row of text like a visual one.
BALANCED: dict[str, Callable[[], QuantConfig]] = {
    f"{name}, text as much as images": make
    for name, make in {
        "gptq W2A16 g64": lambda: R.gptq(2, 64),
        "gptq W3A16 g128": lambda: R.gptq(3, 128),
        "mquant W4A8": lambda: R.mquant(4),
        "resq W4A4KV4": lambda: R.resq(4),
        "gptq W4A16 g128": lambda: R.gptq(4, 128),
    }.items()
}
# Which calibration prompts: (pages kept, questions and answers of which sort, how many).
SETS = {
    **{f"{n} prompts": {"count": n} for n in (8, 32, 128, 512)},
    "text alone": {"count": 128, "pages": False},
    "pages alone": {"count": 128, "words": False},
    "pages of numbers": {"count": 128, "kinds": ("receipt", "table", "chart", "form")},
    "pages of words": {"count": 128, "kinds": ("line", "text", "page", "photo")},
}
SETS_RECIPES = {"mquant W4A8": lambda: R.mquant(4), "awq W3A16 g128": lambda: R.awq(3, 128)}


def calibration(sample: Any, count: int, pages: bool = True, words: bool = True, kinds: tuple[str, ...] = ()) -> list[Any]:
    """Calibration batches: prompts with their pages, or the words alone, or pages with an empty question."""
    asked = sample._asked("calibration", 1, 4 * count if kinds else count)
    asked = [q for q in asked if not kinds or q.kind in kinds][:count]
    if not pages:
        return [sample.processor(q.question + "\n", answer=q.answer) for q in asked]
    if not words:
        return [sample.processor("image 1: <image>\n", q.images[:1]) for q in asked]
    return [sample.processor(q.prompt, q.images, answer=q.answer) for q in asked]


def to(batches: list[Any], where: str) -> list[Any]:
    return [{name: value.to(where) for name, value in batch.items()} for batch in batches]


class Study:
    """The float model with its answers, and the file of figures."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.sample = mmqc.samples.load(SAMPLE)
        self.sample.model.to(options.device)
        self.data = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"runs": {}}
        self.usual = calibration(self.sample, options.calibration)
        self.scores = self.sample.scores(self.sample.model, options.questions)
        if FLOAT not in self.data["runs"]:
            rows = [pairs.Pair(s.kind, (s.accuracy,) * 2, (s.nll,) * 2, 0.0, 1.0) for s in self.scores]
            self.keep(FLOAT, rows, size_of(self.sample.model), 0.0)

    def run(self, name: str, config: QuantConfig, batches: list[Any], weights: Literal["balanced"] | None = None) -> None:
        """Quantize a copy, ask it, and put every question's outcome on file."""
        if name in self.data["runs"]:
            return
        known = {n: make for part in PARTS.values() for n, make in part.items() if n in self.data["runs"]}
        usual = batches is self.usual and weights is None
        twin = next((n for n, make in known.items() if usual and make() == config), None)
        if twin is not None:  # the last of MQuant's ingredients is MQuant
            self.data["runs"][name] = self.data["runs"][twin]
            store(RESULTS, self.data, indent=None)
            return
        model, start = copy.deepcopy(self.sample.model), time.perf_counter()
        try:
            given = to(batches, self.options.device)
            report = mmqc.quantize_(model, config, calibration=given, progress=False, modality_weights=weights)
        except (ValueError, RuntimeError) as error:
            if self.options.strict:
                raise
            print(f"{name}: {error}", flush=True)
            return
        seconds = time.perf_counter() - start
        scores = self.sample.scores(model, self.options.questions)
        packed = report.config.kv
        rows = self.sample.pairs(self.sample.model, model, self.options.questions, (self.scores, scores), cached=packed is not None)
        self.keep(name, rows, size_of(model), seconds, packed.layer_bits if packed else ())

    def keep(self, name: str, rows: list[pairs.Pair], size: int, seconds: float, layer_bits: tuple[int, ...] = ()) -> None:
        self.data["runs"][name] = {
            "bytes": size,
            "seconds": round(seconds, 1),
            "accuracy": [round(row.accuracy[1], 4) for row in rows],
            "nll": [float(f"{row.nll[1]:.5g}") for row in rows],
            "kl": [float(f"{row.kl:.4g}") for row in rows],
            "agreement": [round(row.agreement, 4) for row in rows],
            **({"layer_bits": layer_bits} if layer_bits else {}),
        }
        self.data["kinds"] = [row.kind for row in rows]
        self.data["about"] = about("python -m examples.studies.docs_study") | {"device": device(self.options.device)}
        figures = pairs.compared(rows)
        print(f"{name:34s} KL {figures['KL']}  accuracy {figures['accuracy difference']}  {figures['flips']}", flush=True)
        store(RESULTS, self.data, indent=None)


def measure(options: argparse.Namespace) -> None:
    study = Study(options)
    begin = time.time()
    asked: list[tuple[str, QuantConfig, list[Any], Literal["balanced"] | None]] = [
        (name, make(), study.usual, None) for part in options.only for name, make in PARTS.get(part, {}).items()
    ]
    if "balanced" in options.only:
        asked += [(name, make(), study.usual, "balanced") for name, make in BALANCED.items()]
    if "sets" in options.only:
        sets = {name: calibration(study.sample, **given) for name, given in SETS.items()}
        asked += [(f"{recipe}, {name}", make(), sets[name], None) for recipe, make in SETS_RECIPES.items() for name in SETS]
    for one in asked:
        if time.time() - begin < options.seconds and one[0] in (options.runs or [one[0]]):
            study.run(*one)


# --- the page ---------------------------------------------------------------------------------------------------------


def pairs_of(data: dict[str, Any], name: str, against: str = FLOAT) -> list[pairs.Pair]:
    """A run's outcomes against another's; KL is always from the float model."""
    a, b = data["runs"][against], data["runs"][name]
    rows = zip(data["kinds"], a["accuracy"], b["accuracy"], a["nll"], b["nll"], b["kl"], b["agreement"], strict=True)
    return [pairs.Pair(kind, (x, y), (u, v), kl, agreement) for kind, x, y, u, v, kl, agreement in rows]


def percent(value: scoring.Interval) -> str:
    return f"{100 * value.mean:+.1f} [{100 * value.low:+.1f}, {100 * value.high:+.1f}]"


def mean(data: dict[str, Any], name: str) -> float:
    """Accuracy, the kinds weighing alike."""
    kinds, values = data["kinds"], data["runs"][name]["accuracy"]
    groups = [[v for v, k in zip(values, kinds, strict=True) if k == kind] for kind in dict.fromkeys(kinds)]
    return sum(sum(g) / len(g) for g in groups) / len(groups)


def rows_of(data: dict[str, Any], names: list[str]) -> str:
    """The table of some runs."""
    full = mean(data, FLOAT)
    rows = [(FLOAT, f"{data['runs'][FLOAT]['bytes'] / 1e6:.1f}", f"{100 * full:.1f}", "", "", "", "", "")]
    for name in names:
        if name in data["runs"]:
            found, accuracy = pairs.compared(pairs_of(data, name)), mean(data, name)
            kl = found["KL"]
            rows.append((
                name, f"{data['runs'][name]['bytes'] / 1e6:.1f}", f"{100 * accuracy:.1f}", percent(found["accuracy difference"]),
                f"{100 * accuracy / full:.1f}", str(found["flips"]), f"{kl.mean:.4f} [{kl.low:.4f}, {kl.high:.4f}]",
                f"{100 * found['agreement'].mean:.1f}",
            ))  # fmt: skip
    return table(("recipe", "MB", "accuracy", "difference", "recovery", "flips", "KL", "agreement"), rows)


def apart(data: dict[str, Any], names: list[str]) -> str:
    """Which recipes have intervals of KL that overlap with no other's, and how many pairs do not."""
    ends = {name: pairs.compared(pairs_of(data, name))["KL"] for name in names if name in data["runs"]}
    order = sorted(ends, key=lambda name: ends[name].mean)
    alone = [n for n in order if all(m == n or ends[m].high < ends[n].low or ends[n].high < ends[m].low for m in order)]
    pairs_apart = [(m, n) for m, n in itertools.combinations(order, 2) if ends[m].high < ends[n].low or ends[n].high < ends[m].low]
    return (
        f"By the intervals of KL, {len(pairs_apart)} of {math.comb(len(order), 2)} pairs do not overlap, and {len(alone)} of "
        f"{len(order)} recipes overlap with no other: {', '.join(alone) or 'none'}."
    )


def missing(data: dict[str, Any]) -> str:
    """The runs that are not on file."""
    names = [*itertools.chain(*PARTS.values()), *BALANCED, *(f"{recipe}, {name}" for recipe in SETS_RECIPES for name in SETS)]
    absent = [name for name in dict.fromkeys(names) if name not in data["runs"]]
    return f" Not measured: {'; '.join(absent)}." if absent else ""


def bits_of_layers(data: dict[str, Any]) -> str:
    """What each layer of the decoder was given."""
    found = {name: data["runs"][name]["layer_bits"] for name in BY_LAYER if name in data["runs"]}
    return (
        " Bits of the decoder's layers: " + "; ".join(f"{name}: {' '.join(map(str, bits))}" for name, bits in found.items()) + "."
        if found
        else ""
    )


def by_kind(data: dict[str, Any], names: list[str]) -> str:
    kinds = list(dict.fromkeys(data["kinds"]))
    rows = []
    for name in [FLOAT, *names]:
        if name in data["runs"]:
            values = data["runs"][name]["accuracy"]
            groups = [[v for v, k in zip(values, data["kinds"], strict=True) if k == kind] for kind in kinds]
            rows.append((name, *(f"{100 * sum(g) / len(g):.1f}" for g in groups)))
    return table(("recipe", *kinds), rows)


def draw() -> None:
    """The page and the picture from the file."""
    data = json.loads(RESULTS.read_text(encoding="utf-8"))
    front_rows = []
    for name in data["runs"]:
        if any(name in PARTS[part] for part in ("table", "weights")) and "KV" not in name:
            kl = pairs.compared(pairs_of(data, name))["KL"]
            ends = {"KL": kl.mean, "KL low": kl.low, "KL high": kl.high}
            front_rows.append({"recipe": name, "bytes": data["runs"][name]["bytes"], **ends})
    ahead = [front_rows[i]["recipe"] for i in front([(row["bytes"], row["KL"]) for row in front_rows])]
    write_front(PICTURE, front_rows, ahead)
    stamp = ", ".join(f"{key} {value}" for key, value in data["about"].items())
    sets = [f"{recipe}, {name}" for recipe in SETS_RECIPES for name in SETS]
    titles = {
        "ingredients": "MQuant's ingredients, W4A8 (its table 5)",
        "order": "W4A4KV4, the methods that ResQ compares (its table 1)",
        "towers": "ResQ, AWQ and the vision tower",
        "layers": "The packed cache with bits by layer: as many on average",
        "cache": "The packed cache, with and without calibrated scores (CalibQuant)",
        "amplifier": "Integer Scale's amplifier, W4A8 g128",
        "weights": "Weights alone",
    }
    measured = [(title, list(PARTS[part])) for part, title in titles.items() if any(n in data["runs"] for n in PARTS[part])]
    more = "\n\n".join(f"## {title}\n\n{rows_of(data, names)}" for title, names in measured)
    even = [n for name in BALANCED if name in data["runs"] for n in (name.rpartition(", ")[0], name)]
    measured_balanced = f"\n\n## Text as much as images\n\n{rows_of(data, even)}" if even else ""
    said = "Of text alone AWQ learns nothing of the vision tower, which stays in floating point; MQuant refuses it."
    measured_sets = f"\n\n## Calibration sets\n\n{said}\n\n{rows_of(data, sets)}" if any(n in data["runs"] for n in sets) else ""
    text = f"""# Recipes on docs-vqa

A Qwen2-VL of 19 million parameters that reads rendered documents ([the sample](../reference/samples.md)), {len(data["kinds"])}
questions of {len(set(data["kinds"]))} kinds. Differences, flips (right to wrong, wrong to right, McNemar's exact p), KL in nats a
token and agreement (share of answer tokens with the same likeliest token, in percent) are against float32 on the same questions,
with 95 % intervals of a bootstrap in which every kind weighs the same; KL of packed caches is by decoding through them. Rows of
text and visual ones count alike (`modality_weights=None`) but where text is said to count as much as images, GPTQ's default in 2
bits.

{rows_of(data, list(TABLE))}

{apart(data, list(TABLE))}

![KL over bytes](docs_vqa.png)

## By kind of question

Accuracy in percent: ANLS for what is read (line, text, page, photo), exact match for the others.

{by_kind(data, [*TABLE, *BY_LAYER])}

{more}{measured_balanced}{measured_sets}

`python -m examples.studies.docs_study --device cuda --only table ingredients order towers layers cache amplifier weights balanced
sets` measures, `--draw` writes this page.{bits_of_layers(data)}{missing(data)} {stamp}
"""
    PAGE.write_text(text, encoding="utf-8")


def main() -> None:
    """Measure, and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=["table"], choices=[*PARTS, "balanced", "sets"])
    parser.add_argument("--runs", nargs="*", help="only these of them, by their names on the page")
    parser.add_argument("--questions", type=int, default=450)
    parser.add_argument("--calibration", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=1e9, help="no run starts later")
    parser.add_argument("--strict", action="store_true", help="stop at a recipe that fails")
    parser.add_argument("--draw", action="store_true", help="only make the page")
    parser.add_argument("--out", type=Path, help="copy the figures there too")
    options = parser.parse_args()
    if not options.draw:
        with torch.no_grad():
            measure(options)
    if options.out:
        options.out.write_text(RESULTS.read_text(encoding="utf-8"), encoding="utf-8")
    draw()


if __name__ == "__main__":
    main()
