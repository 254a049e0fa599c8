"""The programs of a package as modules that take tensors by keyword: the whole forward; vision, prefill, decode.

    forward   every input                                              -> logits [B, L, V]
    vision    pixels, grid                                             -> image_features, ...
    prefill   tokens, grid, image_features, ..., key_i, value_i        -> logits [B, V], rope_deltas     writes the cache
    decode    input_ids [B, 1], attention_mask [B, S], cache_position, rope_deltas, key_i, value_i
                                                                       -> logits [B, V]                  writes the cache

The seam between vision and prefill is the model's own ``get_image_features``: its results are the inputs of prefill.  A decode
step's position is the number of tokens that the mask admits, less one, plus ``rope_deltas``: the model's own, or by how much the
prompt's last position is off that.

Shapes:  key_i, value_i [B, H, S, D], S the capacity;  rows are padded on the left, as for generate
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from mmqc.aot.static_cache import cached_tensors, static_cache
from mmqc.errors import MmqcError
from mmqc.versions import cache_name, cache_of

SEAM = "get_image_features"
POOLED = "pooler_output"
BY_PRODUCTS = ("last_hidden_state", "hidden_states", "attentions")
FEATURES, DELTAS = "image_features", "rope_deltas"
SHORT = "the cache is shorter than the text"
Inputs = Mapping[str, Tensor]


class StepError(MmqcError, ValueError):
    """A model has no prefill and decode of this form, or none at all; says why."""


class Whole(nn.Module):
    """A model's forward from all its inputs to the logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Tensor:
        """Logits [B, L, V]."""
        return logits_of(self.model(**inputs, **_accepted(self.model, use_cache=False)))


def logits_of(output: Any) -> Tensor:
    """The logits of a model's output."""
    found = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(found, Tensor):
        raise StepError(f"the model returns {type(output).__name__} without logits")
    return found


def _accepted(model: nn.Module, **arguments: Any) -> dict[str, Any]:
    """Those of the arguments that the model's forward takes."""
    known = inspect.signature(model.forward).parameters
    any_name = any(p.kind is p.VAR_KEYWORD for p in known.values())
    return {k: v for k, v in arguments.items() if any_name or k in known}


@dataclass
class Seam:
    """Where image features enter a model's forward.

    Attributes:
        module: whose ``get_image_features`` is called.
        arguments: of the call that are no inputs.
        sources: inputs by the argument that they are.
        output: what the call returned.
    """

    module: nn.Module
    arguments: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    output: Any = None

    def call(self, inputs: Inputs) -> dict[str, Tensor]:
        """The features by name."""
        given = {**self.arguments, **{argument: inputs[name] for argument, name in self.sources.items()}}
        return dict(_flat(getattr(self.module, SEAM)(**given)))

    def joined(self, features: Inputs) -> Any:
        """The features in the form of the model's own result."""
        pieces = iter(features.values())
        if not isinstance(self.output, Mapping):
            return _form(self.output, next(pieces))
        made = {}
        for key, value in _parts(self.output).items():
            whole = key == POOLED or isinstance(value, Tensor)
            made[key] = _form(value, next(pieces)) if whole else [next(pieces) for _ in value]
        output = type(self.output)(**{key: value for key, value in made.items() if key in self.output})
        for key, value in made.items():
            setattr(output, key, value)
        return output


def find_seam(model: nn.Module, inputs: Inputs) -> Seam | None:
    """The outermost call of ``get_image_features`` in a forward; None if there is none.

    Raises:
        StepError: it is called more than once, or with tensors that are no inputs.
    """
    calls: list[Seam] = []
    depth = [0]
    with ExitStack() as stack:
        for module in (m for m in model.modules() if hasattr(m, SEAM)):
            watched = _watched(module, inputs, calls, depth)
            stack.enter_context(mock.patch.object(module, SEAM, watched))
        model(**inputs)
    if not calls:
        return None
    if not _parts(calls[0].output):
        raise StepError(f"{SEAM} returns nothing that mmqc takes for features")
    if len(calls) > 1:
        raise StepError(f"{SEAM} is called {len(calls)} times in a forward")
    return calls[0]


def _watched(module: nn.Module, inputs: Inputs, calls: list[Seam], depth: list[int]) -> Any:
    plain = getattr(module, SEAM)

    def call(*args: Any, **kwargs: Any) -> Any:
        depth[0] += 1
        try:
            output = plain(*args, **kwargs)
        finally:
            depth[0] -= 1
        if depth[0] == 0:
            given = inspect.signature(plain).bind(*args, **kwargs).arguments
            for name, p in inspect.signature(plain).parameters.items():
                if p.kind is p.VAR_KEYWORD:
                    given.update(given.pop(name, {}))
            names = {id(v): k for k, v in inputs.items()}
            sources = {a: names[id(v)] for a, v in given.items() if id(v) in names}
            rest = {a: v for a, v in given.items() if a not in sources}
            strange = [a for a, v in rest.items() if _has_tensors(v)]
            if strange:
                raise StepError(f"{SEAM} is called with tensors that are no inputs: {', '.join(strange)}")
            calls.append(Seam(module, rest, sources, output))
        return output

    return call


