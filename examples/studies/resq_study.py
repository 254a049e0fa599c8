"""ResQ against its baselines on the samples: 4-bit weights, activations, keys and values; what each basis does; the rank.

    python -m examples.studies.resq_study [--questions 320] [--answers 80] [--calibration 32] [--only methods ablation rank bits]
    python -m examples.studies.resq_study --draw        redraw from file

Writes docs/results/resq.json after every run, and docs/results/resq.md and its plot from it.  Runs that are on file, measured
with the same options, are not repeated.  All methods get the same calibration batches and questions; NLLs are compared by question.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch

import mmqc
from examples.studies.study import ROOT, SAMPLES, about, paired, quantized, read, store, table
from mmqc import recipes as r
from mmqc.config import QuantConfig
from mmqc.samples import scoring

RESULTS = ROOT / "docs/results/resq.json"
PAGE = ROOT / "docs/results/resq.md"


def resq(*args: Any, **kwargs: Any) -> QuantConfig:
    """ResQ, as all other methods here, in the vision tower too."""
    config = r.resq(*args, **kwargs)
    return config.replace(vision=config.language, projector=config.language)


METHODS: dict[str, QuantConfig] = {
    "RTN": r.per_token(kv_bits=4, solver="rtn"),
    "GPTQ": r.per_token(kv_bits=4),
    "SmoothQuant+": r.smoothquant(kv_bits=4),
    "QUIK": r.quik(kv_bits=4),
    "QuaRot": r.quarot(kv_bits=4),
    "ResQ": resq(),
}
ABLATION: dict[str, QuantConfig] = {
    "without U_A": resq(streams=False),
    "without U_B": resq(heads=False),
    "without U_C": resq(keys=False),
    "without U_D": resq(hadamard=False),
    "without U_B, U_C": resq(heads=False, keys=False),
}
RANKS: dict[str, QuantConfig] = {f"r = d/{d}": resq(high_fraction=1 / d) for d in (32, 16, 4, 2)}  # d/8 is ResQ itself
BITS: dict[str, QuantConfig] = {
    f"{name} {w}/{a}/{kv}": config
    for w, a, kv in ((4, 8, 4), (3, 8, 3), (2, 8, 8), (3, 3, 3))
    for name, config in (("QuaRot", r.quarot(w, a, kv_bits=kv)), ("ResQ", resq(w, kv_bits=kv, activation_bits=a)))
}
PARTS = {"methods": METHODS, "ablation": ABLATION, "rank": RANKS, "bits": BITS}
ORDER = tuple(METHODS)
BATCH = 32


# --- what is measured -------------------------------------------------------------------------------------------------


def one_run(sample_name: str, config: QuantConfig | None, options: argparse.Namespace) -> dict[str, Any]:
    run: dict[str, Any] = {"quantize_seconds": 0.0}
    if config is None:
        sample = mmqc.samples.load(sample_name)
    else:
        sample, report = quantized(sample_name, config, options.calibration)
        run["sqnr"] = float(np.mean([min(row.sqnr.values()) for row in report.layers if row.sqnr]))
        run |= {"rewrite_error": report.rewrite_error, "quantize_seconds": report.seconds}
    answered = sample.evaluate(sample.model, options.answers)
    asked = sample.questions(options.questions)
    nlls = answer_nlls(sample, asked)
    kinds = [q.kind for q in asked]
    nll = float(np.mean([np.mean([v for v, k in zip(nlls, kinds, strict=True) if k == kind]) for kind in dict.fromkeys(kinds)]))
    return {**run, "nll": nll, "accuracy": answered["accuracy"], "kinds": kinds, "nlls": nlls}


def answer_nlls(sample: Any, asked: list[Any]) -> list[float]:
    """NLL of every right answer, questions of one length side by side."""
    order = sorted(range(len(asked)), key=lambda i: (asked[i].kind, len(asked[i].answer)))
    found: dict[int, float] = {}
    for start in range(0, len(order), BATCH):
        index = order[start : start + BATCH]
        found |= dict(zip(index, scoring.answer_nll(sample.model, sample.processor, [asked[i] for i in index]), strict=True))
    return [found[i] for i in range(len(asked))]


def measure(options: argparse.Namespace) -> None:
    data = load(options)
    wanted = [(s, "float", None) for s in SAMPLES]
    for sample in reversed(SAMPLES):
        wanted += [(sample, name, config) for part in options.only for name, config in PARTS[part].items()]
    wanted.sort(key=lambda run: run[1] not in ORDER and run[1] != "float")  # what the others are compared with comes first
    for sample, name, config in wanted:
        runs = data["samples"].setdefault(sample, {})
        if name in runs:
            continue
        runs[name] = one_run(sample, config, options)
        print(f"{sample:18s} {name:18s} nll {runs[name]['nll']:.4f}  accuracy {runs[name]['accuracy']:.3f}", flush=True)
        store(RESULTS, data, indent=None)


def load(options: argparse.Namespace) -> dict[str, Any]:
    """What is on file, if it was measured with these options."""
    asked = {k: getattr(options, k) for k in ("questions", "answers", "calibration")}
    command = f"python -m examples.studies.resq_study {' '.join(f'--{k} {n}' for k, n in asked.items())}"
    fresh = {"about": about(command, **asked), "samples": {}}
    if not RESULTS.exists():
        return fresh
    data = read(RESULTS)
    same = all(data["about"][k] == fresh["about"][k] for k in (*asked, "torch", "transformers"))
    return data if same else fresh


# --- the page ---------------------------------------------------------------------------------------------------------


def above(a: dict[str, Any], b: dict[str, Any]) -> tuple[float, float, float]:
    """Mean NLL of a minus that of b on the same questions, and its interval."""
    return paired(a["nlls"], b["nlls"], a["kinds"])


def row(name: str, run: dict[str, Any], against: dict[str, Any], full: dict[str, Any]) -> tuple[str, ...]:
    middle, low, high = above(run, against)
    verdict = "" if run is against else f"{middle:+.4f} ({low:+.4f} to {high:+.4f})"
    sqnr = f"{run['sqnr']:.1f} dB" if "sqnr" in run else ""
    return (name, sqnr, f"{run['nll']:.4f}", verdict, f"{100 * run['accuracy']:.1f} %", f"{run['accuracy'] / full['accuracy']:.3f}")


def rows_of(runs: dict[str, Any], names: list[str]) -> str:
    there = [n for n in names if n in runs]
    head = ("run", "SQNR", "NLL", "NLL above ResQ's", "accuracy", "recovery")
    return table(head, [row(n, runs[n], runs["ResQ"], runs["float"]) for n in there])


def claims(runs: dict[str, Any]) -> str:
    """The paper's order, pair by pair."""
    pairs = [(a, "QUIK") for a in ORDER[:3]] + [("QUIK", "QuaRot"), ("QuaRot", "ResQ")]
    lines = []
    for worse, better in pairs:
        middle, low, high = above(runs[worse], runs[better])
        word = "holds" if low > 0 else "is reversed" if high < 0 else "is not decided"
        lines.append((f"{worse} > {better}", f"{middle:+.4f} ({low:+.4f} to {high:+.4f})", word))
    return table(("NLL, paper's order", "difference", "here it"), lines)


