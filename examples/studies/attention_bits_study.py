"""How far the vision tower's attention is from exact where its operands have 8 bits: SQNR of each layer's output, in dB.

    python -m examples.studies.attention_bits_study [digits-vqa docs-vqa ...]

Queries, keys and values of one calibration batch of a sample, as its tower has them.  Codes are int8 with a step for each tile of
64 rows of queries or 128 of keys (SageAttention, arXiv:2410.02367), keys perhaps less their mean, which no softmax sees; or float8
(e4m3) with a step for each head, for values one for each channel (FlashAttention-3, arXiv:2407.08608).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import mmqc

LARGEST = {torch.int8: 127, torch.float8_e4m3fn: 448}
Round = Callable[[Tensor], Tensor]


def by_tile(rows: int) -> Round:
    """int8 [H, T, D], a step for each tile of rows."""

    def rounded(x: Tensor) -> Tensor:
        length = x.shape[1]
        tiles = F.pad(x, (0, 0, 0, -length % rows)).unflatten(1, (-1, rows))
        step = (tiles.abs().amax((2, 3), keepdim=True) / LARGEST[torch.int8]).clamp(min=torch.finfo(x.dtype).tiny)
        return (torch.round(tiles / step) * step).flatten(1, 2)[:, :length]

    return rounded


def float8(over: tuple[int, ...]) -> Round:
    """e4m3 [H, T, D], a step over some dimensions."""

    def rounded(x: Tensor) -> Tensor:
        step = x.abs().amax(over, keepdim=True) / LARGEST[torch.float8_e4m3fn]
        return (x / step).to(torch.float8_e4m3fn).to(x.dtype) * step

    return rounded


def same(x: Tensor) -> Tensor:
    """As it is."""
    return x


def bfloat16(x: Tensor) -> Tensor:
    """As the tower computes."""
    return x.bfloat16().to(x.dtype)


def less_mean(rounded: Round) -> Round:
    """Of keys: their mean over the tokens is left out."""
    return lambda k: rounded(k - k.mean(1, keepdim=True))


# Of queries, keys, weights and values.
WAYS: dict[str, tuple[Round, Round, Round, Round]] = {
    "bf16": (bfloat16, bfloat16, bfloat16, bfloat16),
    "int8 q, k": (by_tile(64), by_tile(128), bfloat16, bfloat16),
    "int8 q, k less their mean": (by_tile(64), less_mean(by_tile(128)), bfloat16, bfloat16),
    "float8 q, k": (float8((1, 2)), float8((1, 2)), bfloat16, bfloat16),
    "float8 p, v": (same, same, float8((2,)), float8((1,))),
    "int8 q, k less their mean, float8 p, v": (by_tile(64), less_mean(by_tile(128)), float8((2,)), float8((1,))),
}


def captured(model: Any, batch: dict[str, Tensor]) -> list[tuple[Tensor, Tensor, Tensor, float]]:
    """(q, k, v [H, T, D], scale) of each attention of the tower."""
    seen: list[tuple[Tensor, Tensor, Tensor, float]] = []
    attend = F.scaled_dot_product_attention

    def watched(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if q.shape[2] >= 64:  # of a small image nothing is rounded away
            seen.append((q[0].double(), k[0].double(), v[0].double(), kwargs.get("scale") or q.shape[-1] ** -0.5))
        return attend(q, k, v, *args, **kwargs)

    F.scaled_dot_product_attention = watched
    try:
        model.model.visual(batch["pixel_values"].to(model.dtype), grid_thw=batch["image_grid_thw"])
    finally:
        F.scaled_dot_product_attention = attend
    return seen


def sqnr(q: Tensor, k: Tensor, v: Tensor, scale: float, way: tuple[Round, Round, Round, Round]) -> float:
    """In dB, of one attention."""
    want = (q @ k.mT * scale).softmax(-1) @ v
    of_q, of_k, of_p, of_v = way
    y = of_p((of_q(q) @ of_k(k).mT * scale).softmax(-1)) @ of_v(v)
    return float(10 * torch.log10(want.square().sum() / (y - want).square().sum()))


@torch.no_grad()
def main() -> None:
    for name in sys.argv[1:] or ["digits-vqa", "docs-vqa"]:
        sample = mmqc.samples.load(name)
        layers = captured(sample.model.eval(), sample.calibration(1)[0])
        greatest = [f"{float((q @ k.mT * scale).abs().max()):.0f}" for q, k, _, scale in layers]
        print(f"{name}: {len(layers)} layers, {layers[0][0].shape[1]} patches, greatest scores {' '.join(greatest)}")
        for label, way in WAYS.items():
            print(f"  {label:40}", *(f"{sqnr(*layer, way):5.1f}" for layer in layers))


if __name__ == "__main__":
    main()
