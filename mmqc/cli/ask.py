"""One question to a model: the answer, how fast it came, and what ran."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import mmqc
from mmqc.cli.chat_data import Example, encode, open_image
from mmqc.cli.evaluation import to_device
from mmqc.experts.modules import QuantStack
from mmqc.nn.adapted_linear import AdaptedLinear
from mmqc.nn.integer_weight import IntegerWeight
from mmqc.nn.linear import HadamardLinear


@dataclass(frozen=True)
class Said:
    """An answer.

    Attributes:
        text: without special tokens.
        tokens: how many there are of it, the one that ended it too.
        first_seconds: to the first of them.
        tokens_per_s: of those behind the first; None if there is one alone.
    """

    text: str
    tokens: int
    first_seconds: float
    tokens_per_s: float | None


@dataclass
class Clock:
    """A streamer of transformers' that notes when tokens come; the prompt is what comes first."""

    times: list[float] = field(default_factory=list)
    started: bool = False

    def put(self, value: Any) -> None:
        """Tokens."""
        del value
        if self.started:
            self.times.append(time.perf_counter())
        self.started = True

    def end(self) -> None:
        """The last one came."""


def example(question: str, images: Sequence[Path]) -> Example:
    """The question as one user message, images first.

    Raises:
        DataError: a file is no image.
    """
    parts = [{"type": "image", "image": open_image(path)} for path in images]
    return Example(({"role": "user", "content": [*parts, {"type": "text", "text": question}]},))


@torch.no_grad()
def ask(model: Any, processor: Any, asked: Example, max_new_tokens: int, compiled: bool = False) -> Said:
    """The model's greedy answer; ``compiled`` through ``mmqc.compiled_loop``, after a first answer that compiles."""
    prompt = to_device(encode(processor, asked, answer=False), model)
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False}
    if compiled:
        options |= {"custom_generate": mmqc.compiled_loop, "cache_implementation": "static"}
        model.generate(**prompt, **options)
    clock = Clock()
    start = time.perf_counter()
    ids = model.generate(**prompt, **options, streamer=clock)[0, prompt["input_ids"].shape[1] :]
    text = getattr(processor, "tokenizer", processor).decode(ids, skip_special_tokens=True)
    behind = len(clock.times) - 1
    speed = behind / (clock.times[-1] - clock.times[0]) if behind > 0 else None
    return Said(text.strip(), len(ids), clock.times[0] - start, speed)


def ran(model: nn.Module, compiled: bool) -> str:
    """What computed the answer: the linears by scheme, adapters, the cache, where, and how."""
    schemes: Counter[str] = Counter()
    for module in model.modules():
        if isinstance(module, IntegerWeight):
            schemes[module.scheme] += module.experts if isinstance(module, QuantStack) else 1
        elif isinstance(module, nn.Linear | HadamardLinear):
            schemes["floating point"] += 1
    linears = ", ".join(f"{count} in {scheme}" for scheme, count in schemes.most_common())
    names = sorted({name for module in model.modules() if isinstance(module, AdaptedLinear) for name in module.terms})
    config = getattr(getattr(model, "config", None), "quantization_config", None)
    cache = getattr(config, "config", {}).get("kv") if config is not None else None
    first = next(model.parameters())
    parts = [
        f"linears: {linears}",
        f"adapters: {', '.join(names)}" if names else "",
        f"a KV cache of {cache['bits']} bits" if cache else "",
        f"{'mmqc.compiled_loop' if compiled else 'eager'} on {first.device}, {str(first.dtype).removeprefix('torch.')}",
    ]
    return "; ".join(filter(None, parts))