def bits_table(runs: dict[str, Any]) -> str:
    lines = []
    for name in [n for n in BITS if n.startswith("ResQ") and n in runs]:
        rival = name.replace("ResQ", "QuaRot")
        middle, low, high = above(runs[rival], runs[name])
        lines.append(
            (
                name.removeprefix("ResQ "),
                f"{runs[rival]['nll']:.4f}",
                f"{runs[name]['nll']:.4f}",
                f"{middle:+.4f} ({low:+.4f} to {high:+.4f})",
            )
        )
    return table(("W/A/KV", "QuaRot NLL", "ResQ NLL", "difference"), lines)


def page(data: dict[str, Any]) -> str:
    stamp = data["about"]
    text = [
        "# ResQ on the samples",
        "",
        "Weights, activations, keys and values in 4 bits, with one eighth of the channels in 8 bits for QUIK and ResQ (of keys and "
        "values for ResQ alone); both towers and the projector; the head in floating point.  NLL is that of the right answer's "
        "tokens; intervals are paired bootstrap 95 % intervals over questions.  SQNR: mean over all linears of the lower "
        "modality's.  Recovery: accuracy over that in floating point.  SpinQuant trains its rotations and is left out.",
        "",
        f"`python -m examples.studies.resq_study --questions {stamp['questions']} --answers {stamp['answers']} "
        f"--calibration {stamp['calibration']}`; {stamp['device']}; "
        f"Python {stamp['python']}, torch {stamp['torch']}, transformers {stamp['transformers']}; commit {stamp['commit']}, "
        f"{stamp['date']}.",
    ]
    for sample in [s for s in SAMPLES if "ResQ" in data["samples"].get(s, {})]:
        runs = data["samples"][sample]
        text += ["", f"## {sample}", "", rows_of(runs, ["float", *ORDER])]
        if all(n in runs for n in ORDER):
            text += ["", claims(runs)]
        if any(n in runs for n in ABLATION):
            text += ["", "Without one basis at a time (the paper's Table 4):", "", rows_of(runs, ["ResQ", *ABLATION])]
        if any(n in runs for n in RANKS):
            ranks = ["r = d/32", "r = d/16", "ResQ", "r = d/4", "r = d/2"]
            text += ["", "The rank of the high subspace (the paper's Figure 5a; ResQ is d/8):", "", rows_of(runs, ranks)]
        if any(n in runs for n in BITS):
            text += ["", "Other bits (the paper's Table 3, against QuaRot):", "", bits_table(runs)]
    if (PAGE.parent / "resq.png").exists():
        text += ["", "![NLL and SQNR by method](resq.png)"]
    return "\n".join(text) + "\n"


