"""Where a prompt's time goes on the host, from ``generate`` to the one launch of its recording and from there to the tokens.

    python -m benchmarks.end_to_end.host_path [--dry] [--calls 40] --out results.json

Qwen2-VL-7B's shape in W4A8, one prompt of 400 patches, ``prefill="recorded"``: medians of milliseconds since the call, at each
place that it passes.  On a GPU every place is also noted as an event, so that the last column says when the device came by.
``--dry``: tiny widths, the same depth, on a CPU, where replays compute nothing: the host's time alone.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import CompileConfig, GenerationConfig, Qwen2VLConfig, Qwen2VLForConditionalGeneration

import mmqc
from benchmarks.end_to_end.cold_start import CONFIGS, prompt
from benchmarks.gpu_run import Run, facts
from benchmarks.rewrites import batch_of, model_of
from mmqc import backend
from mmqc.compiler import compiled_loop, recorded_sizes
from mmqc.compiler.head_start import Head
from mmqc.compiler.layer_guards import LayerGuards
from mmqc.compiler.recorded_sizes import RecordedSizes
from mmqc.front.front import Front

START, END = "generate", "tokens"


class Places:
    """The places that one call passes, with the clock and, on a GPU, an event."""

    def __init__(self, on_gpu: bool) -> None:
        self.on_gpu, self.passed = on_gpu, list[tuple[str, float, Any]]()

    def note(self, name: str) -> None:
        """Here, now."""
        event = torch.cuda.Event(enable_timing=True) if self.on_gpu else None
        self.passed.append((name, time.perf_counter(), event))
        if event is not None:
            event.record()

    def around(self, owner: Any, method: str, name: str) -> None:
        """Note from now on when it is entered and left."""
        inner = getattr(owner, method)

        @functools.wraps(inner)
        def noted(*args: Any, **kwargs: Any) -> Any:
            self.note(name)
            result = inner(*args, **kwargs)
            self.note(f"{name}: done")
            return result

        setattr(owner, method, noted)

    def since(self) -> list[tuple[str, float, float | None]]:
        """Milliseconds of each place, by the clock and on the device."""
        _, start, first = self.passed[0]
        device = [first.elapsed_time(event) if event is not None else None for _, _, event in self.passed]
        return [(name, 1e3 * (at - start), ms) for (name, at, _), ms in zip(self.passed, device, strict=True)]


class NoDevice:
    """Records what a run gave, and computes nothing when it is replayed."""

    kind = "cpu"

    def usable(self) -> bool:
        return True

    def timed(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], bool | None]]:
        return run(), lambda: True

    def record(self, run: Callable[[], Any], beside: bool = False) -> tuple[Any, Callable[[], None]]:
        return run(), lambda: None

    def beside(self, run: Callable[[], Any]) -> None:
        run()

    def joined(self) -> None:
        pass


def deep_model() -> Any:
    """The depth of Qwen2-VL-7B: 28 layers and 32 blocks."""
    text = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=28, num_attention_heads=2, num_key_value_heads=1)
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]}
    none = dict.fromkeys(("bos_token_id", "pad_token_id"))
    vision = dict(depth=32, embed_dim=32, hidden_size=64, num_heads=2, mlp_ratio=2, patch_size=14)
    given = {**text, "vocab_size": 1000, "rope_parameters": rope, "eos_token_id": 5, **none}
    return Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=given, vision_config=vision, image_token_id=999)).eval()


def measure(model: Any, inputs: dict[str, torch.Tensor], calls: int) -> dict[str, list[float | None]]:
    """Of each place the medians, by the clock and on the device, in the order in which they are passed."""
    compiled = CompileConfig(backend="mmqc", mode="reduce-overhead", fullgraph=False)
    config = GenerationConfig(do_sample=False, pad_token_id=0, cache_implementation="static", compile_config=compiled)
    config.max_new_tokens = config.min_new_tokens = 1
    ask = functools.partial(
        model.generate, **inputs, generation_config=config, custom_generate=mmqc.compiled_loop, prefill="recorded"
    )
    for _ in range(5):
        ask()
    places = Places(model.device.type == "cuda")
    places.around(compiled_loop, "_loop", "loop")
    places.around(Front, "prepare", "front")
    places.around(RecordedSizes, "_call", "compiled graph")
    places.around(RecordedSizes, "_replay", "replay")
    places.around(LayerGuards, "same", "guards of layers")
    places.around(Head, "start", "tower ahead")
    found = list[list[tuple[str, float, float | None]]]()
    for _ in range(calls):
        places.passed.clear()
        places.note(START)
        ask()
        if places.on_gpu:
            torch.cuda.synchronize()
        places.note(END)
        if places.on_gpu:
            torch.cuda.synchronize()
        found.append(places.since())
    if not any(name == "replay" for name, _, _ in found[-1]):
        raise RuntimeError("the prompt's size was not recorded: host_cost says why it takes what it takes")
    columns = {name: ([], []) for name, _, _ in found[-1]}
    for call in found:
        for name, clock, device in call:
            columns[name][0].append(clock)
            columns[name][1].append(device)
    return {name: [round(statistics.median(c), 3) if c[0] is not None else None for c in both] for name, both in columns.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--calls", type=int, default=40)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = deep_model() if args.dry else model_of("qwen2_vl_7b", "cuda").eval()
    batch = prompt(model, (8, 8)) if args.dry else batch_of("qwen2_vl_7b", model, "cuda")
    mmqc.quantize_(model, CONFIGS["w4a8"](), [batch], progress=False)
    with mock.patch.object(backend, "recorded", _without_device) if args.dry else nullcontext():
        figures = measure(model, batch if args.dry else prompt(model, (20, 20)), args.calls)
    text = json.dumps({**facts(Run(args.dry, 0)), "milliseconds since the call, by the clock and on the device": figures}, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


def _without_device(graph: Any, limit: int, example_inputs: Any, halves: Any = None) -> Any:
    del example_inputs
    setattr(recorded_sizes, "_place_for", torch.clone)  # noqa: B010  (a run that records has to read what was given)
    return RecordedSizes(graph, limit, NoDevice(), halves) if limit else graph


if __name__ == "__main__":
    main()
