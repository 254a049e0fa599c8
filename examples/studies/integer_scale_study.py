"""What integer group scales cost on the samples: several amplifiers, the heuristic, and float scales (the paper's table 7).

    python -m examples.studies.integer_scale_study [--questions 60] [--calibration 8] [--draw] [--again]

Writes docs/results/integer_scale.json and the page docs/results/integer_scale.md; `--draw` only writes the page anew from the
figures on file.  What is on file is skipped, unless it is what others are compared with, or with `--again`.
Weights have 4 bits in groups of 128, rounded to nearest; activations 8 bits with one static scale a tensor.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers

import mmqc
from mmqc.config import QuantConfig, Rewrites
from mmqc.nn.linear import QuantLinear
from mmqc.recipes import integer_scale
from mmqc.samples.scoring import Score, compare, summarize
from mmqc.solvers import integer_scale as solver
from mmqc.solvers.integer_scale import LIMIT, overflow_bound

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE = ROOT / "docs/results/integer_scale.json", ROOT / "docs/results/integer_scale.md"
SAMPLES = ("digits-vqa", "digits-vqa-stress")
FLOAT, KEPT = "float scales", ", codes kept"
ROTATED = Rewrites(fold_norms=True, rotate=True, hadamard=True)


def recipes() -> dict[str, tuple[str, QuantConfig]]:
    """By name: what it is compared with, and the configuration.  "codes kept" is the paper's form."""

    def plain(amplifier: Any) -> QuantConfig:
        return integer_scale(amplifier=amplifier).replace(rewrites=ROTATED)

    found = {FLOAT: (FLOAT, plain(None))}
    for amplifier in (1024, 128, "heuristic", 64):
        found |= {f"{amplifier}{kept}": (FLOAT, plain(amplifier)) for kept in (KEPT, "")}
    found |= {"4096": (FLOAT, plain(4096)), "progressive": (FLOAT, plain("progressive"))}
    llama3 = f"llama3, {FLOAT}"
    found |= {llama3: (llama3, integer_scale(amplifier=None, preset="llama3"))}
    return found | {f"llama3{kept}": (llama3, integer_scale(preset="llama3")) for kept in (KEPT, "")}


def scales(model: torch.nn.Module) -> dict[str, float]:
    """Over all layers: the amplifiers and integer scales that they have, and the largest proved bound."""
    layers = [m for m in model.modules() if isinstance(m, QuantLinear) and m.group_scale is not None]
    if not layers:
        return {}
    t = torch.cat([m.group_scale.flatten() for m in layers if m.group_scale is not None])
    alpha = [round(1 / float(m.weight_scale[0])) for m in layers if t.dtype == torch.int32] or [0]
    bound = max(overflow_bound(m.codes(), m.group_scale, m.group_size) for m in layers if m.group_scale is not None)
    return {
        "layers": len(layers),
        "smallest amplifier": min(alpha),
        "largest amplifier": max(alpha),
        "median t": float(t.double().median()),
        "smallest t": float(t.min()),
        "largest t": float(t.max()),
        "bound": bound / LIMIT,
    }


def measure(name: str, args: argparse.Namespace, rows: dict[str, Any], save: Callable[[], None]) -> None:
    """Every configuration that ``rows`` lacks on one sample, against float scales question by question.

    ``save`` is called after each; what the missing ones are compared with is measured again, for its scores.
    """
    missing = {label for label in ("not quantized", *recipes()) if args.again or label not in rows}
    missing |= {against for label, (against, _) in recipes().items() if label in missing}
    calibration = mmqc.samples.load(name).calibration(args.calibration)
    if "not quantized" in missing:
        plain = mmqc.samples.load(name)
        rows["not quantized"] = summarize(plain.scores(plain.model, args.questions))
    scored: dict[str, list[Score]] = {}
    for label, (against, config) in recipes().items():
        if label not in missing:
            continue
        sample = mmqc.samples.load(name)
        with mock.patch.object(solver, "ROUND_AGAIN", not label.endswith(KEPT)):
            report = mmqc.quantize_(sample.model, config, calibration, progress=False)
        scored[label] = sample.scores(sample.model, args.questions)
        summary = summarize(scored[label])
        difference = compare(scored[against], scored[label])
        errors = [layer.weight_error for layer in report.layers]
        rows[label] = {
            "accuracy": summary["accuracy"],
            "nll": summary["nll"],
            "difference": difference.difference,
            "low": difference.low,
            "high": difference.high,
            "weight error": sum(errors) / len(errors),
            "float layers": sum("could overflow" in layer.note for layer in report.layers),
            **scales(sample.model),
        }
        print(name, label, rows[label], flush=True)
        save()