def plot(data: dict[str, Any]) -> None:
    """SQNR and NLL of every method, and over the rank."""
    from mmqc.report.plots import WIDE, figure

    samples = [s for s in SAMPLES if "ResQ" in data["samples"].get(s, {})]
    with figure(4.6, 2, width=WIDE) as (fig, axes):
        for sample, colour in zip(samples, ("#2a6f9d", "#c0392b"), strict=False):
            runs = data["samples"][sample]
            ranks = ["r = d/32", "r = d/16", "ResQ", "r = d/4", "r = d/2"]
            names = [n for n in (*ORDER[:-1], *ranks) if n in runs]
            axes[0].plot(names, [runs[n]["sqnr"] for n in names], "o", color=colour, label=sample)
            axes[1].plot(names, [runs[n]["nll"] for n in names], "o", color=colour)
        axes[0].set_ylabel("SQNR of the linears, dB")
        axes[1].set_ylabel("NLL")
        axes[1].set_yscale("log")
        axes[0].legend()
        axes[0].tick_params(labelbottom=False)
        axes[1].tick_params(axis="x", rotation=30)
        for axis in axes:
            axis.grid(axis="y", linewidth=0.6)
        fig.savefig(PAGE.parent / "resq.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=320)
    parser.add_argument("--answers", type=int, default=80, help="questions that are answered in words, for the accuracy")
    parser.add_argument("--calibration", type=int, default=32)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--draw", action="store_true", help="redraw from the figures on file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not options.draw:
        measure(options)
    data = read(RESULTS)
    plot(data)
    PAGE.write_text(page(data), encoding="utf-8")


if __name__ == "__main__":
    main()
