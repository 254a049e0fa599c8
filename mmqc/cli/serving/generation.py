"""How requests are answered: one at a time, in one thread, by ``generate`` with ``mmqc.compiled_loop``.

transformers' manager has the thread (CUDA graphs belong to one), streams and decoding; added here are what the loop needs, seeds
that belong to one request, an end to answers that nobody waits for, and errors that a client can read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from mmqc.cli.serving.gate import CALL, Call
from mmqc.cli.serving.limits import Limits, RequestError
from mmqc.cli.serving.peer import Peer
from mmqc.compiler.compiled_loop import compiled_loop
from mmqc.kv.cache import SPEC


class Watch(StoppingCriteria):
    """A stopping criterion: counts the tokens, and ends an answer whose client has left."""

    def __init__(self, call: Call) -> None:
        self.call = call

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> Any:
        """[B] bool, whether to stop; ``input_ids`` [B, L]."""
        self.call.new += 1
        return torch.full((input_ids.shape[0],), self.call.left.is_set(), device=input_ids.device)


def room(prompt: int, asked: int | None, usual: int, limits: Limits, context: int | None) -> int:
    """How many new tokens an answer may have.

    Args:
        prompt: tokens of the prompt.
        asked: what the client asked for, if anything.
        usual: what it has where nobody asks.
        limits: see there.
        context: tokens that the model was made for, if its config says so.

    Raises:
        RequestError: the prompt, or the prompt with what was asked for, does not fit.
    """
    most = limits.new_tokens if context is None else context - prompt
    if most < 1:
        raise RequestError(f"the prompt has {prompt} tokens; the model was made for {context}, its answer included", "messages")
    if asked is None:
        return min(usual, limits.new_tokens, most)
    if asked > most:
        raise RequestError(
            f"{prompt} tokens of the prompt and max_tokens = {asked} are more than the model's {context}", "max_tokens"
        )
    return asked


class Said:
    """A stream's queue; transformers writes an error between quotation marks as it is, so it is made fit for that here."""

    def __init__(self, queue: Any, stream_error: Any) -> None:
        self.queue, self.stream_error = queue, stream_error

    def _fit(self, item: Any) -> Any:
        return self.stream_error(json.dumps(item.msg)[1:-1]) if isinstance(item, self.stream_error) else item

    async def get(self) -> Any:
        """The next item."""
        return self._fit(await self.queue.get())

    def get_nowait(self) -> Any:
        """The next item, if there is one."""
        return self._fit(self.queue.get_nowait())


class _Turns:
    """What is added to transformers' ``GenerateManager``."""

    limits: Limits
    compiled: bool
    stream_error: Any

    def generate_streaming(self, model: Any, processor: Any, inputs: Any, gen_config: Any, *args: Any, **kwargs: Any) -> Any:
        inputs, tokenizer = self._ready(model, inputs, gen_config), getattr(processor, "tokenizer", processor)
        parent: Any = super()
        queue, streamer = parent.generate_streaming(model, tokenizer, inputs, gen_config, *args, **kwargs)
        return Said(queue, self.stream_error), streamer

    async def generate_non_streaming(self, model: Any, processor: Any, inputs: Any, gen_config: Any, *args: Any, **kw: Any) -> Any:
        inputs, tokenizer = self._ready(model, inputs, gen_config), getattr(processor, "tokenizer", processor)
        parent: Any = super()
        try:
            return await parent.generate_non_streaming(model, tokenizer, inputs, gen_config, *args, **kw)
        except RequestError:
            raise
        except Exception as error:
            raise RequestError(f"generation failed ({type(error).__name__}: {error})", status=500) from error

    def submit(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        parent: Any = super()
        return parent.submit(_turn(fn), *args, **kwargs)

    def async_submit(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        parent: Any = super()
        return parent.async_submit(_turn(fn), *args, **kwargs)

    def _ready(self, model: Any, inputs: Mapping[str, Any], config: Any) -> dict[str, Any]:
        call = CALL.get()
        call.prompt = tokens = inputs["input_ids"].shape[-1]
        context = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        config.max_new_tokens = room(tokens, call.asked, config.max_new_tokens, self.limits, context)
        loop = {"custom_generate": compiled_loop} if self.compiled else {}
        return {**inputs, "stopping_criteria": StoppingCriteriaList([Watch(call)]), **loop}


def _turn(fn: Any) -> Any:
    """``fn`` when its turn has come: with the seed of its request, or not at all if nobody waits for it."""
    call = CALL.get(None)
    if call is None:  # not a request: warming up
        return fn

    def turn(*args: Any, **kwargs: Any) -> Any:
        call.begin()
        if call.left.is_set():
            raise RequestError("the client left before its turn")
        if call.seed is not None:
            torch.manual_seed(call.seed)
        return fn(*args, **kwargs)

    return turn


def manager(peer: Peer, limits: Limits, compiled: bool) -> Any:
    """transformers' ``GenerateManager``, with what stands at the top of this file.

    Args:
        peer: transformers' server.
        limits: see there.
        compiled: whether ``compiled_loop`` decodes; else transformers' own loop.
    """
    given = {"limits": limits, "compiled": compiled, "stream_error": peer.stream_error}
    return type("Manager", (_Turns, peer.generate_manager), given)()


def static(model: Any) -> str | None:
    """The kind of cache that ``compiled_loop`` needs to be named; None where the model makes a quantized one itself."""
    return None if hasattr(model, SPEC) else "static"
