"""What quantizing an 8B model costs: seconds and peak GPU memory of ``quantize_`` on the Qwen2-VL-7B shape, random weights.

    python -m benchmarks.end_to_end.quantize_speed --out benchmarks/results/quantize_speed.json
        [--recipe rtn gptq awq mquant resq learned] [--samples 128] [--tokens 2048] [--layers 28] [--blocks 32] [--inputs float]
        [--offload] [--dry]

Each recipe is a process of its own.  ``rtn`` needs no data; ``gptq`` is W4 per channel, no rewrites, ``learned`` W2 g64,
``mquant`` the whole method, and so is ``resq``, whose bases see all samples and whose solver a quarter of them (the paper: 512
and 128); half of a batch's tokens are one image's; batches wait in host memory.  Memory is the peak of the whole process beside
the bytes of the weights.
``--layers`` and ``--blocks`` make the language model and the tower shorter; all blocks of one kind do the same work, "blocks" has
the seconds of each kind, and "whole_seconds" adds those of blocks that were left out.  ``--dry`` runs two narrow layers on
the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers

from benchmarks.command_line import command_line

RECIPES = ("rtn", "gptq", "awq", "mquant", "resq", "learned")
DEFAULT = {
    "rtn": (0, 0),
    "gptq": (128, 2048),
    "awq": (128, 512),
    "mquant": (128, 2048),
    "resq": (512, 2048),
    "learned": (128, 2048),  # AutoRound's
}
IMAGE = 151655
LAYERS, BLOCKS = 28, 32


def model_of(dry: bool, layers: int, blocks: int, device: str) -> Any:
    """Qwen2-VL-7B in bfloat16 with random weights, made where that is fast, or a narrow one in float32."""
    heads = {"num_attention_heads": 28, "num_key_value_heads": 4}
    text: dict[str, Any] = {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": layers,
        **heads,
        "rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1e6},
    }
    vision = {"depth": blocks, "embed_dim": 1280, "hidden_size": 3584, "num_heads": 16, "mlp_ratio": 4, "patch_size": 14}
    if dry:
        text |= {"hidden_size": 112, "intermediate_size": 592, "num_hidden_layers": 2, "num_attention_heads": 7}
        text |= {"num_key_value_heads": 1, "rope_parameters": {**text["rope_parameters"], "mrope_section": [2, 3, 3]}}
        vision |= {"depth": 2, "embed_dim": 80, "hidden_size": 112, "num_heads": 2}
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision)
    with torch.device(device):
        dtype = torch.float32 if dry else torch.bfloat16
        return transformers.AutoModelForImageTextToText.from_config(config, dtype=dtype).eval()


def batch_of(tokens: int, dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    """One image that fills about half of the tokens, then text."""
    side = max(1, int((tokens / 2) ** 0.5))
    g = torch.Generator().manual_seed(seed)
    words = torch.randint(1000, 100_000, (tokens - side * side,), generator=g)
    ids = torch.cat((words[:4], torch.full((side * side,), IMAGE), words[4:]))[None]
    pixels = torch.randn(4 * side * side, 3 * 2 * 14 * 14, generator=g)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == IMAGE).int(),
        "pixel_values": pixels.to(dtype),
        "image_grid_thw": torch.tensor([[1, 2 * side, 2 * side]]),
    }


def places() -> tuple[list[tuple[Any, str]], list[tuple[Any, str]]]:
    """Functions that are timed, none that a batch calls; and methods of (feed, ...) that are timed by kind of block."""
    import mmqc.calibration.sequential as sequential
    import mmqc.quantization.channel_scales as channel_scales
    import mmqc.quantization.pca_bases as pca_bases
    import mmqc.quantization.rewrite as rewrite
    import mmqc.quantization.units as units
    import mmqc.quantize as quantize
    import mmqc.solvers.gptq as gptq
    import mmqc.solvers.mixed as mixed
    import mmqc.solvers.mse_clip as mse_clip

    parts = [
        (rewrite, "record"),
        (quantize, "rewrite"),
        (rewrite, "_measured_rewrites"),
        (units, "survey"),
        (quantize, "quantize_units"),
        (sequential, "capture"),
        (units.UnitWorker, "solve"),
        (units.UnitWorker, "learn"),
        (units.UnitWorker, "swap"),
        (gptq, "inverse_factor_"),
        (gptq, "sweep"),
        (gptq, "descend"),
        (mixed, "_sweep"),
        (mse_clip, "clipped"),
        (pca_bases, "principal_basis"),
        (pca_bases, "run"),
    ]
    return parts, [(sequential.Sequential, "_block"), (channel_scales._Search, "segment")]


KIND = {"_block": "seconds", "segment": "scales"}  # what the figures call the methods that are timed by kind


@contextlib.contextmanager
def timed(times: dict[str, float], kinds: dict[str, dict[str, float]]) -> Iterator[None]:
    """Seconds of the parts of quantize_, by wrapping its own functions; ``kinds`` gets those of each kind of block."""
    inside: list[dict[str, float]] = []  # the kind of block that is being worked on

    def clocked(call: Callable[[], Any], name: str, into: Sequence[dict[str, float]]) -> Any:
        start = synchronized()
        try:
            return call()
        finally:
            seconds = synchronized() - start
            for one in into:
                one[name] = one.get(name, 0.0) + seconds

    def part(real: Any, name: str) -> Any:
        return lambda *args, **kwargs: clocked(lambda: real(*args, **kwargs), name, (times, *inside))

    def of_kind(real: Any, name: str) -> Any:
        def call(self: Any, feed: Any, *args: Any) -> Any:
            blocks = feed.segment.blocks
            kind = kinds.setdefault(blocks[0].name.rsplit(".", 1)[0], {"blocks": len(blocks)})
            inside.append(kind)
            try:
                return clocked(lambda: real(self, feed, *args), KIND[name], (kind,))
            finally:
                inside.pop()

        return call

    with contextlib.ExitStack() as patched:
        for found, wrap in zip(places(), (part, of_kind), strict=True):
            for owner, name in found:
                patched.enter_context(mock.patch.object(owner, name, wrap(getattr(owner, name), name)))
        yield


def synchronized() -> float:
    """The time, with no work of the device pending."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def whole(seconds: float, kinds: dict[str, dict[str, float]]) -> float:
    """Of all blocks, from some of each kind."""
    for name, kind in kinds.items():
        blocks = BLOCKS if "visual" in name else LAYERS
        seconds += (blocks - kind["blocks"]) * (kind.get("seconds", 0.0) + kind.get("scales", 0.0)) / kind["blocks"]
    return seconds