def table(rows: dict[str, Any]) -> str:
    """One sample as Markdown."""
    lines = [
        "| scales | accuracy | points against float (95 %) | NLL | weight error | t: smallest, median, largest "
        "| bound, of 2^31 | float |",
        "| --- | --: | --: | --: | --: | --: | --: | --: |",
    ]
    for label, row in rows.items():
        if "difference" not in row:
            lines.append(f"| {label} | {row['accuracy']:.2%} | | {row['nll']:.5f} | | | | |")
            continue
        low, middle, high = (f"{100 * row[key]:+.2f}" for key in ("low", "difference", "high"))
        points = "" if label.endswith(FLOAT) else f"{middle} ({low} … {high})"
        span = f"{row['smallest t']:.0f}, {row['median t']:.0f}, {row['largest t']:.0f}" if "bound" in row else ""
        bound = f"{row['bound']:.3%}" if "bound" in row else ""
        name = label
        if label.startswith("heuristic"):
            name += f" ({row['smallest amplifier']} … {row['largest amplifier']})"
        kept = row["float layers"] if span else ""
        figures = f"{row['accuracy']:.2%} | {points} | {row['nll']:.5f} | {row['weight error']:.2%}"
        lines.append(f"| {name} | {figures} | {span} | {bound} | {kept} |")
    return "\n".join(lines)


def draw(data: dict[str, Any]) -> None:
    """The page from the figures."""
    parts = [
        "# Integer scales",
        f"W4A8, groups of 128, round to nearest, rotated (QuaRot), {data['calibration']} calibration batches, {data['questions']} "
        "questions; static activation scales, one a tensor.  A number in the first column is the amplifier; "
        "*progressive* has a step for "
        "each output channel and scales up to 15.  *Codes kept* is the "
        "paper's form, which rounds the scales alone; without it codes are rounded again to the integer step "
        '([why](../explanation/integer_scale.md)).  *llama3* is `recipes.integer_scale(preset="llama3")`: 8 bits in front of the '
        "stream behind a non-linearity, amplifier 8192; it is compared with the same recipe with float scales.",
        "*Weight error* is the mean over layers of |W - Q| / |W|; *t* are the integer scales; *bound* is the largest sum that any "
        "input could reach in a layer with integer scales, proved before it gets them; *float* counts the layers that kept float "
        "scales because theirs could overflow.",
        f"`{data['command']}`; {data['machine']}, torch {data['torch']}, transformers {data['transformers']}.",
    ]
    for name, rows in data["samples"].items():
        parts += [f"## {name}", table(rows)]
        missing = [label for label in recipes() if label not in rows]
        parts += [f"Not measured: {'; '.join(missing)}."] if missing else []
    PAGE.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def main() -> None:
    """Measure, write the figures, draw the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=60)
    parser.add_argument("--calibration", type=int, default=8)
    parser.add_argument("--samples", nargs="+", default=list(SAMPLES), choices=SAMPLES, help="the others stay as on file")
    parser.add_argument("--again", action="store_true", help="measure anew what is on file")
    parser.add_argument("--draw", action="store_true")
    args = parser.parse_args()
    for name in () if args.draw else args.samples:
        old = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"samples": {}}
        samples = old["samples"]
        rows = samples.setdefault(name, {})
        words = f"--questions {args.questions} --calibration {args.calibration}"
        data = {
            "command": f"python -m examples.studies.integer_scale_study {words}",
            "machine": platform.processor() or platform.machine(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "questions": args.questions,
            "calibration": args.calibration,
            "samples": samples,
        }

        def save(data: dict[str, Any] = data, name: str = name, rows: dict[str, Any] = rows) -> None:
            data["samples"][name] = {label: rows[label] for label in ("not quantized", *recipes()) if label in rows}
            RESULTS.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")

        measure(name, args, rows, save)
    draw(json.loads(RESULTS.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
