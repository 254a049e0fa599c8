"""Compile ahead: what the first call of each kind would wait for is done before anybody asks.

    prompts ─► one of each kind: text alone, one image, several; by itself and in a batch ─► generate, twice each

A call compiles where its kind comes for the first time; sizes, lengths and numbers of prompts above one are no kinds of their own
(front/sizes.py).  What is compiled stays in this process, and Inductor's caches on disk serve the next one.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from tqdm.auto import tqdm
from transformers import GenerationConfig

from mmqc.compiler.compiled_loop import compiled_loop
from mmqc.kv.cache import SPEC

TOKENS = 4  # of an answer: a step is recorded as a CUDA graph in its third call
GRIDS = ("image_grid_thw", "image_sizes", "num_tiles")  # what has a row for each image, if anything has
PLACEHOLDERS = ("image_token_id", "video_token_id", "image_token_index", "vision_start_token_id", "vision_end_token_id")


@dataclass(frozen=True)
class WarmCall:
    """One kind of call.

    Attributes:
        kind: what it is, e.g. "1 prompt, 1 image".
        first_seconds: of the call that may have compiled.
        again_seconds: of the same call behind it.
    """

    kind: str
    first_seconds: float
    again_seconds: float


def warm(
    model: Any,
    prompts: Mapping[str, Any] | Iterable[Mapping[str, Any]],
    generation_config: GenerationConfig | None = None,
    *,
    batches: Sequence[int] = (1, 2),
    prefill: str | None = None,
    progress: bool = True,
) -> list[WarmCall]:
    """Compile what ``generate(..., custom_generate=mmqc.compiled_loop)`` needs for prompts like these.

    Args:
        model: a model of transformers, quantized or not, on its device.
        prompts: arguments of ``generate`` for one prompt each: ``input_ids`` [1, T], and what its images need.  One of each
            kind is taken; text alone is made from what stands behind the images, where no prompt has none.
        generation_config: as the service will pass it; its number of tokens is left out.  Default: greedy, in a static cache,
            or in the model's quantized one.
        batches: how many prompts a call has: 1 is a program of its own, 2 stands for all other numbers.
        prefill: that of ``compiled_loop``.
        progress: show a bar.

    Returns:
        Seconds by kind of call, in the order in which they were made.

    Raises:
        ValueError: there is no prompt, or one has several sequences.
    """
    config = _short(model, generation_config)
    given: list[Any] = [prompts] if isinstance(prompts, Mapping) else list(prompts)
    calls = dict(_calls(model, given, batches))
    done = []
    with tqdm(calls.items(), disable=not progress, unit=" kinds") as bar:
        for kind, call in bar:
            bar.set_description(kind)
            done.append(WarmCall(kind, *(_seconds(model, call, config, prefill) for _ in range(2))))
    return done


def _short(model: Any, given: GenerationConfig | None) -> GenerationConfig:
    if given is None:
        given = GenerationConfig(do_sample=False, cache_implementation=None if hasattr(model, SPEC) else "static", pad_token_id=0)
    config = copy.deepcopy(given)
    config.max_length = config.max_time = config.stop_strings = config.min_length = None
    # An answer that stops at its first token would compile no step.
    config.max_new_tokens = config.min_new_tokens = TOKENS
    return config


def _calls(model: Any, prompts: Sequence[Mapping[str, Any]], batches: Sequence[int]) -> Iterator[tuple[str, dict[str, Any]]]:
    """One call of each kind, by its name."""
    if not prompts:
        raise ValueError("prompts is empty: pass the arguments of generate for at least one prompt, as the processor gives them")
    for i, prompt in enumerate(prompts):
        if prompt["input_ids"].shape[0] != 1:
            raise ValueError(f"prompts[{i}] has {prompt['input_ids'].shape[0]} sequences: pass one each, {batches=} joins them")
    kinds: dict[str, dict[str, Any]] = {}
    for prompt in (*prompts, *filter(None, [_text_of(model, prompts[0])])):
        kinds.setdefault(_images(prompt), {name: v for name, v in prompt.items() if name != "position_ids"})
    for count in sorted(set(batches)):
        for images, prompt in kinds.items():
            yield f"{count} prompt{'s' * (count > 1)}, {images}", _joined(prompt, count)
            words = (~_placeholders(model, prompt)).nonzero()
            if count > 1 and len(words):  # transformers masks a batch with padding otherwise than one without
                yield f"{count} prompts of unlike lengths, {images}", _joined(prompt, count, twice=int(words[-1]))


def _images(prompt: Mapping[str, Any]) -> str:
    features = {name: v for name, v in prompt.items() if isinstance(v, Tensor) and v.is_floating_point() and v.dim() > 1}
    if not features:
        return "text alone"
    if any("video" in name for name in features):
        return "video"
    first = next(iter(features.values()))
    rows = math.prod(first.shape[:-3]) if first.dim() > 3 else first.shape[0]  # [images, 3, H, W], [1, images, 3, H, W], or patches
    rows = next((len(prompt[name]) for name in GRIDS if name in prompt), rows)
    return "1 image" if rows == 1 else "several images or tiles"


def _text_of(model: Any, prompt: Mapping[str, Any]) -> dict[str, Any] | None:
    """What stands behind the last placeholder, if that is two tokens or more."""
    ids, marked = prompt["input_ids"], _placeholders(model, prompt)
    last = int(marked.nonzero()[-1]) if marked.any() else -1
    text = ids[:, last + 1 :]
    return {"input_ids": text, "attention_mask": torch.ones_like(text)} if text.shape[1] > 1 else None


def _placeholders(model: Any, prompt: Mapping[str, Any]) -> Tensor:
    """[T]: which tokens stand for an image, or around one."""
    ids, marks = prompt["input_ids"][0], [getattr(model.config, name, None) for name in PLACEHOLDERS]
    return torch.isin(ids, ids.new_tensor([m for m in marks if m is not None]))


def _joined(prompt: Mapping[str, Any], count: int, twice: int | None = None) -> dict[str, Any]:
    """The same prompt so many times; with token ``twice`` of the first one twice, and the others padded on the left.

    Whatever belongs to sequences or to images stands in their order along the first axis.
    """
    given, shape = {"attention_mask": torch.ones_like(prompt["input_ids"]), **prompt}, prompt["input_ids"].shape

    def joined(v: Tensor) -> Tensor:
        if v.shape != shape:
            return torch.cat([v] * count)
        if twice is None:
            return torch.cat([v] * count)
        first = torch.cat((v[:, : twice + 1], v[:, twice:]), 1)
        return torch.cat((first, *[functional.pad(v, (1, 0))] * (count - 1)))

    return {name: joined(v) if isinstance(v, Tensor) and v.dim() else v for name, v in given.items()}


def _seconds(model: Any, call: Mapping[str, Any], config: GenerationConfig, prefill: str | None) -> float:
    start = time.perf_counter()
    with torch.no_grad():
        model.generate(**call, generation_config=config, custom_generate=compiled_loop, prefill=prefill)
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter() - start
