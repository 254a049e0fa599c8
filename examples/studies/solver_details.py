"""Two questions behind docs/results/solvers.md: what modality weights do, and why smaller groups need not lose less.

    python -m examples.studies.solver_details [--draw]

Writes docs/results/solver_details.json, each run as soon as it is done, and the two tables of the page; what is on file is skipped.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

import torch
from torch import Tensor

import mmqc
from examples.studies import solver_study
from examples.studies.solver_study import PAGE, ROOT, answers, one_run
from examples.studies.study import table
from mmqc.recipes import awq, gptq
from mmqc.solvers import gptq as solver

RESULTS = ROOT / "docs/results/solver_details.json"
LEAST = 1e-6  # a weight has to be positive
SOLVERS = {"gptq W3": gptq(3), "awq W3": awq(3, None), "awq W3, block loss": awq(3, None, loss="block")}
SAMPLES = ("digits-vqa-stress", "digits-vqa")  # the first is the one that differences show on
DAMPING = (0.003, 0.01, 0.03)
GROUPS = {"per channel": None, "g128": 128, "g64": 64}
ORDERS = {  # of channels, and when groups are fitted; damping 0.01
    "per channel, own order": gptq(4, act_order=False),
    "g128, own order": gptq(4, 128, act_order=False),
    "g128, own order, dynamic": gptq(4, 128, act_order=False, static_groups=False),
}
LAYERS = ("self_attn.q_proj", "mlp.gate_proj", "mlp.up_proj")
CHANNELS = (37, 90, 151, 222)  # where the stress sample has its outliers (mmqc/samples/stress.py)


def modality_weights(sample: Any, batches: list[Any]) -> dict[str, dict[str, float]]:
    """By name; "token count" gives both modalities the same total weight."""
    token = sample.model.config.image_token_id
    visual = sum(int((b["input_ids"] == token).sum()) for b in batches)
    text = sum(b["input_ids"].numel() for b in batches) - visual
    return {
        "1 : 1": {"visual": 1.0, "text": 1.0},
        "1 : 0": {"visual": 1.0, "text": LEAST},
        "0 : 1": {"visual": LEAST, "text": 1.0},
        "by token count": {"visual": 1.0, "text": visual / text},
    }


def weighted_run(name: str, label: str, which: str, options: argparse.Namespace, exact: list[Any]) -> dict[str, Any]:
    """One recipe calibrated with weights; SQNR by modality, over the language model's layers."""
    sample = mmqc.samples.load(name)
    batches = sample.calibration(options.calibration)
    weights = modality_weights(sample, batches)[which]
    report = mmqc.quantize_(sample.model, SOLVERS[label], batches, progress=False, modality_weights=weights)
    layers = [layer for layer in report.layers if layer.tower == "language"]
    sqnr = {m: statistics.mean(layer.sqnr[m] for layer in layers) for m in ("visual", "text")}
    return {**solver_study.scores(sample, options, exact), **sqnr, "weight": weights["text"] / weights["visual"]}


@torch.no_grad()
def layer_errors(options: argparse.Namespace) -> dict[str, Any]:
    """GPTQ's relative output error in three linears of every decoder layer of the stress sample, for one second moment each."""
    sample = mmqc.samples.load("digits-vqa-stress")
    seen: dict[str, list[Tensor]] = {}
    names = [f"model.language_model.layers.{i}.{name}" for i in range(4) for name in LAYERS]
    for name in names:
        keep = seen[name] = []
        sample.model.get_submodule(name).register_forward_pre_hook(
            lambda m, args, keep=keep: keep.append(args[0].reshape(-1, args[0].shape[-1]).double())  # type: ignore[misc]
        )
    visual = []
    for batch in sample.calibration(options.calibration):
        visual.append((batch["input_ids"] == sample.model.config.image_token_id).reshape(-1))
        sample.model(**batch)
    mask, found = torch.cat(visual), {}
    for name in names:
        x, w = torch.cat(seen[name]), sample.model.get_parameter(f"{name}.weight").double()
        rows, energy = x[mask], x[mask].square().sum(0)
        entry: dict[str, Any] = {"share": float(energy[list(CHANNELS)].sum() / energy.sum())}
        for label, group in GROUPS.items():
            q = solver.solve(w, gptq(4, group).language.weight, x.T @ x, name=name)  # type: ignore[union-attr]
            d = q.dequantize().double() - w
            entry[label] = {
                "all": float((x @ d.T).square().sum() / (x @ w.T).square().sum()),
                "visual": float((rows @ d.T).square().sum() / (rows @ w.T).square().sum()),
                "zeros": float((q.codes[:, list(CHANNELS)] == 0).double().mean()),
            }
        found[name] = entry
    return found


