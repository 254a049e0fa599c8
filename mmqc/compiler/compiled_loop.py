"""``generate`` compiled as a whole: transformers' own loop, its prefill compiled too, its device never waited for.

    model.generate(**inputs, cache_implementation="static", custom_generate=mmqc.compiled_loop)
    model.generate(**inputs, custom_generate=mmqc.compiled_loop)                    of a model whose KV cache is quantized

transformers compiles the decode step of a static cache and nothing else.  Six things cost the time around it:

    prefill     runs eagerly, hundreds of small launches   ->  compiled as well: one graph for any length, and CUDA
                                                               graphs of sizes that come again (recorded_sizes.py)
    stop check  asks the device after every token          ->  one step late, transformers' ``DeferredStopCheck``
    inputs      some thirty small operations make them     ->  the last step's, one token further (step_mask.py,
                anew in front of every step                    step_inputs.py, step_stops.py, step_scores.py)
    a step      asks guards, compares addresses, wraps     ->  one launch of all of it (step_replay.py)
    the cache   is new in every call, so CUDA graphs are   ->  kept, emptied and used again while it has room
                recorded again, and as long as the call        (kept_cache.py)
    guards      ask the same of every layer for every      ->  asked once per call, ``layer_guards``, with this backend
                token, some milliseconds

A quantized cache's prompt runs eagerly: how many of its tokens are visual decides what is allocated.

What is kept belongs to the model: one call at a time uses it, and a second thread waits for its turn.

The loop itself, and with it every token, logits processor, stopping criterion and output, stays transformers'.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from transformers import CompileConfig, GenerationConfig
from transformers.cache_utils import StaticCache
from transformers.generation import utils as generation

from mmqc.compiler.head_start import CURRENT, HeadStart
from mmqc.compiler.kept_cache import KeptCaches, attends, check_lengths, empty, has_memory, longest
from mmqc.compiler.layer_guards import LayerGuards
from mmqc.compiler.recorded_sizes import LIMIT
from mmqc.compiler.step_inputs import Rules, inputs_go_on
from mmqc.compiler.step_mask import masks_go_on
from mmqc.compiler.step_replay import StepReplays
from mmqc.compiler.step_scores import plain_scores
from mmqc.compiler.step_stops import plain_stops
from mmqc.front.sizes import sizes_vary
from mmqc.front.streams import Streams, devices_of
from mmqc.graph.tracing import at_least_programs
from mmqc.kv.cache import QuantizedCache
from mmqc.kv.room import room_for
from mmqc.versions import cache_name, cache_of

__all__ = ["compiled_loop"]

CUDA_GRAPHS = "triton.cudagraphs"  # Inductor's option, where ``mode`` says it by another name
PREFILL = ("compiled", "recorded", "graphs", "eager")
ENCODES = "_prepare_multimodal_encoder_kwargs_for_generation"
PACKED = 4  # quantized caches, of as many numbers of prompts
CALLERS = 8  # between the loop and ``generate``: wrappers of the caller's own


class _State:
    """What a model keeps from one call to the next; a copy of the model starts afresh."""

    def __init__(self) -> None:
        self.caches = KeptCaches()
        self.packed: OrderedDict[tuple[Any, ...], QuantizedCache] = OrderedDict()
        self.prefills: dict[str, Callable[..., Any]] = {}
        self.guards: LayerGuards | None = None
        self.ahead = HeadStart()
        self.rules: set[Rules] = set()
        self.checked: set[frozenset[str]] = set()
        self.steps = StepReplays()
        self.streams = Streams()
        self.turn = threading.RLock()

    def __deepcopy__(self, memo: dict[int, Any]) -> _State:
        return _State()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _State, ()

    @classmethod
    def of(cls, model: Any) -> _State:
        return model.__dict__.setdefault("_mmqc_loop", cls())  # in one step: two threads may come first


def compiled_loop(
    model: Any, input_ids: Tensor, *, generation_config: GenerationConfig, prefill: str | None = None, **kwargs: Any
) -> Any:
    """A ``custom_generate`` callable: greedy search and sampling with a static or a quantized cache, compiled.

    Args:
        model: the model whose ``generate`` was called.
        input_ids: [B, L] int64, the prompt.
        generation_config: its ``compile_config`` says how to compile; by default ``backend="mmqc"`` with CUDA graphs.
        prefill: an argument of ``generate`` too: "recorded", what None means with a static cache and backend "mmqc": compiled once,
            and replayed as a CUDA graph where a size comes again and the host is what takes time (``recorded_sizes.py``);
            "compiled", without the replays, what None means with other backends; "graphs", compiled for each shape with
            Inductor's CUDA graphs, for few different ones: the first two prompts of a shape are slow, and each keeps memory; or
            "eager", what None means with a quantized cache, which takes nothing else.
        kwargs: what ``generate`` hands to its loop.  A ``streamer`` is not among it; it is taken from ``generate`` itself.

    Calls on one model take turns: each holds the model's compiled loop from its prompt to its last token.

    Returns:
        What ``generate`` returns, with the tokens of transformers' own loop as far as a compiled forward equals an eager one.

    Raises:
        ValueError: the cache is neither static nor quantized, or cannot be compiled; the generation is neither greedy nor
            sampled; ``prefill`` is unknown or not for this cache; or a static cache has other tokens than the prompt's.
    """
    streamer = _streamer()
    if streamer is not None:
        kwargs["streamer"] = streamer
    try:
        with _State.of(model).turn:
            return _loop(model, input_ids, generation_config, prefill, kwargs)
    except BaseException:
        if streamer is not None:
            streamer.end()  # whoever reads it would wait for ever
        raise


def _loop(model: Any, input_ids: Tensor, generation_config: GenerationConfig, prefill: str | None, kwargs: dict[str, Any]) -> Any:
    cache: Any = cache_of(kwargs)
    how = _checked(cache, generation_config, prefill)
    _State.of(model).streams.follow(devices_of({"input_ids": input_ids}))  # what is kept may still be read by the last call's
    config = copy.copy(generation_config)
    config.compile_config = _compile_config(generation_config.compile_config)
    outlives = config.return_dict_in_generate or getattr(cache, "_is_user_defined", False)
    if isinstance(cache, QuantizedCache):
        cache = _ready_packed(model, cache, input_ids.shape[0], keep=not outlives)
    else:
        tokens = _tokens(cache, input_ids, config, kwargs)
        cache = _State.of(model).caches.ready(model, cache, input_ids.shape[0], tokens, keep=not outlives)
    kwargs[cache_name()] = cache
    if (ahead := CURRENT.get()) is not None:
        ahead.cache = cache
    kwargs["stopping_criteria"] = plain_stops(kwargs["stopping_criteria"], input_ids.shape[0])
    kwargs["logits_processor"] = plain_scores(kwargs["logits_processor"], config)
    whole, packed = config.prefill_chunk_size is None, isinstance(cache, QuantizedCache)
    possible = whole and (packed or has_memory(cache))
    how = how if possible else "eager"  # transformers compiles the chunks of a prompt itself
    loop: Any = generation.GenerationMixin
    guards, compile_config = _guards_of(model, config.compile_config), config.compile_config
    # The length of the cache is a size that attention on a GPU is planned for; on a CPU another one is no reason to compile.
    step: Any = False if how == "graphs" else "batch" if model.device.type == "cuda" else "all"
    # Elsewhere a step has no CUDA graph, and another backend's say nothing of what they are called with.
    steps = _State.of(model).steps
    # Flags of linear attention's states are Python's, and change in a step: it was not tried on a device.
    replays = steps if guards is not None and model.device.type == steps.device.kind and attends(cache) else None
    while True:
        config.compile_config, options = _without_guards(compile_config, guards)
        try:
            once = _compiled_once(model, config.compile_config, options, how, guards)
            with (
                at_least_programs(),
                sizes_vary(step, cache),
                once,
                masks_go_on(cache if possible else None, None if "inputs_embeds" in kwargs else input_ids.shape[1]),
                inputs_go_on(model, _State.of(model).rules, config.max_length, replays),
                _deferred_stop_check(),
            ):
                return loop._sample(model, input_ids, generation_config=config, **kwargs)
        except _LayersChanged:
            assert guards is not None
            guards.renew()
            empty(cache)


def _tokens(cache: StaticCache, input_ids: Tensor, config: GenerationConfig, kwargs: dict[str, Any]) -> int:
    """How many tokens a sequence may have at the end; always more than the prompt, so that no size equals another by chance.

    transformers makes a cache as long as that of the longest call so far.
    """
    if "inputs_embeds" in kwargs:  # then max_length counts what comes behind them
        return longest(cache) + 1
    return max(config.max_length, input_ids.shape[1] + 1)


def _streamer() -> Any:
    """The streamer that ``generate`` was called with: transformers keeps it from loops that are not its own."""
    frame = _generate_frame(2)
    return None if frame is None else frame.f_locals.get("streamer")


def _generate_frame(above: int) -> FrameType | None:
    """That of the ``generate`` which called, so many frames above the caller or a few more; None without one."""
    frame: FrameType | None = sys._getframe(above + 1)
    loop: Any = generation.GenerationMixin
    code = inspect.unwrap(loop.generate).__code__
    for _ in range(CALLERS):
        if frame is None or frame.f_code is code:
            return frame
        frame = frame.f_back
    return None


def _why_not_decoded(cache: Any, config: GenerationConfig) -> str | None:
    """None, or what the loop cannot do, and what to leave out or to pass."""
    if config.num_beams > 1:
        return f"with {config.num_beams} beams: leave num_beams or custom_generate out"
    if cache is None:
        return "without a cache: leave use_cache=False or custom_generate out"
    if not isinstance(cache, (QuantizedCache, StaticCache)) or cache.offloading:
        offloaded = " in host memory" if getattr(cache, "offloading", False) else ""
        return f'with {type(cache).__name__}{offloaded}: pass cache_implementation="static", or leave custom_generate out'
    return None


def _checked(cache: Any, config: GenerationConfig, prefill: str | None) -> str:
    """How to run the prompt; raises what ``compiled_loop`` says."""
    if prefill not in (None, *PREFILL):
        raise ValueError(f"prefill = {prefill!r}: one of {', '.join(map(repr, PREFILL))}")
    packed = isinstance(cache, QuantizedCache)
    if why := _why_not_decoded(cache, config):
        raise ValueError(
            f"mmqc.compiled_loop decodes greedily or by sampling with a static or quantized cache on the device, not {why}"
        )
    if packed and not cache.is_compileable:
        raise ValueError("this quantized cache grows, which a compiled step cannot: give it a max_cache_len")
    if packed and prefill not in (None, "eager"):
        raise ValueError(
            f"prefill = {prefill!r} with a quantized cache: how many tokens of the prompt are visual decides what is allocated, "
            'which a graph cannot know; pass prefill="eager" or nothing'
        )
    backend = config.compile_config.backend if config.compile_config else "mmqc"
    if prefill == "recorded" and backend != "mmqc":
        raise ValueError(f"prefill = {prefill!r} is of backend 'mmqc', not of {backend!r}")
    return prefill or ("eager" if packed else "recorded" if backend == "mmqc" else "compiled")


def _compile_config(given: CompileConfig | None) -> CompileConfig:
    config = CompileConfig(backend="mmqc") if given is None else copy.copy(given)
    # Whoever asks for a compiled loop wants it on a CPU as well, where transformers would leave it out.
    config._compile_all_devices = True  # type: ignore[assignment]
    return config


class _LayersChanged(Exception):  # noqa: N818  (not an error: the prompt is computed again)
    """What the prompt was computed with is not what was compiled."""


def _guards_of(model: Any, config: CompileConfig) -> LayerGuards | None:
    """Checks the layers in Dynamo's place; other backends, and callers that filter guards themselves, keep all guards."""
    if config.backend != "mmqc" or "guard_filter_fn" in (config.options or {}):
        return None
    state = _State.of(model)
    state.guards = state.guards or LayerGuards(model)
    return state.guards


