"""Whether GPTQ's search for clips and its descent fit the batches that they read: errors of layers on these and on others.

    python -m benchmarks.peers.held_out [SAMPLE] [--group 32]

For every linear of the language model in 2 bits, symmetric: tr (W - Q) H (W - Q)ᵀ by second moments H of the batches that GPTQ
reads and of as many others, over what the peer's algorithm loses there (spread.py), as geometric means.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

import mmqc
from benchmarks.peers.cases import RECIPES
from benchmarks.peers.drawn import ERRORS, OF_ERRORS, read
from benchmarks.peers.export import calibration_of
from benchmarks.peers.spread import as_the_peer
from examples.studies.study import about
from mmqc.solvers import Quantized, gptq


def ways() -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    """GPTQ as it is, in part, and as the peer has it."""
    without = lambda: patch.object(gptq, "ROUNDS", 0)  # noqa: E731
    return {"mmqc": nullcontext, "mmqc without descent": without, "the peer's": as_the_peer}


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Of the language model's layers."""
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and "visual" not in n and "lm_head" not in n}


def moments(model: nn.Module, batches: list[Any]) -> dict[str, Tensor]:
    """The second moment of every linear's input, float64 [K, K]."""
    found = dict[str, Tensor]()

    def reader(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def read(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            x = args[0].flatten(0, -2).double()
            found[name] = found.get(name, torch.zeros(())) + x.T @ x

        return read

    hooks = [linear.register_forward_pre_hook(reader(name)) for name, linear in linears(model).items()]
    with torch.no_grad():
        for batch in batches:
            model(**batch)
    for hook in hooks:
        hook.remove()
    return found


def error(weight: Tensor, quantized: Quantized, moment: Tensor) -> float:
    """Of the layer's outputs."""
    difference = weight.double() - quantized.dequantize().double()
    return float((difference @ moment * difference).sum())


def ratios(name: str, group: int) -> dict[str, list[float]]:
    """By way, the means over linears on the batches that were read and on others."""
    from benchmarks.peers.spread import BITS, CALIBRATION

    sample = mmqc.samples.load(name)
    spec = RECIPES["gptq"](BITS, group, True).language.weight
    read, others = (moments(sample.model, calibration_of(sample, CALIBRATION, draw)) for draw in (0, 1))
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways()}
    for fqn, linear in linears(sample.model).items():
        weight = linear.weight.detach().float()
        for way, how in ways().items():
            with how():
                quantized = gptq.solve(weight, spec, read[fqn].clone(), name=fqn)
            found[way].append((error(weight, quantized, read[fqn]), error(weight, quantized, others[fqn])))
    logs = {way: np.log(np.array(errors)) for way, errors in found.items()}
    return {way: [round(float(r), 4) for r in np.exp((log - logs["the peer's"]).mean(0))] for way, log in logs.items()}


def main() -> None:
    """Measure one sample, and keep the others' figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sample", nargs="?", default="digits-vqa")
    parser.add_argument("--group", type=int, default=32)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = read(OF_ERRORS) | about("python -m benchmarks.peers.held_out")
    row = ratios(options.sample, options.group)
    found.setdefault(ERRORS, {})[f"{options.sample} g{options.group}"] = row
    print(row)
    OF_ERRORS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
