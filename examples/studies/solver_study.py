"""Weight solvers compared on both digits samples: what each costs at 4, 3 and 2 bits; writes docs/results/solvers.md.

    python -m examples.studies.solver_study             everything; `--samples digits-vqa` one sample, `--draw` the page alone
    python -m examples.studies.solver_study --again     also what is on file, which is skipped otherwise

Weight-only, both towers and the projector; the output head stays in floating point.  NLL and KL are of the right answers'
tokens under teacher forcing; accuracy is that of greedy answers to the first questions.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import mmqc
from examples.studies.study import table
from mmqc.config import QuantConfig, Scheme, WeightSpec
from mmqc.recipes import PerGroup, PerRow, awq, gptq, rtn

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = ("digits-vqa", "digits-vqa-stress")
SCHEMES = {"W4": (4, None), "W4 g128": (4, 128), "W3": (3, None), "W2 g64": (2, 64)}
RESULTS = ROOT / "docs/results/solvers.json"
PAGE = ROOT / "docs/results/solvers.md"
BATCH = 32


def mse_clip(bits: int, group: int | None) -> QuantConfig:
    scheme = Scheme(WeightSpec(bits, PerGroup(group) if group else PerRow(), "mse_clip"))
    return QuantConfig(vision=scheme, projector=scheme, language=scheme)


SOLVERS: dict[str, Callable[[int, int | None], QuantConfig]] = {
    "rtn": lambda bits, group: rtn(bits, group_size=group),
    "mse_clip": mse_clip,
    "gptq": gptq,
    "awq": awq,
    "awq + gptq": lambda bits, group: awq(bits, group, solver="gptq"),
}


# --- what is measured -------------------------------------------------------------------------------------------------


@torch.no_grad()
def answers(sample: Any, n: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(log-probabilities [T, V], ids [T]) of each right answer's tokens, questions of one kind and length together."""
    groups: dict[tuple[str, int], list[Any]] = {}
    for q in sample.questions(n):
        groups.setdefault((q.kind, len(q.answer)), []).append(q)
    for asked in groups.values():
        for start in range(0, len(asked), BATCH):
            part = asked[start : start + BATCH]
            inputs = sample.processor.collate([sample.processor(q.prompt, q.images, answer=q.answer) for q in part])
            logits = sample.model(**inputs, use_cache=False).logits
            size = len(part[0].answer) + 1
            for row, ids in zip(logits, inputs["input_ids"], strict=True):
                yield row[-size - 1 : -1].double().log_softmax(-1), ids[-size:]


def nll_of(found: list[tuple[Tensor, Tensor]]) -> list[float]:
    return [-float(logs.gather(1, ids[:, None]).mean()) for logs, ids in found]


def scores(sample: Any, options: argparse.Namespace, exact: list[tuple[Tensor, Tensor]]) -> dict[str, float]:
    found = list(answers(sample, options.questions))
    worse = [b - a for a, b in zip(nll_of(exact), nll_of(found), strict=True)]
    kl = [float((p.exp() * (p - q)).sum(1).mean()) for (p, _), (q, _) in zip(exact, found, strict=True)]
    return {
        "nll": statistics.mean(nll_of(found)),
        "nll_error": statistics.stdev(worse) / len(worse) ** 0.5,
        "kl": statistics.mean(kl),
        "accuracy": sample.evaluate(sample.model, options.answered)["accuracy"],
    }


def one_run(name: str, config: QuantConfig, options: argparse.Namespace, exact: Any) -> dict[str, Any]:
    sample = mmqc.samples.load(name)
    report = mmqc.quantize_(sample.model, config, sample.calibration(options.calibration), progress=False)
    sqnr = [value for layer in report.layers for value in layer.sqnr.values()]
    return {**scores(sample, options, exact), "sqnr": statistics.mean(sqnr), "seconds": report.seconds}