def _without_guards(config: CompileConfig, guards: LayerGuards | None) -> tuple[CompileConfig, dict[str, Any]]:
    """How to compile the step, and the options for the prefill."""
    options = {**(config.options or {}), **(guards.options if guards else {})}
    # torch.compile takes either a mode or options; this backend takes the mode among them.  It is the step's, as CUDA graphs are
    # by Inductor's own name: a prompt of any length has graphs of its own, or none.
    mode = options.pop("mode", None) or config.mode
    graphs = {CUDA_GRAPHS: options.pop(CUDA_GRAPHS)} if CUDA_GRAPHS in options else {}
    if guards is None or not guards.options:
        return config, options
    step = copy.copy(config)
    step.options = {**({"mode": mode} if mode else {}), **options, **graphs}
    step.mode = None  # type: ignore[assignment]
    return step, options


def _ready_packed(model: Any, new: QuantizedCache, batch: int, *, keep: bool) -> QuantizedCache:
    """An earlier call's cache, emptied, if it stores what ``new`` would and has its room; else ``new``, with room for some more.

    Emptied, it stores a prompt where CUDA graphs know that its last one's tokens are, as far as these have room for it.
    """
    caches = _State.of(model).packed
    key = (new.spec, new.shared.context, batch, model.dtype, model.device)
    kept = caches.get(key) if keep else None
    if kept is not None and kept.get_max_length() >= new.get_max_length():
        caches.move_to_end(key)
        kept.reset()
        return kept
    if keep:
        caches[key] = new
        caches.move_to_end(key)
        while len(caches) > PACKED:
            caches.popitem(last=False)
        for layer in new.packed:
            layer.limit = room_for(layer.limit or 0)  # one that grows has been refused
    return new


