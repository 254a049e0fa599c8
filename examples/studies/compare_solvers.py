"""Layer errors of mmqc's AWQ and GPTQ beside torchao's on the same weights and inputs, layer by layer.

    python -m examples.studies.compare_solvers [--samples digits-vqa] [--calibration 8] [--out compare.json]

    error = |X (Ŵ - W)ᵀ|² / |X Wᵀ|²        torchao's GPTQ runs on CUDA alone: without it these rows are left out

AWQ: one linear at a time, int4 with groups of 128; torchao's observer searches its own factors and quantizes with its own int4.
GPTQ: int8 per row, the form of torchao's that needs no other package; mmqc's in the same order of channels, and with act_order.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
import torchao
from torch import Tensor, nn
from torchao.prototype.awq.core import AWQObserver
from torchao.prototype.gptq.api import GPTQConfig, gptq_quantize
from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, quantize_
from torchao.quantization.granularity import PerGroup, PerRow

import mmqc
from examples.studies.study import SAMPLES, device, store, table
from mmqc.config import WeightSpec
from mmqc.solvers import awq, solve

GROUP = 128
INT4 = IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(GROUP))


@torch.no_grad()
def inputs(name: str, n: int) -> dict[str, tuple[Tensor, Tensor]]:
    """(W, X) of every linear but the head, from n calibration batches."""
    sample = mmqc.samples.load(name)
    seen: dict[str, list[Tensor]] = {}

    def watch(fqn: str) -> Any:
        return lambda module, args: seen.setdefault(fqn, []).append(args[0].reshape(-1, module.in_features))

    linears = {f: m for f, m in sample.model.named_modules() if isinstance(m, nn.Linear) and m.in_features % GROUP == 0}
    head = sample.model.get_output_embeddings()
    handles = [m.register_forward_pre_hook(watch(f)) for f, m in linears.items() if m is not head]
    for batch in sample.calibration(n):
        sample.model(**batch, use_cache=False)
    for handle in handles:
        handle.remove()
    return {fqn: (linears[fqn].weight.detach(), torch.cat(xs)) for fqn, xs in seen.items()}


def error(w: Tensor, x: Tensor, values: Tensor) -> float:
    w, x, values = w.double(), x.double(), values.double()
    return float((x @ (values - w).T).square().sum() / (x @ w.T).square().sum())


def theirs_awq(w: Tensor, x: Tensor) -> Tensor:
    observer = AWQObserver(w, None, INT4)
    observer(x, x)
    scale = observer.calculate_qparams()
    scaled = nn.Linear(w.shape[1], w.shape[0], bias=False, device=w.device)
    scaled.weight = nn.Parameter(w * scale)
    quantize_(scaled, INT4)
    return scaled.weight.dequantize() / scale  # type: ignore[operator]


def ours_awq(w: Tensor, x: Tensor, solver: Any) -> Tensor:
    spec, hessian = WeightSpec(4, PerGroup(GROUP), solver), x.double().T @ x.double()
    reader = awq.Reader("w", w, torch.arange(w.shape[1]), hessian, x.abs().double().mean(0), spec)
    scale = awq.search([reader], w.shape[1]).scale
    return solve(w * scale.to(w), spec, hessian / torch.outer(scale, scale)).dequantize() / scale.to(w)


def compare(w: Tensor, x: Tensor) -> dict[str, float]:
    found = {
        "awq: torchao": theirs_awq(w, x),
        "awq: mmqc, no clip": ours_awq(w, x, "rtn"),
        "awq: mmqc": ours_awq(w, x, "awq_clip"),
        "awq + gptq: mmqc": ours_awq(w, x, "gptq"),
    }
    hessian = x.double().T @ x.double()
    if w.is_cuda:
        config = GPTQConfig(step="convert", base_config=Int8WeightOnlyConfig(granularity=PerRow()))
        found["gptq int8: torchao"] = gptq_quantize(hessian.float(), w.clone(), config).dequantize()
        for label, order in (("in order", False), ("act_order", True)):
            spec = WeightSpec(8, solver="gptq", act_order=order)
            found[f"gptq int8: mmqc, {label}"] = solve(w, spec, hessian).dequantize()
    return {label: error(w, x, values) for label, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", nargs="+", choices=SAMPLES, default=SAMPLES)
    parser.add_argument("--calibration", type=int, default=8)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    data: dict[str, Any] = {
        "device": device(options.device),
        "torch": torch.__version__,
        "torchao": torchao.__version__,
        "layers": {},
    }
    for name in options.samples:
        rows = {
            fqn: compare(w.to(options.device), x.to(options.device)) for fqn, (w, x) in inputs(name, options.calibration).items()
        }
        data["layers"][name] = rows
        values = {label: [row[label] for row in rows.values()] for label in next(iter(rows.values()))}
        lines = [(k, f"{statistics.mean(v):.3e}", f"{statistics.median(v):.3e}") for k, v in values.items()]
        print(table((name, "mean error", "median"), lines))
        for label in ("awq: mmqc, no clip", "awq: mmqc"):
            better = sum(row[label] <= row["awq: torchao"] * 1.0001 for row in rows.values())
            print(f"{name:18s} {label}: same or lower than torchao's in {better} of {len(rows)} layers")
    if options.out:
        store(options.out, data)


if __name__ == "__main__":
    main()
