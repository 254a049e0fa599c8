"""When does an online Hadamard concentrate magnitude, and what removes it: suppression, random signs, or both?

    python -m examples.studies.magnitude_study [--questions 100] [--calibration 32]

Writes docs/results/magnitude_suppression.json, the plot docs/explanation/magnitude_suppression.png and the tables of
docs/explanation/magnitude_suppression.md; `--draw` only redraws from the figures on file. Matrices compared, K = a1 ... ar:

| name    | matrix                       | costs beside H                                                         |
|---------|------------------------------|------------------------------------------------------------------------|
| plain   | H = F1 x ... x Fr            |                                                                        |
| signs   | H D, D = diag(+-1) at random | nothing for a gated MLP (rows of the up projection), else K products a row |
| product | (F1 D1) x ... x (Fr Dr)      | nothing: the factors are stored with their signs                       |
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import mmqc
from examples.studies.study import ROOT, SAMPLES, about, put, quantized, read, store, table
from mmqc.config import QuantConfig, Rewrites
from mmqc.graph.linear import weight_of
from mmqc.graph.record import record
from mmqc.graph.runner import run
from mmqc.nn import online_hadamard
from mmqc.ops.hadamard import apply_factors
from mmqc.ops.hadamard_matrix import hadamard_factors, hadamard_kind
from mmqc.passes import insert_hadamard
from mmqc.passes.fold_signs import FoldSigns
from mmqc.passes.insert_hadamard import InsertHadamard
from mmqc.pipeline import FACTS, exact_passes

SEEDS_OF_RUNS = {8: 1, 4: 3}  # by weight bits: of the rotations' signs, and of those in front of H
WIDTHS = (4096, 5120, 8960, 11008, 13696, 14336, 17408, 18944)
SEEDS, DRAWS = 10, 200
RESULTS = ROOT / "docs/results/magnitude_suppression.json"
PAGE = ROOT / "docs/explanation/magnitude_suppression.md"
Factors = Callable[[int], list[Tensor]]


# --- the matrices -----------------------------------------------------------------------------------------------------


def signs(n: int, seed: int = 0) -> Tensor:
    return torch.randint(2, (n,), generator=torch.Generator().manual_seed(seed)).double() * 2 - 1


@functools.cache
def signed(n: int, seed: int = 0) -> list[Tensor]:
    """H D as one matrix: what it costs does not matter here."""
    dense = apply_factors(torch.eye(n, dtype=torch.float64), [f.double() for f in hadamard_factors(n)]).T
    return [dense * signs(n, seed)]


def flattest(factor: Tensor, seed: int = 0) -> Tensor:
    """Of some random signs d those for which no element of F d is large."""
    draws = torch.stack([signs(len(factor), DRAWS * seed + i) for i in range(DRAWS)])
    return draws[(draws @ factor.double().T).abs().amax(1).argmin()]


@functools.cache
def product(n: int, seed: int = 0) -> list[Tensor]:
    return [f.double() * flattest(f, seed) for f in hadamard_factors(n)]


MATRICES: dict[str, Callable[..., list[Tensor]]] = {
    "plain": lambda n, seed=0: [f.double() for f in hadamard_factors(n)],
    "signs": signed,
    "product": product,
}


@contextmanager
def using(factors: Factors) -> Iterator[None]:
    """Online Hadamards are these matrices, in the pass and in the modules."""

    def shared(n: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return tuple(f.to(device=device, dtype=dtype) for f in factors(n))

    def whole(n: int, blocks: int) -> list[Tensor]:
        assert blocks == 1, "a study of one device's matrices"
        return factors(n)

    with mock.patch.object(insert_hadamard, "hadamard_factors", whole), mock.patch.object(online_hadamard, "_shared", shared):
        yield


# --- what is measured -------------------------------------------------------------------------------------------------


def constant_share(factors: list[Tensor], n: int) -> float:
    """The largest part of a constant vector's energy that one output channel gets."""
    return float(apply_factors(torch.full((1, n), n**-0.5, dtype=torch.float64), factors).square().max())


def concentration(weight: Tensor, factors: list[Tensor]) -> tuple[int, float]:
    """S of equation 13: channels of W Hᵀ that outgrow max|W|, and by how much the largest does."""
    peaks, limit = apply_factors(weight, factors).abs().amax(0), weight.abs().max()
    return int((peaks > limit).sum()), float(peaks.max() / limit)


