"""Which tokens of the running call are visual: found once per call on the outermost model, read by its linears.

    visual[b, l] = input_ids[b, l] in visual_token_ids,   else mm_token_type_ids[b, l] > 0

Shapes:  visual bool [B, L], or None where every token is text
Why:     MSQ quantizes visual and text rows with different scales, and the decoder does not see ``input_ids``.

A ``ModalityContext`` belongs to one model.  It is a plain object: not a submodule, not in the state dict.  The model's
hooks are its bound methods, so ``copy.deepcopy(model)`` copies hooks, context and the linears' references to it together.
What it holds of a call belongs to that call alone: threads have a mask each, and a call inside a call gives the outer one its
mask back.  Layers that a backward pass computes again (gradient checkpointing) get the mask of the call whose output the pass
comes from: that output's gradient hook has left it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mmqc.nn.inner_calls import InnerCalls
from mmqc.traced import is_traced

T = TypeVar("T")
WATCHED = "_tells_the_prompt"
WHAT_TO_DO = (
    "pass input_ids or mm_token_type_ids along with inputs_embeds, or set text_only = True on the model's ModalityContext "
    "if this call has no image"
)


class _Call:
    """What a thread's call in progress has found, and what the call around it had."""

    def __init__(self) -> None:
        self.visual: Tensor | None = None
        self.running = False
        self.places: tuple[Tensor | None, tuple[Tensor, Tensor]] | None = None
        self.outer: tuple[Any, ...] | None = None
        self.again: tuple[Tensor | None] | None = None  # the mask of the call that a backward pass has reached
        self.prompt: Tensor | None = None  # the mask of what ``generate`` was given, while it runs
        self.by_itself: nn.Module | None = None  # what runs past the model, with ids of its own


class _Calls(threading.local):
    """One for each thread; an object of its own, because Dynamo loses what a traced hook writes to a ``threading.local``."""

    def __init__(self) -> None:
        self.mine = _Call()


