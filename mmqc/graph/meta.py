"""Torch calls on a model without values: floats are shapes on the meta device, integers and booleans stay real.

What steers a forward (token ids, grids, masks, positions) is integers, so a whole vision-language model of any size runs
this way in seconds.  Which experts a router picks is made up; where another float would have to steer the forward, the
call fails and says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

META = torch.device("meta")
DEVICES = ("meta", "cuda", "xpu", "mps")
SMALL = 1 << 12
_INDEXED = ("__getitem__", "getitem", "__setitem__", "setitem")
_CHOICES = ("topk", "argmax", "argsort", "sort", "multinomial")  # of experts, or of the next token


def call(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``func(*args, **kwargs)`` where some operands may be on the meta device and others not."""
    tensors = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, Tensor)]
    if any(t.is_meta for t in tensors):
        name = getattr(func, "__name__", "")
        if name in _CHOICES:
            return _choose(func, args, kwargs)
        if name in _INDEXED and not isinstance(args[0], Tensor):
            return func(*args, **kwargs)  # one of several results
        if name in _INDEXED:
            args = (args[0], _positions(args[1]), *args[2:])
        args, kwargs = pytree.tree_map_only(Tensor, _on_meta, (tuple(args), dict(kwargs)))
        return func(*args, **kwargs)
    return _keep_integers(func, args, kwargs)


def _keep_integers(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run on the CPU; what is asked for on another device loses its value if it is a float."""
    on_cpu = lambda v: torch.device("cpu") if _is_elsewhere(v) else v  # noqa: E731
    if not any(_is_elsewhere(v) for v in (*args, *kwargs.values())):
        return func(*args, **kwargs)
    result = func(*map(on_cpu, args), **{k: on_cpu(v) for k, v in kwargs.items()})
    floats = isinstance(result, Tensor) and result.is_floating_point()
    return result.to(META) if floats else result


def _choose(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Some choice, the same each time: an analysis of what is connected to what may take any."""
    made_up = lambda t: torch.rand(t.shape, generator=torch.Generator().manual_seed(0))  # noqa: E731
    args, kwargs = pytree.tree_map_only(Tensor, lambda t: made_up(t) if t.is_meta else t, (tuple(args), dict(kwargs)))
    floats_away = lambda t: t.to(META) if t.is_floating_point() else t  # noqa: E731
    return pytree.tree_map_only(Tensor, floats_away, func(*args, **kwargs))


def _is_elsewhere(value: Any) -> bool:
    if isinstance(value, str):
        return value.partition(":")[0] in DEVICES
    return isinstance(value, torch.device) and value.type != "cpu"


def _on_meta(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_meta else torch.empty_like(tensor, device=META)


def _positions(index: Any) -> Any:
    """An index in which every mask on the CPU is replaced by the positions of its true elements."""
    parts = index if isinstance(index, tuple) else (index,)
    out: list[Any] = []
    for part in parts:
        if isinstance(part, Tensor) and part.dtype is torch.bool and not part.is_meta:
            out += part.nonzero(as_tuple=True)
        else:
            out.append(part)
    return tuple(out)


def sketch(value: Any) -> Any:
    """What an analysis needs to know of a call's result: integers as they are, of floats the shape, and whether all are 0."""
    return _sketch(value) if isinstance(value, Tensor) else pytree.tree_map_only(Tensor, _sketch, value)


def _sketch(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor.cpu().clone() if not tensor.is_meta else tensor
    zero = not tensor.is_meta and tensor.numel() > 0 and _is_zero(tensor)
    shape, stride = tensor.shape, tensor.stride()
    return torch.empty_strided(shape, stride, dtype=tensor.dtype, device="cpu" if zero else META).zero_()


def _is_zero(tensor: Tensor) -> bool:
    """Whether there is nothing but zeros; most tensors say no in their first row."""
    row = tensor[(0,) * (tensor.dim() - 1)] if tensor.dim() > 1 else tensor
    return not bool(row.any()) and not bool(tensor.any())


def holds_integers(sketched: Any) -> bool:
    """Whether there is anything but floats in a result."""
    tensors = [t for t in pytree.tree_leaves(sketched) if isinstance(t, Tensor)]
    return any(not (t.is_floating_point() or t.is_complex()) for t in tensors)


def copied(value: Any) -> Any:
    """A sketch whose integers may be written to."""
    if isinstance(value, Tensor):  # nearly all
        return value if value.is_meta else value.clone()
    return pytree.tree_map_only(Tensor, lambda t: t if t.is_meta else t.clone(), value)


def without_value(tensor: Tensor) -> Tensor:
    """A float's shape; what is small enough to matter as a number (a scale, a table of frequencies) stays."""
    is_float = tensor.is_floating_point() or tensor.is_complex()
    if is_float and tensor.numel() > SMALL:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)
    return tensor.detach().cpu() if not tensor.is_meta else tensor