def of_layers(sample: Any) -> dict[str, dict[str, Any]]:
    """Concentration behind every linear that gets an online Hadamard, on weights as they are in front of it."""
    prog = record(sample.model, {**sample.calibration(1)[0], "use_cache": False})
    run(prog, exact_passes(mmqc.recipes.rotate(online=False)), FACTS)
    sites = {s.fqn: s.linears for s in InsertHadamard().match(prog) if hasattr(s, "linears")}
    rows = {}
    for fqn in dict.fromkeys(weight_of(n) for n in prog.nodes("linear") if weight_of(n) in sites):
        weight = prog.value(fqn).double()
        n = weight.shape[1]
        mean = weight.mean(1)
        row: dict[str, Any] = {"matrix": hadamard_kind(n), "common": float(n * mean.square().sum() / weight.square().sum())}
        for name, factors in MATRICES.items():
            seeds = range(SEEDS if name != "plain" else 1)
            found = [concentration(weight, factors(n, seed)) for seed in seeds]
            row[name] = {"S": found[0][0], "growth": found[0][1], "growth_by_seed": [g for _, g in found]}
        rows[fqn.removesuffix(".weight")] = row
    return rows


def configs(bits: int) -> dict[str, tuple[str, QuantConfig]]:
    """The runs: (matrix, config)."""
    quiet = mmqc.recipes.mquant(bits, solver="rtn", suppress=False)
    both = {
        f"{name}{word}": (name, mmqc.recipes.mquant(bits, solver="rtn", suppress=bool(word)))
        for name in MATRICES
        for word in ("", " + suppression")
    }
    return {"none": ("plain", quiet.replace(rewrites=Rewrites(fold_norms=True, rotate=True))), **both}


def one_run(name: str, matrix: str, config: QuantConfig, seed: int, options: argparse.Namespace, layers: Any) -> dict[str, Any]:
    config = config.replace(rewrites=dataclasses.replace(config.rewrites, seed=seed))
    without_signs = mock.patch.object(FoldSigns, "match", return_value=())  # they are what is studied
    with using(functools.partial(MATRICES[matrix], seed=seed)), without_signs:
        sample, report = quantized(name, config, options.calibration)
    scores = sample.evaluate(sample.model, options.questions)
    kept = {r.fqn: {"sqnr": r.sqnr, "outliers": r.outliers} for r in report.layers if r.fqn in layers}
    return {"nll": scores["nll"], "accuracy": scores["accuracy"], "layers": kept}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    command = f"python -m examples.studies.magnitude_study --questions {options.questions} --calibration {options.calibration}"
    data: dict[str, Any] = {"about": about(command), "constant_share": {}, "samples": {}}
    for n in WIDTHS:
        plain, split = MATRICES["plain"](n), product(n)
        spread = apply_factors(signs(n)[None] * n**-0.5, plain).square().max()
        data["constant_share"][n] = {
            "matrix": hadamard_kind(n),
            "plain": constant_share(plain, n),
            "signs": float(spread),
            "product": constant_share(split, n),
        }
    for name in SAMPLES:
        sample = mmqc.samples.load(name)
        scores = sample.evaluate(sample.model, options.questions)
        here = {"float": {k: scores[k] for k in ("nll", "accuracy")}, "layers": of_layers(sample), "runs": {}}
        data["samples"][name] = here
        for bits in (8, 4):
            for label, (matrix, config) in configs(bits).items():
                seeds = range(SEEDS_OF_RUNS[bits])
                runs = [one_run(name, matrix, config, seed, options, here["layers"]) for seed in seeds]
                here["runs"][f"W{bits}A8 {label}"] = runs
                print(f"{name:18s} W{bits}A8 {label:22s} nll", *(f"{r['nll']:.4f}" for r in runs), flush=True)
    return data


# --- the page ---------------------------------------------------------------------------------------------------------


def short(fqn: str) -> str:
    """E.g. model.visual.blocks.3.mlp.fc2 -> vision 3 fc2."""
    parts = fqn.split(".")
    number = next((p for p in parts[:-1] if p.isdigit()), "")
    tower = "merger" if "merger" in parts else "vision" if "visual" in parts else "language"
    return " ".join(filter(None, (tower, number, parts[-1])))


def share_table(data: dict[str, Any]) -> str:
    rows = [(n, row["matrix"], *(f"{100 * row[k]:.2f} %" for k in MATRICES)) for n, row in data["constant_share"].items()]
    return table(("width", "matrix", *MATRICES), rows)


def layer_table(data: dict[str, Any]) -> str:
    rows = []
    for name, here in data["samples"].items():
        for fqn, row in here["layers"].items():
            cells = [f"{row[k]['S']} / {row[k]['growth']:.2f}" for k in MATRICES]
            worst = [f"{max(row[k]['growth_by_seed']):.2f}" for k in ("signs", "product")]
            rows.append((f"{name}: {short(fqn)}", f"{100 * row['common']:.1f} %", *cells, *worst))
    seeds = tuple(f"worst of {SEEDS} {k}" for k in ("signs", "product"))
    return table(("layer", "common part of W", *(f"{k}: S / growth" for k in MATRICES), *seeds), rows)


