"""Launches that were chosen and compiled once, on other tensors of the same shapes.

    repeat(key, operands, choose)        choose(new, work)  ->  Launch, …        asked for the first time a key comes

Why:     generated code for any number of rows finds out how many come.  To choose tiles for them, build the launches and have
         Triton bind and specialise their arguments takes longer than the host has for a kernel; all of it depends on shapes
         alone.  What a launch needs of its tensors is where they begin.
Key:     everything that the choice depends on, but for the device and for which operands begin at a multiple of 16 bytes.
Memory:  what ``choose`` asks for beside the operands, it asks for by ``new`` and ``work``, and is given anew each time.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmqc.kernels.shared import compile_ahead
from mmqc.kernels.shared.direct_launch import DirectLaunch
from mmqc.kernels.shared.launch import Launch
from mmqc.kernels.shared.split_k import Workspace, workspace

ALIGNED = 15  # bits that are zero in an address to which Triton compiles wide loads
MOST = 1 << 14  # keys that are kept
New = Callable[[tuple[Any, ...], torch.dtype, torch.device], Tensor]
Choose = Callable[[New, Workspace], Iterable[Launch]]
Made = Callable[[], tuple[Tensor, ...]]


class Repeated(NamedTuple):
    """A compiled kernel with its arguments, and the places among them of what belongs to a tensor.

    Attributes:
        launch: of so many programs on a stream (direct_launch.py).
        grid: programs along three axes.
        values: arguments in their order.
        pointers: (place, tensor, bytes behind its beginning).
        descriptors: the same, and what makes the descriptor of an address.
    """

    launch: Callable[[tuple[int, int, int], int, list[Any]], None]
    grid: tuple[int, int, int]
    values: list[Any]
    pointers: list[tuple[int, int, int]]
    descriptors: list[tuple[int, int, int, Callable[[int], Any]]]

    def run(self, addresses: Sequence[int], stream: int) -> None:
        """On tensors that begin there."""
        values = self.values.copy()
        for place, which, offset in self.pointers:
            values[place] = addresses[which] + offset
        for place, which, offset, described in self.descriptors:
            values[place] = described(addresses[which] + offset)
        self.launch(self.grid, stream, values)


class _Chosen(NamedTuple):
    """The launches of a key, and how to make the memory that they need."""

    launches: list[Repeated]
    memory: list[Made]


_chosen: dict[Hashable, _Chosen] = {}


def repeat(key: Hashable, operands: Sequence[Tensor], choose: Choose) -> None:
    """Run what ``choose`` gives for these operands; a key that came before is not chosen for again.

    Args:
        key: what the choice depends on.
        operands: every tensor that the launches read or write, on one CUDA device, but for those of ``new`` and ``work``.
        choose: makes the launches.
    """
    addresses = [t.data_ptr() for t in operands]
    index, odd = operands[0].device.index, None
    if functools.reduce(operator.or_, addresses) & ALIGNED:
        odd = tuple(bool(address & ALIGNED) for address in addresses)
    key = (key, index, odd)
    chosen = _chosen.get(key)
    if chosen is None:
        _choose(key, operands, choose)
        return
    kept = [made for make in chosen.memory for made in make()]  # until everything is launched
    addresses += [t.data_ptr() for t in kept]
    stream = torch._C._cuda_getCurrentRawStream(index)  # type: ignore[attr-defined]
    for one in chosen.launches:
        one.run(addresses, stream)


def _choose(key: Hashable, operands: Sequence[Tensor], choose: Choose) -> None:
    compile_ahead.wait()
    memory: list[Made] = []
    tensors = list(operands)

    def kept(make: Made) -> tuple[Tensor, ...]:
        made = make()
        memory.append(make)
        tensors.extend(made)
        return made

    def new(shape: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        return kept(lambda: (torch.empty(shape, dtype=dtype, device=device),))[0]

    def work(*wanted: Any) -> tuple[Tensor, Tensor]:
        parts, counters = kept(lambda: workspace(*wanted))
        return parts, counters

    ran = [(launch, launch.run()) for launch in choose(new, work)]
    if all(compiled is not None for _, compiled in ran):  # the interpreter compiles nothing
        if len(_chosen) >= MOST:
            _chosen.clear()
        _chosen[key] = _Chosen([repeated(launch, compiled, tensors) for launch, compiled in ran], memory)


def repeated(launch: Launch, compiled: Any, tensors: Sequence[Tensor]) -> Repeated:
    """A launch that ran, with the place of each of these tensors in it."""
    starts = [t.data_ptr() for t in tensors]
    values, pointers, descriptors = list[Any](), [], []
    direct = DirectLaunch.of(compiled)
    given = {**launch.args, **launch.constants}
    for name in launch.kernel.arg_names:
        value, place = given[name], len(values)
        if not isinstance(value, Tensor):
            values.append(value)
            continue
        which, offset = _where(value, tensors, starts)
        if name in launch.descriptors:
            sizes, described = direct.described(launch.described(name))
            descriptors.append((place, which, offset, described))
            values += [None, *sizes]
        else:
            pointers.append((place, which, offset))
            values.append(None)
    grid: Any = (*launch.grid, 1, 1)[:3]
    return Repeated(direct.launch, grid, values, pointers, descriptors)


def _where(t: Tensor, tensors: Sequence[Tensor], starts: Sequence[int]) -> tuple[int, int]:
    """The tensor that ``t`` is, or is a part of, and its bytes in front of it."""
    start = t.data_ptr()
    if start in starts:
        return starts.index(start), 0
    for which, (other, first) in enumerate(zip(tensors, starts, strict=True)):
        if first < start < first + other.numel() * other.element_size():
            return which, start - first
    raise AssertionError(f"a launch reads a tensor of {list(t.shape)} that is none of its operands")