def config_of(recipe: str, samples: int) -> Any:
    import mmqc

    if recipe == "resq":
        return mmqc.recipes.resq(solver_batches=max(1, samples // 4))

    scheme = mmqc.config.Scheme(mmqc.config.WeightSpec(4, solver="gptq"))
    if recipe == "gptq":
        return mmqc.QuantConfig(vision=scheme, projector=scheme, language=scheme)
    return getattr(mmqc.recipes, recipe)(2 if recipe == "learned" else 4)


def child(args: argparse.Namespace) -> None:
    """One recipe; prints the figures."""
    import mmqc

    recipe = args.recipe[0]
    samples, tokens = (g if g is not None else d for g, d in zip((args.samples, args.tokens), DEFAULT[recipe], strict=True))
    device = "cpu" if args.dry else "cuda"
    model = model_of(args.dry, args.layers, args.blocks, device)
    if args.offload:
        model = model.cpu()
        torch.cuda.empty_cache()
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    config = config_of(recipe, samples)
    batches = [batch_of(tokens, model.dtype, i) for i in range(samples)] or None
    more: dict[str, Any] = {"inputs": args.inputs} | ({"device": device} if args.offload else {})
    times: dict[str, float] = {}
    kinds: dict[str, dict[str, float]] = {}
    if not args.dry:
        torch.cuda.reset_peak_memory_stats()
    start = synchronized()
    with timed(times, kinds):
        report = mmqc.quantize_(model, config, batches, progress=not args.dry, **more)
    seconds = synchronized() - start
    peak = 0 if args.dry else torch.cuda.max_memory_allocated()
    in_part = {"whole_seconds": whole(seconds, kinds), "layers": args.layers, "tower_blocks": args.blocks}
    shortened = (args.layers, args.blocks) != (LAYERS, BLOCKS) and kinds and not args.dry
    figures = {
        "seconds": seconds,
        **(in_part if shortened else {}),
        "samples": samples,
        "tokens": tokens,
        "linears": len(report.layers),
        "model_gb": size / 1e9,
        "peak_gpu_gb": peak / 1e9,
        "peak_over_model": peak / size,
        "offload": args.offload,
        "peak_host_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
        "parts": {k: round(v, 2) for k, v in sorted(times.items(), key=lambda kv: -kv[1])},
        "blocks": {kind: {k: round(v, 2) for k, v in of.items()} for kind, of in kinds.items()},
        "passes": {r.name: round(r.ms / 1e3, 2) for r in report.passes},
        "refused": len(report.refused),
    }
    print(json.dumps(figures), flush=True)


def main() -> None:
    """Parse, run every recipe in a process, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/quantize_speed.json"))
    parser.add_argument("--recipe", nargs="*", choices=RECIPES, default=["rtn", "gptq"])
    parser.add_argument("--samples", type=int)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--layers", type=int, default=LAYERS, help="of the language model; fewer for a quick look")
    parser.add_argument("--blocks", type=int, default=BLOCKS, help="of the tower")
    parser.add_argument("--offload", action="store_true", help="the model in host memory, one block on the GPU")
    parser.add_argument("--inputs", choices=("float", "quantized", "asymmetric"), default="float", help="of quantize_")
    parser.add_argument("--seconds", type=int, default=580, help="time limit for all of it")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args)
        return
    end, rows = time.monotonic() + args.seconds, {}
    for recipe in args.recipe:
        command = [
            sys.executable,
            "-m",
            "benchmarks.end_to_end.quantize_speed",
            "--child",
            "--recipe",
            recipe,
            f"--layers={args.layers}",
            f"--blocks={args.blocks}",
        ]
        command += [f"--{n}={v}" for n in ("samples", "tokens") if (v := getattr(args, n)) is not None]
        command += [f"--inputs={args.inputs}"]
        command += [flag for flag in ("--dry", "--offload") if getattr(args, flag[2:])]
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=max(1, end - time.monotonic()), check=True)
            rows[recipe] = json.loads(done.stdout.splitlines()[-1])
        except (subprocess.SubprocessError, ValueError, IndexError) as error:
            rows[recipe] = {"failed": str(error)}
        print(recipe, json.dumps(rows[recipe], indent=1), flush=True)
        data = {
            "command": command_line(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "recipes": rows,
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