def keep(data: dict[str, Any], options: argparse.Namespace, part: str, key: str, value: Any) -> None:
    """One more figure on file."""
    data.setdefault(part, {})[key] = value
    data["about"] = {**solver_study.about(options), "command": "python -m examples.studies.solver_details"}
    RESULTS.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    print(part, key, value if part != "layers" else "", flush=True)


def measure_groups(data: dict[str, Any], options: argparse.Namespace) -> None:
    """GPTQ on the stress sample, what is not on file."""
    if "layers" not in data:
        keep(data, options, "layers", "gptq W4", layer_errors(options))
    runs = {("damping", f"{g}, {d}"): gptq(4, size, damping=d) for d in DAMPING for g, size in GROUPS.items()}
    runs |= {("orders", key): config for key, config in ORDERS.items()}
    missing = [where for where in runs if where[1] not in data.get(where[0], {})]
    if missing:
        stress = mmqc.samples.load("digits-vqa-stress")
        exact = list(answers(stress, options.questions))
        for part, key in missing:
            keep(data, options, part, key, one_run(stress.name, runs[part, key], options, exact))


def measure_weights(data: dict[str, Any], options: argparse.Namespace) -> None:
    """Modality weights, what is not on file."""
    for name in SAMPLES:
        runs = [(label, which) for label in SOLVERS for which in ("1 : 1", "1 : 0", "0 : 1", "by token count")]
        missing = [r for r in runs if f"{name} | {r[0]} | {r[1]}" not in data.get("weights", {})]
        if missing:
            exact = list(answers(mmqc.samples.load(name), options.questions))
            for label, which in missing:
                run = weighted_run(name, label, which, options, exact)
                keep(data, options, "weights", f"{name} | {label} | {which}", run)


def draw(data: dict[str, Any]) -> None:
    """The tables of the page."""
    rows = []
    for key, run in data.get("weights", {}).items():
        nll = f"{run['nll']:.4f} ± {run['nll_error']:.4f}"
        figures = f"{run['kl']:.4f}", f"{run['visual']:.1f}", f"{run['text']:.1f}"
        sample, label, which = key.split(" | ")
        rows.append((sample, label, which, nll, *figures, f"{100 * run['accuracy']:.1f} %"))
    head = ("sample", "recipe", "visual : text", "NLL", "KL to float", "SQNR visual, dB", "SQNR text, dB", "accuracy")
    weights = table(head, rows)
    rows = []
    for name, entry in data.get("layers", {}).get("gptq W4", {}).items():
        cells = [f"{entry[g]['visual']:.3f}" for g in GROUPS] + [f"{entry[g]['all']:.4f}" for g in GROUPS]
        zeros = " / ".join(f"{entry[g]['zeros']:.0%}" for g in GROUPS)
        rows.append((name.removeprefix("model.language_model."), *cells, zeros, f"{entry['share']:.1%}"))
    head = ("linear", *(f"visual, {g}" for g in GROUPS), *(f"all rows, {g}" for g in GROUPS), "codes 0 there", "energy there")
    layers = table(head, rows)
    rows = []
    for group in GROUPS:
        runs = [data.get("damping", {}).get(f"{group}, {d}") for d in DAMPING]
        cells = [f"{r['nll']:.3f} ± {r['nll_error']:.3f}" if r else "not measured" for r in runs]
        rows.append((group, *cells, *(f"{r['sqnr']:.1f}" if r else "" for r in runs)))
    for key, run in data.get("orders", {}).items():
        rows.append((key, "", f"{run['nll']:.3f} ± {run['nll_error']:.3f}", "", "", f"{run['sqnr']:.1f}", ""))
    head = ("GPTQ W4", *(f"NLL, damping {d}" for d in DAMPING), *(f"SQNR, {d}" for d in DAMPING))
    parts = {"weights": weights, "layers": layers, "damping": table(head, rows)}
    stamp = ", ".join(f"{k} {v}" if k not in ("command", "device") else f"{v}" for k, v in data["about"].items())
    text = PAGE.read_text(encoding="utf-8")
    for name, part in {**parts, "about details": stamp}.items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        text = f"{text.split(begin)[0]}{begin}\n{part}\n{end}{text.split(end)[1]}"
    PAGE.write_text(text, encoding="utf-8")


def main() -> None:
    """Measure what is missing, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="redraw from the figures on file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    options = argparse.Namespace(questions=192, answered=32, calibration=16)
    data = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    if not args.draw:
        measure_weights(data, options)
        measure_groups(data, options)
    draw(data)


if __name__ == "__main__":
    main()