@contextmanager
def _compiled_once(
    model: Any, config: CompileConfig, given: dict[str, Any], how: str, guards: LayerGuards | None
) -> Iterator[None]:
    """The next call of ``model``, its prefill, is compiled, and only that one."""
    before, prefills = model._compiled_call_impl, _State.of(model).prefills
    more: dict[str, Any] = {"graphs": {CUDA_GRAPHS: True}, "recorded": {"recorded_sizes": LIMIT}}
    options = {**given, **more.get(how, {})}
    key = repr((config.backend, config.fullgraph, options))
    if key not in prefills and how != "eager":
        prefills[key] = torch.compile(model._call_impl, backend=config.backend, fullgraph=config.fullgraph, options=options or None)
    call = model._call_impl if how == "eager" else prefills[key]

    owner = threading.get_ident()

    def once(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != owner:  # a call of the model that has nothing to do with this loop
            return (before or model._call_impl)(*args, **kwargs)
        model._compiled_call_impl = before
        try:
            with sizes_vary("all" if how != "graphs" else False, cache_of(kwargs)):
                output = call(*args, **kwargs)
        except Exception:
            if guards is None or guards.same():
                raise
            raise _LayersChanged from None
        if guards is not None and not guards.same():
            raise _LayersChanged
        _check_once(model, kwargs)
        return output

    model._compiled_call_impl = once
    try:
        yield
    finally:
        model._compiled_call_impl = before


def _check_once(model: Any, given: dict[str, Any]) -> None:
    """What a forward with arguments of these names has stored is as long as the prompt: a look at the device, at the first."""
    cache, names, checked = cache_of(given), frozenset(given), _State.of(model).checked
    if names in checked or not isinstance(cache, StaticCache) or getattr(cache, "_is_user_defined", False):
        return
    prompt = given.get("input_ids") if given.get("inputs_embeds") is None else given["inputs_embeds"]
    if prompt is not None:
        check_lengths(model, cache, prompt.shape[1])
    checked.add(names)


def _leave_encoders_to_the_forward() -> None:
    """From transformers 5.23 on ``generate`` runs the towers in front of its loop, eagerly; in front of ours it leaves them alone.

    A prompt is compiled here with its tower in it, as ``forward`` takes it: the images themselves, not what a tower makes of them.
    """
    mixin: Any = generation.GenerationMixin
    original = getattr(mixin, ENCODES, None)
    if original is None:  # a transformers that runs them in the forward anyway
        return

    @functools.wraps(original)
    def prepare(self: Any, model_kwargs: dict[str, Any]) -> Any:
        frame = _generate_frame(1)
        ours = frame is not None and frame.f_locals.get("custom_generate") is compiled_loop
        return model_kwargs if ours else original(self, model_kwargs)

    setattr(mixin, ENCODES, prepare)


def _begin_with_generate() -> None:
    """For our loop ``generate`` takes the model's turn, and launches what is known of the prompt, before it prepares anything."""
    mixin: Any = generation.GenerationMixin
    original = mixin.generate

    @functools.wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("custom_generate") is not compiled_loop:
            return original(self, *args, **kwargs)
        state, ids = _State.of(self), args[0] if args else kwargs.get("inputs")
        with state.turn, state.ahead.call({"input_ids": ids, **kwargs}):
            return original(self, *args, **kwargs)

    mixin.generate = generate


_leave_encoders_to_the_forward()
_begin_with_generate()


_defer: ContextVar[bool] = ContextVar("defer the stop check", default=False)


@functools.cache
def _teach_to_defer() -> None:
    """Use transformers' deferred stop check, which it limits to the kind of device that it measured, for our loop on CUDA."""
    check = getattr(generation, "DeferredStopCheck", None)
    if check is None:  # transformers before 5.17: as correct, and slower
        return
    original = check.is_supported

    def is_supported(device: torch.device, *args: Any, **kwargs: Any) -> bool:
        ours = _defer.get() and device.type == "cuda"
        return original(torch.device("mps") if ours else device, *args, **kwargs)

    check.is_supported = staticmethod(is_supported)


@contextmanager
def _deferred_stop_check() -> Iterator[None]:
    _teach_to_defer()
    token = _defer.set(True)
    try:
        yield
    finally:
        _defer.reset(token)