class ModalityContext:
    """The visual mask of the call in progress.

    Attributes:
        visual_token_ids: ids that stand for image or video features in ``input_ids``.
        text_only: the caller's promise that no call carries visual tokens; the mask is then not looked for.
    """

    def __init__(self, visual_token_ids: tuple[int, ...] = ()):
        self.visual_token_ids = tuple(int(i) for i in visual_token_ids)
        self.text_only = False
        self._calls = _Calls()

    @property
    def _call(self) -> _Call:
        return self._calls.mine

    @property
    def visual(self) -> Tensor | None:
        """Bool [B, L] of this thread's call in progress, None if all tokens are text."""
        return self._found()[1]

    @visual.setter
    def visual(self, mask: Tensor | None) -> None:
        self._call.visual = mask

    @property
    def running(self) -> bool:
        """Whether this thread is in a call of the model."""
        return self._call.running

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_calls"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._calls = _Calls()

    @contextmanager
    def during(self, visual: Tensor | None) -> Iterator[None]:
        """As within a call of the model that has this mask."""
        self._enter()
        self._call.visual = visual
        try:
            yield
        finally:
            self._leave()

    @contextmanager
    def generating(self, ids: Any) -> Iterator[None]:
        """While ``generate`` runs with these ids: what it calls by itself, past the model, has rows of the prompt, or of text."""
        call, before = self._call, self._call.prompt
        call.prompt = self._among(ids) if isinstance(ids, Tensor) and ids.dim() == 2 and not ids.is_floating_point() else None
        try:
            yield
        finally:
            call.prompt = before

    def begin_by_itself(self, module: nn.Module, ids: Tensor) -> None:
        """A part of the model runs past it, with these ids."""
        self._enter()
        self._call.visual, self._call.by_itself = self._among(ids), module

    def end_by_itself(self, module: nn.Module) -> None:
        """And has ended, if it is this one."""
        if self._call.by_itself is module:
            self._call.by_itself = None
            self._leave()

    def _enter(self) -> None:
        call = self._call
        call.outer = (call.visual, call.running, call.outer)
        call.visual, call.running = None, True

    def _leave(self) -> None:
        call = self._call
        call.visual, call.running, call.outer = (None, False, None) if call.outer is None else call.outer

    def __repr__(self) -> str:
        return f"ModalityContext(visual_token_ids={self.visual_token_ids}, text_only={self.text_only})"

    @classmethod
    def attach(cls, model: nn.Module, visual_token_ids: tuple[int, ...]) -> ModalityContext:
        """Make a context and hook it to ``model``, the module that users call."""
        if attached(model) is not None:
            raise ValueError(f"{type(model).__name__} already has a ModalityContext")
        context = cls(visual_token_ids)
        watch_generate(type(model))
        model.register_forward_pre_hook(context.begin, with_kwargs=True, prepend=True)
        model.register_forward_hook(context.end, always_call=True)
        InnerCalls(context).attach(model)
        return context

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook: find the mask of this call."""
        self._enter()
        visual = None if self.text_only else self.find(module, args, kwargs)
        # A text prompt: the text scale alone, and a graph without a mask (a trace cannot look).  Not for a decode step, whose one
        # row costs nothing to mask: to look means to wait for the device, once a token.
        looks = visual is not None and visual.shape[-1] > 1 and not is_traced()
        looks = looks and "decoder_input_ids" not in kwargs  # whose states of the encoder may be those of images
        if looks and visual is not None and not visual.any():
            visual = None
        self._call.visual = visual

    def end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Forward hook, called after an error too: forget the mask, so that a call that bypasses the model cannot use it."""
        del module, args
        if torch.is_grad_enabled() and not is_traced():
            visual = self._call.visual
            for tensor in _tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(functools.partial(self._reached, visual))
        self._leave()

    def _reached(self, visual: Tensor | None, grad: Tensor) -> None:
        """Gradient hook of an output: what lies behind it is of this call, until the pass reaches an earlier call's output."""
        del grad
        self._call.again = (visual,)

    def _found(self) -> tuple[bool, Tensor | None]:
        """(whether this thread is in a call or a backward pass through one, its mask)."""
        call = self._call
        if call.running or call.again is None or torch._C._current_graph_task_id() < 0:
            return call.running, call.visual
        return True, call.again[0]

    def rows(self, x: Tensor) -> Tensor | None:
        """The mask for the rows of x [B, L, K]; None where all rows are text."""
        call = self._calls.mine
        visual = call.visual
        if call.running and (visual is None or x.shape[:-1] == visual.shape):  # all that a trace of a linear goes through
            return visual
        return self._rows(x)

    def _rows(self, x: Tensor) -> Tensor | None:
        running, visual = self._found()
        if not running:
            if self.text_only:
                return None
            prompt = self._call.prompt
            if prompt is not None and (mask := of_prompt(prompt, x)) is not None:
                return mask
            if prompt is not None and _is_step(prompt, x):
                return None  # of an inner model's: text
            raise RuntimeError(
                "a linear with per-modality scales ran outside a call of the model that carries its ModalityContext, so the "
                "visual tokens are unknown: call that model, or set text_only = True on the context"
            )
        if visual is None or x.shape[:-1] == visual.shape:
            return visual
        if x.shape[:-1].numel() == visual.numel():  # [B L, K]: experts and routers flatten their tokens
            return visual.reshape(x.shape[:-1])
        # Latent attention multiplies all that it has cached; a decoder, the encoder's states.
        if (prompt := self._call.prompt) is not None and (mask := of_prompt(prompt, x)) is not None:
            return mask
        raise ValueError(
            f"the input of a linear with per-modality scales has shape {tuple(x.shape)}, which does not fit the "
            f"visual mask {tuple(visual.shape)} of this call (expected [batch, length, channels])"
        )

    def places(self) -> tuple[Tensor, Tensor]:
        """Numbers of the visual and of the text rows, int64, counted once per mask, because counting waits for the device."""
        call, visual = self._call, self.visual
        assert visual is not None
        if call.places is None or call.places[0] is not visual:
            flat = visual.reshape(-1)
            call.places = visual, (flat.nonzero()[:, 0], (~flat).nonzero()[:, 0])
        return call.places[1]

    def find(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """The mask of a call with these arguments.

        Raises:
            ValueError: they do not tell visual tokens from text.
        """
        ids = kwargs.get("input_ids")
        if ids is None and args and isinstance(args[0], Tensor) and not args[0].is_floating_point():
            ids = args[0]
        if ids is not None:
            return self._among(ids)
        embeds, kinds = kwargs.get("inputs_embeds"), kwargs.get("mm_token_type_ids")
        if kinds is not None and (embeds is None or kinds.shape == embeds.shape[:2]):
            return kinds > 0
        answer = kwargs.get("decoder_input_ids")
        if answer is not None and embeds is None and kwargs.get("encoder_outputs") is not None:
            return torch.zeros_like(answer, dtype=torch.bool)
        raise ValueError(f"{type(module).__name__} cannot tell visual tokens from text: {WHAT_TO_DO}")

    def _among(self, ids: Tensor) -> Tensor:
        visual = torch.zeros_like(ids, dtype=torch.bool)
        for token in self.visual_token_ids:
            visual = visual | (ids == token)
        return visual


def _is_step(prompt: Tensor, x: Tensor) -> bool:
    """Whether rows [B, 1, K], or [b, K] where a layer flattens its tokens, are the next token of each sequence."""
    return x.shape[1:-1].numel() == 1 if x.dim() > 2 else x.dim() == 2 and len(x) == len(prompt)


def of_prompt(prompt: Tensor, x: Tensor) -> Tensor | None:
    """The mask of rows [B, ..., L, K] while the prompt [b, l] is answered, or None: they do not fit.

    B is b, or a multiple of it, each sequence several times; behind the prompt comes text.
    """
    rows, (sequences, length) = x.shape[:-1], prompt.shape
    batch = rows[0] if len(rows) > 1 else sequences
    if batch % sequences or rows.numel() % batch:
        return None
    each, mask = rows.numel() // batch, prompt if batch == sequences else prompt.repeat_interleave(batch // sequences, 0)
    return None if each < length else torch.nn.functional.pad(mask, (0, each - length)).reshape(rows)


def watch_generate(kind: type[nn.Module]) -> None:
    """``generate`` of these models, transformers' own or another, tells a model's context what it was given."""
    owner: Any = next((cls for cls in kind.__mro__ if "generate" in vars(cls)), None)
    if owner is None or hasattr(owner.generate, WATCHED):
        return
    original: Any = owner.generate

    @functools.wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        context = attached(self)
        if context is None:
            return original(self, *args, **kwargs)
        given = args[0] if args else kwargs.get("inputs")
        with context.generating(kwargs.get("input_ids") if given is None else given):
            return original(self, *args, **kwargs)

    setattr(generate, WATCHED, True)
    owner.generate = generate


def _tensors(output: Any) -> Iterator[Tensor]:
    """Those of a forward's result."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping | list | tuple):
        for part in output.values() if isinstance(output, Mapping) else output:
            yield from _tensors(part)


def visual_token_ids(model: nn.Module) -> tuple[int, ...]:
    """The ids that stand for image and video features in the token ids, from the model's config."""
    config = getattr(model, "config", None)
    names = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
    found = (getattr(config, name, None) for name in names)
    return tuple(dict.fromkeys(i for i in found if isinstance(i, int)))


def attached(model: nn.Module) -> ModalityContext | None:
    """The context whose hooks ``model`` carries, if any."""
    return hook_owner(model, ModalityContext)


def detach(model: nn.Module) -> None:
    """Remove the context's hooks from ``model``; its linears keep their reference."""
    unhook(model, ModalityContext)
    for module in model.modules():
        unhook(module, InnerCalls)


def hook_owner(model: nn.Module, owner: type[T]) -> T | None:
    """The object of class ``owner`` whose pre-hook ``model`` carries, if any."""
    found = (getattr(hook, "__self__", None) for hook in model._forward_pre_hooks.values())
    return next((o for o in found if isinstance(o, owner)), None)


def unhook(model: nn.Module, owner: type[Any]) -> None:
    """Remove the hooks of objects of class ``owner`` from ``model``."""
    for hooks in (model._forward_pre_hooks, model._forward_hooks):
        for key, hook in list(hooks.items()):
            if isinstance(getattr(hook, "__self__", None), owner):
                del hooks[key]
                model._forward_pre_hooks_with_kwargs.pop(key, None)
                model._forward_hooks_always_called.pop(key, None)
