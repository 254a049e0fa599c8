"""One launch of a Triton kernel as a value: run now, or written into a compiled graph by ``lowering/launch.py``.

    Launch     a kernel, its grid, operands and constants          Shape     what its choice depends on of an operand

Why:     which tile, which grid and which operands is decided in one place for both, and a package compiled ahead of time
         holds the kernel itself, with no Python to choose it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime.jit import MockTensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mmqc.kernels.shared.gluon_tiles import describe, is_gluon
from mmqc.kernels.shared.settled_key import settle


class Shape:
    """A contiguous tensor, as far as the choice of a launch depends on it: a compiled graph knows no more of its tensors."""

    def __init__(self, shape: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self._strides: tuple[Any, ...] | None = None

    def dim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def stride(self, axis: int | None = None) -> Any:
        """Elements between two neighbours, as ``Tensor.stride``."""
        strides = self._strides or tuple(math.prod(self.shape[i + 1 :]) for i in range(len(self.shape)))
        return strides if axis is None else strides[axis]

    def is_contiguous(self) -> bool:
        """As ``Tensor.is_contiguous``."""
        return True

    def data_ptr(self) -> int:
        """An address like that of every allocation: a multiple of what TMA needs."""
        return 0

    def __getitem__(self, index: tuple[slice, slice]) -> Any:
        """Some columns of a matrix, in their places."""
        other = copy.copy(self)
        other.shape, other._strides = (self.shape[0], len(range(*index[1].indices(self.shape[1])))), self.stride()
        return other

    def unflatten(self, axis: int, sizes: tuple[int, ...]) -> Any:
        """As ``Tensor.unflatten``."""
        other, step = copy.copy(self), self.stride(axis)
        other.shape = (*self.shape[:axis], *sizes, *self.shape[axis + 1 :])
        steps = (step * math.prod(sizes[i + 1 :]) for i in range(len(sizes)))
        other._strides = (*(self.stride(i) for i in range(axis)), *steps, *(self.stride(i) for i in range(axis + 1, self.dim())))
        return other

    def of(self, rows: int) -> Any:
        """The same, as if it had so many rows."""
        other = copy.copy(self)
        other.shape = (rows, *self.shape[1:])
        return other


class Launch(NamedTuple):
    """What a launch needs.

    Attributes:
        kernel: a ``triton.jit`` function, or Gluon's, which no compiled graph takes.
        grid: programs along one, two or three axes.
        args: tensors and sizes by the kernel's names for them.
        constants: ``tl.constexpr`` arguments.
        outputs: the args that are written.
        num_warps, num_stages: of the compiled kernel.
        block_rows: the first axis has as many programs as there are blocks of so many rows M, times something; 0 if it does
            not depend on them.
        descriptors: block shapes of the args that TMA reads or writes.
        early: whether its programs may start before the kernel in front has ended, for which they wait themselves (Hopper's
            programmatic dependent launch).
    """

    kernel: Any
    grid: tuple[int, ...]
    args: dict[str, Any]
    constants: dict[str, Any]
    outputs: tuple[str, ...]
    num_warps: int
    num_stages: int
    block_rows: int = 0
    descriptors: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    early: bool = False

    def run(self) -> Any:
        """On tensors, now; Triton's compiled kernel, or None in its interpreter, or where launches are ``listed``."""
        if (launches := _listed.get()) is not None:
            launches.append(self)
            return None
        settle(self.kernel)
        described = {name: self.described(name) for name in self.descriptors}
        return self.kernel[self.grid](**{**self.args, **described}, **self.constants, **self._options())

    def compile(self) -> Any:
        """Triton's compiled kernel, without running it; its tensors may be ``Shape``s, which begin where wide loads may."""
        settle(self.kernel)
        described = {name: self.described(name) for name in self.descriptors}
        args = {name: MockTensor(v.dtype) if isinstance(v, (Shape, Tensor)) else v for name, v in self.args.items()}
        return self.kernel.warmup(grid=self.grid, **{**args, **described}, **self.constants, **self._options())

    def described(self, name: str) -> Any:
        """The descriptor of an arg that TMA reads or writes."""
        make = describe if is_gluon(self.kernel) else TensorDescriptor.from_tensor
        return make(self.args[name], list(self.descriptors[name]))

    def specialisation(self) -> Hashable:
        """What its kernel is compiled for, of tensors that begin where wide loads may."""
        options = getattr(self.kernel, "kwargs", {})  # the interpreter's
        any_size = getattr(self.kernel, "do_not_specialize", None) or options.get("do_not_specialize") or ()
        sizes = {k: _kind(v) for k, v in self.args.items() if k not in any_size}
        chosen = repr((self.constants, self._options()))
        return self.kernel.__name__, chosen, *(tuple(sorted(d.items())) for d in (sizes, self.descriptors))

    def _options(self) -> dict[str, Any]:
        # x * y + z rounded once, as in what Inductor compiles; left open, Triton's default decides, which 3.10 turns round
        options: dict[str, Any] = {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}
        return options | ({"launch_pdl": True} if self.early else {})


_listed: ContextVar[list[Launch] | None] = ContextVar("where launches are listed", default=None)


@contextmanager
def listed() -> Iterator[list[Launch]]:
    """The launches that would run, none of which does: what they should have filled is left as it was."""
    launches: list[Launch] = []
    token = _listed.set(launches)
    try:
        yield launches
    finally:
        _listed.reset(token)


def _kind(arg: Any) -> Hashable:
    """What a kernel is compiled for of an argument."""
    if isinstance(arg, int):
        return arg == 1, arg % 16 == 0
    return "float" if isinstance(arg, float) else arg.dtype
