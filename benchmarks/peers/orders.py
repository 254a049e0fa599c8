"""Both sides on the same model with its channels in other orders: whether a row tells methods apart, or one order's luck.

    python -m benchmarks.peers.orders [--sides mmqc peers] [--numbers 1 2 ...]     what is not in --data
    python -m benchmarks.peers.orders --sides mmqc --asymmetric                    mmqc's of ``TWICE`` on asymmetric inputs as well

A decoder computes the same whatever the order of its channels is, but groups of a weight and the sweep over its columns follow that
order: every order is another draw of all rounding errors.  Neither side sees which one it has.  Question by question the runs
stay in ``--data``; what they say of each case goes on file.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.peers import compare
from benchmarks.peers.cases import Case, keys, verdict
from benchmarks.peers.drawn import KINDS, LOST, OF_ORDERS, ORDERS, interval, read
from benchmarks.peers.export import export
from benchmarks.peers.questions import SAMPLE, chosen
from examples.studies.study import about
from mmqc.calibration.sequential import Inputs

ASKED = 750  # questions
TWICE = (("gptq", "W2 g64 sym"), ("gptq", "W2 g32 asym"), ("awq", "W3 g128 asym"))  # where the mean is about twice the peer's


@torch.no_grad()
def reorder(model: Any, number: int) -> None:
    """Put the channels of a Qwen2-VL's decoder into order ``number``, in place; 0 is the model's own.

    Three kinds: those of the residual stream, of each MLP, and of the values of each head.
    """
    if not number:
        return
    dice = torch.Generator().manual_seed(number)
    decoder, merger = model.model.language_model, model.model.visual.merger
    stream = torch.randperm(decoder.embed_tokens.weight.shape[1], generator=dice)
    for weight in {w.data_ptr(): w for w in (decoder.embed_tokens.weight, model.lm_head.weight)}.values():  # which may be tied
        take(weight, stream, 1)
    for written in (merger.mlp[2], decoder.norm):
        outputs(written, stream)
    for layer in decoder.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            outputs(norm, stream)
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
            take(linear.weight, stream, 1)
        for linear in (attention.o_proj, mlp.down_proj):
            outputs(linear, stream)
        inner = torch.randperm(mlp.down_proj.in_features, generator=dice)
        outputs(mlp.gate_proj, inner)
        outputs(mlp.up_proj, inner)
        take(mlp.down_proj.weight, inner, 1)
        width = attention.head_dim
        values = [torch.randperm(width, generator=dice) for _ in range(attention.v_proj.out_features // width)]
        shared = attention.o_proj.in_features // attention.v_proj.out_features  # by so many heads
        outputs(attention.v_proj, torch.cat([head + i * width for i, head in enumerate(values)]))
        heads = [values[i // shared] + i * width for i in range(shared * len(values))]
        take(attention.o_proj.weight, torch.cat(heads), 1)


def take(tensor: Tensor, order: Tensor, axis: int) -> None:
    tensor.copy_(tensor.index_select(axis, order))


def outputs(module: nn.Module, order: Tensor) -> None:
    """What a linear or a norm writes, in this order."""
    for parameter in module.parameters(recurse=False):
        take(parameter, order, 0)


def summary(ours: list[dict[str, list[float]]], theirs: list[dict[str, list[float]]]) -> dict[str, Any]:
    """A case over its orders: both sides' means in each of them, and the interval over orders and questions."""
    found: dict[str, Any] = {}
    for kind in KINDS:
        a, b = (np.array([run[kind] for run in side]) for side in (ours, theirs))
        mean, low, high = interval(a - b)
        found[kind] = {
            "mmqc": [float(f"{v:.3g}") for v in a.mean(1)],
            "peer": [float(f"{v:.3g}") for v in b.mean(1)],
            "difference": [float(f"{v:.3g}") for v in (mean, low, high)],
            "mmqc is": verdict(low, high),
        }
    both = {"mmqc": ours, "peer": theirs}
    found["lost"] = {name: [int((np.array(run["kl"]) > LOST).sum()) for run in side] for name, side in both.items()}
    found["median KL"] = {name: float(f"{np.median([run['kl'] for run in side]):.3g}") for name, side in both.items()}
    return found


def named(key: str, inputs: Inputs) -> str:
    """Of mmqc's runs."""
    return key if inputs == "quantized" else f"{key} {inputs}"


def path(data: Path, key: str, number: int) -> Path:
    """Where a run is kept."""
    return data / str(number) / f"{key}.json"


def write(case: Case, data: Path, inputs: Inputs = "quantized") -> None:
    """Put on file what both sides have measured of a case."""
    ours, theirs = keys(case)
    both = named(ours, inputs), theirs
    numbers = [n for n in ORDERS if all(path(data, key, n).exists() for key in both)]
    if numbers:
        sides = [[json.loads(path(data, key, n).read_text()) for n in numbers] for key in both]
        found = read(OF_ORDERS) | about("python -m benchmarks.peers.orders") | {"sample": SAMPLE, "questions": ASKED}
        row = {"orders": numbers} | summary(*sides)
        found.setdefault("rows" if inputs == "quantized" else inputs, {})[" ".join(keys(case))] = row
        OF_ORDERS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Measure what is not there yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", nargs="+", choices=compare.SIDES, default=compare.SIDES)
    parser.add_argument("--numbers", nargs="+", type=int, choices=ORDERS, default=ORDERS)
    parser.add_argument("--asymmetric", action="store_true", help="mmqc's on asymmetric inputs, not on quantized ones")
    parser.add_argument("--data", type=Path, default=compare.ROOT / "build/peers/orders")
    parser.add_argument("--environments", type=Path, default=compare.ROOT / "build/peers")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for number in options.numbers:
        data, change = options.data / str(number), partial(reorder, number=number)
        export(SAMPLE, data / SAMPLE, compare.CALIBRATION, ASKED, change=change)
        inputs: Inputs = "asymmetric" if options.asymmetric else "quantized"
        for case in chosen():
            if options.asymmetric and (case.ours, case.form) not in TWICE:
                continue
            for library, key in zip(compare.SIDES, keys(case), strict=True):
                is_ours = library == "mmqc"
                kept = path(options.data, named(key, inputs) if is_ours else key, number)
                if library not in options.sides or kept.exists():
                    continue
                run = (
                    compare.ours(case, data, change=change, inputs=inputs)
                    if is_ours
                    else compare.theirs(case, data, options.environments)
                )
                kept.write_text(json.dumps(run))
                print(number, key, {kind: round(float(np.mean(values)), 5) for kind, values in run.items()}, flush=True)
            write(case, options.data, inputs)


if __name__ == "__main__":
    main()