def measure(name: str, options: argparse.Namespace) -> None:
    """Every run on one sample that is not on file; each goes there as soon as it is done."""
    data = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"samples": {}}
    here = data["samples"].setdefault(name, {"float": None, "runs": {}})
    wanted = [(f"{w} {s}", s, *SCHEMES[w]) for w in SCHEMES for s in SOLVERS]
    missing = [w for w in wanted if options.again or w[0] not in here["runs"]]
    if not missing and here["float"]:
        return
    sample = mmqc.samples.load(name)
    exact = list(answers(sample, options.questions))
    here["float"] = scores(sample, options, exact)
    for label, solver, bits, group in missing:
        run = here["runs"][label] = one_run(name, SOLVERS[solver](bits, group), options, exact)
        print(f"{name:18s} {label:20s}", {k: round(v, 4) for k, v in run.items()}, flush=True)
        here["runs"] = {w[0]: here["runs"][w[0]] for w in wanted if w[0] in here["runs"]}
        data["about"] = about(options)
        RESULTS.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def about(options: argparse.Namespace) -> dict[str, Any]:
    git = lambda *args: subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True).stdout.strip()  # noqa: E731
    return {
        "command": f"python -m examples.studies.solver_study --questions {options.questions} --answered {options.answered} "
        f"--calibration {options.calibration}",
        "commit": git("rev-parse", "--short", "HEAD") + (" and changes" if git("status", "--porcelain") else ""),
        "date": time.strftime("%Y-%m-%d"),
        "device": f"CPU, {platform.machine()}, {torch.get_num_threads()} thread",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


# --- the page ---------------------------------------------------------------------------------------------------------


def run_table(here: dict[str, Any]) -> str:
    start = here["float"]
    rows = [("float", f"{start['nll']:.4f}", "", "", f"{100 * start['accuracy']:.1f} %")] if start else []
    for label, run in here["runs"].items():
        nll, accuracy = f"{run['nll']:.4f} ± {run['nll_error']:.4f}", f"{100 * run['accuracy']:.1f} %"
        rows.append((label, nll, f"{run['kl']:.4f}", f"{run['sqnr']:.1f} dB", accuracy))
    return table(("run", "NLL", "KL to float", "SQNR of the layers", "accuracy"), rows)


def orders() -> list[tuple[str, str]]:
    """What the papers lead one to expect: (the run that should lose less, the other)."""
    found = [(f"W4 g128 {s}", f"W4 {s}") for s in SOLVERS]
    found += [(f"{w} awq", f"{w} rtn") for w in ("W4", "W4 g128", "W3")]
    return [*found, ("W2 g64 awq + gptq", "W2 g64 gptq")]


def order_table(data: dict[str, Any]) -> str:
    rows = []
    for name, here in data["samples"].items():
        for pair in orders():
            a, b = (here["runs"].get(label) for label in pair)
            if a is None or b is None:
                rows.append((f"{name}: {pair[0]} ≤ {pair[1]}", *["not measured"] * 3))
                continue
            holds = [a["nll"] <= b["nll"], a["kl"] <= b["kl"], a["sqnr"] >= b["sqnr"]]
            cells = [f"{a[k]:{f}} / {b[k]:{f}}" for k, f in (("nll", ".4f"), ("kl", ".4f"), ("sqnr", ".1f"))]
            marked = [cell + ("" if ok else " (no)") for cell, ok in zip(cells, holds, strict=True)]
            rows.append((f"{name}: {pair[0]} ≤ {pair[1]}", *marked))
    return table(("expected", "NLL", "KL", "SQNR, dB"), rows)


def write(data: dict[str, Any]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    stamp = ", ".join(f"{k} {v}" if k not in ("command", "device") else f"{v}" for k, v in data["about"].items())
    parts = {name: run_table(here) for name, here in data["samples"].items()}
    for name, part in {**parts, "orders": order_table(data), "about": stamp}.items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        head, tail = text.split(begin)[0], text.split(end)[1]
        text = f"{head}{begin}\n{part}\n{end}{tail}"
    PAGE.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=192)
    parser.add_argument("--answered", type=int, default=64)
    parser.add_argument("--calibration", type=int, default=16)
    parser.add_argument("--samples", nargs="+", choices=SAMPLES, default=SAMPLES)
    parser.add_argument("--again", action="store_true", help="measure anew what is on file")
    parser.add_argument("--draw", action="store_true", help="redraw from the figures on file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in () if options.draw else options.samples:
        measure(name, options)
    if RESULTS.exists() and set(json.loads(RESULTS.read_text(encoding="utf-8"))["samples"]) == set(SAMPLES):
        write(json.loads(RESULTS.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