def _has_tensors(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return bool(value) and all(isinstance(v, Tensor) for v in value)
    return isinstance(value, Tensor)


def _flat(output: Any) -> list[tuple[str, Tensor]]:
    """Features by name; those of the images in one piece, those of several layers one by one."""
    found: list[tuple[str, Tensor]] = []
    for key, value in _parts(output).items():
        if key == POOLED:
            found.append((FEATURES, value if isinstance(value, Tensor) else torch.cat(list(value))))
        elif isinstance(value, Tensor):
            found.append((key, value))
        else:
            found += [(f"{key}_{i}", v) for i, v in enumerate(value)]
    return found


def _parts(output: Any) -> dict[str, Any]:
    """What of an output are features."""
    parts = dict(output) if isinstance(output, Mapping) else {POOLED: output}
    parts.setdefault(POOLED, getattr(output, POOLED, None))  # an output without such a field may be given it
    return {key: value for key, value in parts.items() if key not in BY_PRODUCTS and _has_tensors(value)}


def _form(value: Any, features: Tensor) -> Any:
    return features if isinstance(value, Tensor) else type(value)((features,))


class Vision(nn.Module):
    """From pixels to features."""

    def __init__(self, model: nn.Module, seam: Seam) -> None:
        super().__init__()
        self.model, self.seam = model, seam

    def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
        """Features by name."""
        return self.seam.call(inputs)


class Prefill(nn.Module):
    """A prompt: its keys and values into the cache, the logits of its last token out."""

    def __init__(self, model: nn.Module, seam: Seam | None, layers: int, told: nn.Module | None = None) -> None:
        super().__init__()
        self.model, self.seam, self.layers, self.told = model, seam, layers, (told,)

    def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
        """``logits`` [B, V], and ``rope_deltas`` [B, 1] where the model has positions."""
        keys, values = taken(inputs, self.layers)
        given = {n: v for n, v in inputs.items() if not n.startswith(("key_", "value_"))}
        with ExitStack() as stack:
            if self.seam is not None:
                features = {n: given.pop(n) for n in [n for n, _ in _flat(self.seam.output)]}
                first = next(iter(features.values()))
                output = self.seam.joined(features)
                stack.enter_context(mock.patch.object(self.seam.module, SEAM, _constant(output)))
                given.update({n: first for n in self.seam.sources.values() if n not in given})
            cache = self.cache(keys, values, given)
            positions = stack.enter_context(watched_positions(self.told[0]))
            more = _accepted(self.model, logits_to_keep=1)
            out = self.model(**given, **{cache_name(): cache}, use_cache=True, **more)
        found = {"logits": logits_of(out)[:, -1], **self.stored(cache)}
        deltas = deltas_of(self.model, out, positions, given["attention_mask"])
        return found if deltas is None else {**found, DELTAS: deltas}

    def cache(self, keys: Sequence[Tensor], values: Sequence[Tensor], given: Inputs) -> Any:
        """Where the prompt's keys and values go."""
        length, mask = keys[0].shape[2] - given["input_ids"].shape[1], given["attention_mask"]
        torch._assert_async(torch.full((), length, device=mask.device) >= 0, SHORT)
        return static_cache(keys, values)

    def stored(self, cache: Any) -> dict[str, Tensor]:
        """What of it is a result, and not written in place."""
        del cache
        return {}


def _constant(output: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        return output

    return call


class Decode(nn.Module):
    """One token a row."""

    def __init__(self, model: nn.Module, layers: int, axes: bool = True) -> None:
        super().__init__()
        self.model, self.layers, self.axes = model, layers, axes

    def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
        """``logits`` [B, V]."""
        out = self.model(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            position_ids=place_of(inputs["attention_mask"], inputs.get(DELTAS), self.axes),
            use_cache=True,
            **{cache_name(): self.cache(*taken(inputs, self.layers), inputs)},
        )
        return {"logits": logits_of(out)[:, -1]}

    def cache(self, keys: Sequence[Tensor], values: Sequence[Tensor], inputs: Inputs) -> Any:
        """What was stored, and where the token goes."""
        torch._assert_async((inputs["cache_position"] < keys[0].shape[2]).all(), SHORT)
        return static_cache(keys, values, inputs["cache_position"])


def place_of(mask: Tensor, deltas: Tensor | None, axes: bool = True) -> Tensor:
    """The position [B, 1] of the last token that the mask [B, S] admits; [3, B, 1] with axes and deltas."""
    place = mask.sum(-1, keepdim=True) - 1
    place = place if deltas is None else place + deltas
    # time, height and width of a text token are the same
    return place if deltas is None or not axes else place.unsqueeze(0).expand(3, -1, -1)


# --- positions that a model counts by itself --------------------------------------------------------------------------


def find_positions(model: nn.Module, inputs: Inputs) -> nn.Module | None:
    """The first module that a forward tells ``position_ids`` [1 or B, L]; None if there is none, or the model has deltas.

    Left to itself a model may count padding, or begin at one: a decode step must go on from what it did.
    """
    told: list[nn.Module] = []
    length = inputs["input_ids"].shape[1]

    def note(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        del args
        ids = kwargs.get("position_ids")
        if isinstance(ids, Tensor) and ids.dim() == 2 and ids.shape[1] == length:
            told.append(module)

    handles = [m.register_forward_pre_hook(note, with_kwargs=True) for m in model.modules() if m is not model]
    try:
        out = model(**inputs)
    finally:
        for handle in handles:
            handle.remove()
    return told[0] if told and getattr(out, DELTAS, None) is None else None


@contextmanager
def watched_positions(module: nn.Module | None) -> Iterator[list[Tensor]]:
    """The ``position_ids`` that ``module`` is told."""
    seen: list[Tensor] = []
    if module is None:
        yield seen
        return
    plain = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs["position_ids"])
        return plain(*args, **kwargs)

    with mock.patch.object(module, "forward", forward):
        yield seen


def deltas_of(model: nn.Module, output: Any, positions: Sequence[Tensor], mask: Tensor) -> Tensor | None:
    """[B, 1]: the model's own, or the position behind the prompt less the tokens that the mask admits; None of neither.

    To transformers 5.19 the model's own is part of its output; from then on the forward leaves it on the base model alone.
    """
    own = getattr(output, DELTAS, None)
    own = getattr(getattr(model, "base_model", None), DELTAS, None) if own is None else own
    return own if own is not None or not positions else positions[0][:, -1:] + 1 - mask.sum(-1, keepdim=True)


def taken(inputs: Inputs, layers: int) -> tuple[list[Tensor], list[Tensor]]:
    """Keys and values by layer."""
    return [inputs[f"key_{i}"] for i in range(layers)], [inputs[f"value_{i}"] for i in range(layers)]


@dataclass(frozen=True)
class CacheShape:
    """Heads and widths of keys and values by layer, and their dtype."""

    keys: tuple[tuple[int, int], ...]
    values: tuple[tuple[int, int], ...]
    dtype: torch.dtype

    def empty(self, batch: int, capacity: int, device: torch.device) -> dict[str, Tensor]:
        """A cache with nothing in it."""
        made = {}
        for i, (k, v) in enumerate(zip(self.keys, self.values, strict=True)):
            made[f"key_{i}"] = torch.zeros(batch, k[0], capacity, k[1], dtype=self.dtype, device=device)
            made[f"value_{i}"] = torch.zeros(batch, v[0], capacity, v[1], dtype=self.dtype, device=device)
        return made

    def text(self) -> str:
        """For a caller that allocates it without Python: name, heads and width of every tensor, and the dtype."""
        parts = (("key", self.keys), ("value", self.values))
        tensors = [f"{name}_{i}:{h}:{d}" for name, shapes in parts for i, (h, d) in enumerate(shapes)]
        return ",".join([str(self.dtype).removeprefix("torch."), *tensors])


def described(program: ExportedProgram) -> dict[str, str]:
    """Names of a program's inputs and outputs in their order."""
    spec: Any = program.call_spec.out_spec
    outputs = spec.unflatten(list(range(spec.num_leaves)))
    names = list(outputs) if isinstance(outputs, Mapping) else ["logits"]
    return {"inputs": ",".join((program.example_inputs or ((), {}))[1]), "outputs": ",".join(names)}


def cache_shape(model: nn.Module, inputs: Inputs) -> CacheShape:
    """What the model caches for a prompt.

    Raises:
        StepError: it is more than keys and values for every token.
    """
    if "input_ids" not in inputs or "attention_mask" not in inputs:
        raise StepError("prefill and decode need input_ids and attention_mask among the example inputs")
    out = model(**inputs, **_accepted(model, use_cache=True))
    found = cached_tensors(cache_of(out))
    if isinstance(found, str):
        raise StepError(found)
    keys, values = found
    length = inputs["input_ids"].shape[1]
    short = [i for i, k in enumerate(keys) if k.shape[2] != length]
    if short:
        raise StepError(f"layer {short[0]} caches {keys[short[0]].shape[2]} entries for a prompt of {length} tokens")
    shapes: Sequence[tuple[tuple[int, int], ...]] = [
        tuple((int(t.shape[1]), int(t.shape[3])) for t in part) for part in (keys, values)
    ]
    return CacheShape(shapes[0], shapes[1], keys[0].dtype)