def typical_sqnr(runs: list[dict[str, Any]], gated: bool) -> float:
    """Median over layers and seeds of the lower modality's SQNR."""
    layers = ((fqn, row) for result in runs for fqn, row in result["layers"].items())
    return statistics.median(min(row["sqnr"].values()) for fqn, row in layers if is_gated(fqn) == gated)


def is_gated(fqn: str) -> bool:
    return fqn.endswith("down_proj")


def run_table(data: dict[str, Any]) -> str:
    rows = []
    for name, here in data["samples"].items():
        scores = here["float"]
        rows.append((f"{name}: float", "", "", "", f"{scores['nll']:.4f}", f"{100 * scores['accuracy']:.1f} %"))
        for label, runs in here["runs"].items():
            sqnr = [f"{typical_sqnr(runs, gated):.1f} dB" for gated in (False, True)]
            kept = statistics.median(sum(r["outliers"] for r in result["layers"].values()) for result in runs)
            nll, accuracy = ([r[k] for r in runs] for k in ("nll", "accuracy"))
            spread = f" ({min(nll):.4f} to {max(nll):.4f})" if len(nll) > 1 else ""
            mean = f"{statistics.mean(nll):.4f}{spread}"
            rows.append((f"{name}: {label}", *sqnr, str(kept), mean, f"{100 * statistics.mean(accuracy):.1f} %"))
    return table(("run", "SQNR fc2", "SQNR down_proj", "channels kept", "NLL", "accuracy"), rows)


def plot(data: dict[str, Any]) -> None:
    """Growth of each layer, and the SQNR of its output at W4A8."""
    from mmqc.report.plots import MUTED, WIDE, figure

    colours = {"plain": "#c0392b", "plain + suppression": "#d9a22b", "signs": "#7a4fb5", "product": "#2a9d6e"}
    with figure(4.6, 2, width=WIDE) as (fig, axes):
        names = [(s, fqn) for s, here in data["samples"].items() for fqn in here["layers"]]
        for i, (name, colour) in enumerate(colours.items()):
            at = [x + 0.16 * (i - 1.5) for x in range(len(names))]
            rows = [data["samples"][s]["layers"][f] for s, f in names]
            if name in MATRICES:
                axes[0].plot(at, [r[name]["growth"] for r in rows], "o", markersize=5, color=colour, label=name)
            runs = [(data["samples"][s]["runs"][f"W4A8 {name}"], f) for s, f in names]
            sqnr = [statistics.mean(min(r["layers"][f]["sqnr"].values()) for r in each) for each, f in runs]
            axes[1].plot(at, sqnr, "o", color=colour, markersize=5, alpha=0.8, label=name)
        axes[0].axhline(1, color=MUTED, linewidth=0.8, linestyle=(0, (2, 2)))
        axes[0].set_ylabel("max|W Hᵀ| / max|W|")
        axes[1].set_ylabel("SQNR at W4A8, dB")
        axes[1].legend(ncols=4, loc="upper center", bbox_to_anchor=(0.5, 1.2))
        axes[1].set_xticks(range(len(names)), [short(f) for _, f in names], rotation=60, ha="right")
        axes[0].set_xticks(range(len(names)), [""] * len(names))
        half = len(next(iter(data["samples"].values()))["layers"])
        for i, name in enumerate(data["samples"]):
            axes[0].text(i * half - 0.4, 1.04, name, transform=axes[0].get_xaxis_transform(), fontsize=10, weight="bold")
        for axis in axes:
            axis.grid(axis="y", linewidth=0.6)
            axis.set_xlim(-0.7, len(names) - 0.3)
            axis.axvline(half - 0.5, color=MUTED, linewidth=0.8)
        fig.savefig(PAGE.with_suffix(".png"), dpi=110)


def write(data: dict[str, Any]) -> None:
    plot(data)
    stamp = ", ".join(f"{k} {v}" if k not in ("command", "device") else f"{v}" for k, v in data["about"].items())
    parts = {"share": share_table(data), "layers": layer_table(data), "runs": run_table(data), "about": stamp}
    put(PAGE, parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--calibration", type=int, default=32)
    parser.add_argument("--draw", action="store_true", help="redraw from the figures on file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not options.draw:
        store(RESULTS, measure(options))
    write(read(RESULTS))


if __name__ == "__main__":
    main()
