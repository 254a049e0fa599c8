"""Prompts with static scales by modality, in sequence order and in modality order, beside dynamic scales of tokens.

    python -m benchmarks.end_to_end.modality [--bits 8 4] [--orders sequence dynamic] [--seconds 420] [--dry] --out modality.json

The language model of Qwen2-VL-7B's shape with random weights, behind a tower of one block, whose patches it reads from one image
or from four with words between them: MQuant's MSQ and AIFS (arXiv:2502.00425, section 4.1, Tables 3 and 4).  A way is a process
and compiles its prompt once for all lengths; ``--dry``: a small model and short prompts on the CPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import mmqc
from benchmarks.end_to_end import side_by_side
from benchmarks.end_to_end.cold_start import small_model
from benchmarks.end_to_end.host_cost import Calls, summary
from benchmarks.rewrites import model_of
from mmqc import recipes
from mmqc.specs import ActivationSpec, PerToken

ORDERS = {
    "sequence": {"token_order": "sequence"},
    "modality, gather": {"token_order": "modality", "attention_order": "gather"},
    "modality, unified": {"token_order": "modality", "attention_order": "unified"},
    "dynamic": {},
}
GRIDS = {1024: (64, 60), 2048: (88, 88), 4096: (128, 120), 6417: (160, 160), 8192: (176, 180)}
WORDS = 17  # behind an image
PRODUCTS = ("scaled_matmul", "scaled_pingpong", "packed_scaled", "unpack")


def prompt(model: Any, grids: list[tuple[int, int]]) -> dict[str, torch.Tensor]:
    """Images, each with words behind it."""
    device, image = model.device, model.config.image_token_id
    words = torch.arange(100, 100 + WORDS)
    ids = torch.cat([t for h, w in grids for t in (torch.full((h * w // 4,), image), words)])[None].to(device)
    patches = sum(h * w for h, w in grids)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(patches, 1176).to(device, model.dtype),
        "image_grid_thw": torch.tensor([[1, h, w] for h, w in grids]).to(device),
        "mm_token_type_ids": (ids == image).long(),
    }


def layouts(grid: tuple[int, int]) -> dict[str, list[tuple[int, int]]]:
    """One image, and four of a quarter."""
    h, w = (n // 4 * 2 for n in grid)
    return {"one image": [grid], "four images": [(h, w)] * 4}


class Way:
    """A width of weights and an order of tokens."""

    def __init__(self, name: str, dry: bool, folder: Path) -> None:
        bits, order = name.split(" ", 1)
        self.bits, self.dry = int(bits.removeprefix("W")), dry
        with side_by_side.turn(folder):  # the weights of one at a time are in floating point
            self.model = self.quantized(order)
        self.calls = Calls(self.model, "recorded")
        config = self.calls.config.compile_config
        assert config is not None
        config.options, config.mode = {**ORDERS[order], "mode": config.mode}, None

    def quantized(self, order: str) -> Any:
        """Static scales by modality, or dynamic ones; else alike."""
        torch.manual_seed(0)
        if self.dry:
            model: Any = small_model()
        else:
            model = model_of("qwen2_vl_7b", "cuda").eval()
            model.model.visual.blocks = model.model.visual.blocks[:1]
        config = recipes.mquant(self.bits, solver="rtn", rotate=False)
        if order == "dynamic":
            parts = {part: getattr(config, part) for part in ("vision", "projector", "language")}
            as_they_come = ActivationSpec(granularity=PerToken())
            config = replace(config, **{part: replace(scheme, activation=as_they_come) for part, scheme in parts.items()})
        seen = prompt(model, [(8, 8)])
        mmqc.quantize_(model.eval(), config, [seen] if config.needs_calibration else None, progress=False)
        if not self.dry:
            torch.cuda.empty_cache()
        return model

    def prompts(self) -> dict[str, dict[str, torch.Tensor]]:
        """By tokens and layout."""
        torch.manual_seed(1)
        grids = {16 * i: (4 * i, 8) for i in (1, 2)} if self.dry else GRIDS
        return {f"{n}, {how}": prompt(self.model, images) for n, grid in grids.items() for how, images in layouts(grid).items()}

    def compile(self) -> None:
        """The prompt, for all lengths."""
        for inputs in self.prompts().values():
            self.calls.seconds(inputs)

    def measure(self) -> Iterator[dict[str, Any]]:
        """Milliseconds of each prompt by the clock and on the device, and those of its products."""
        for name, inputs in self.prompts().items():
            clock = 1e3 * min(self.calls.seconds(inputs) for _ in range(5))
            kernels = self.calls.kernels(inputs)
            device = summary(kernels)
            products = sum(us for kernel, (us, _) in kernels.items() if any(p in kernel for p in PRODUCTS)) / 1e3
            tokens = inputs["input_ids"].shape[1]
            found: dict[str, Any] = {
                "tokens": tokens, "clock_ms": clock, "device_ms": device["device_ms"], "products_ms": products,
                "launches": device["launches"], "kernels": dict(list(device["kernels"].items())[:8]),
                "answer": self.calls.tokens(inputs, 1),
            }  # fmt: skip
            if products:
                found["tera_operations_per_second"] = 2e-9 * tokens * self.weights() / products
            yield {name: found}

    def weights(self) -> int:
        """Of the language model's linears in its layers."""
        text = self.model.config.text_config
        kv = text.hidden_size // text.num_attention_heads * text.num_key_value_heads
        each = 2 * text.hidden_size**2 + 2 * text.hidden_size * kv + 3 * text.hidden_size * text.intermediate_size
        return text.num_hidden_layers * each


def compiled(args: argparse.Namespace) -> Way:
    """The first way, ready to be measured."""
    way = Way(args.ways[0], args.dry, args.child)
    way.compile()
    return way


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", nargs="+", type=int, default=[8, 4], choices=(4, 8))
    parser.add_argument("--orders", nargs="+", default=list(ORDERS), choices=ORDERS)
    parser.add_argument("--ways", nargs="+", help=argparse.SUPPRESS)
    side_by_side.add_arguments(parser, 420.0)
    args = parser.parse_args()
    if args.child:
        side_by_side.child(args.child, args.ways, lambda: compiled(args), Way.measure)
        return
    ways = [f"W{bits} {order}" for bits in args.bits for order in args.orders]
    side_by_side.report("benchmarks.end_to_end.modality", ways, [], args)


if __name__ == "__main__":
    main()
