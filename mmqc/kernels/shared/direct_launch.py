"""A kernel that Triton compiled, launched by its own function in C.

Why:     between a call and that function Triton (3.6) binds arguments, asks hooks and makes a descriptor for each tensor that TMA
         reads or writes, in Python: some 50 microseconds.  An address that came before has its descriptor already.
Else:    another version's launcher, or a kernel with memory of Triton's own, is launched as Triton does it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

MOST = 1 << 12  # descriptors that are kept of a tensor's place


class _Address(NamedTuple):
    """What a tensor descriptor asks of its tensor when it is launched."""

    address: int

    def data_ptr(self) -> int:
        return self.address


class DirectLaunch:
    """How to launch a compiled kernel with addresses in place of tensors."""

    def __init__(self, compiled: Any) -> None:
        self.compiled = compiled

    @classmethod
    def of(cls, compiled: Any) -> DirectLaunch:
        """By the function in C where there is one that is known."""
        found = _function_of(compiled.run)
        return cls(compiled) if found is None else _InC(compiled, *found)

    def launch(self, grid: tuple[int, int, int], stream: int, values: list[Any]) -> None:
        """On ``values``, the arguments in their order."""
        kernel = self.compiled
        kernel.run(*grid, stream, kernel.function, kernel.packed_metadata, None, None, None, *values)

    def described(self, descriptor: Any) -> tuple[Sequence[int], Callable[[int], Any]]:
        """(Arguments behind the descriptor's own, what makes that of an address)."""
        return (), _Like(descriptor).at


class _Like:
    """Descriptors like one, of other addresses."""

    def __init__(self, descriptor: Any) -> None:
        self.kind = type(descriptor)
        self.fields = {k: v for k, v in vars(descriptor).items() if k != "base"}

    def at(self, address: int) -> Any:
        made = object.__new__(self.kind)
        made.__dict__.update(self.fields, base=_Address(address))
        return made


class _InC(DirectLaunch):
    """By Triton 3.6's function, to which a descriptor is a tensor map, its shape and its strides."""

    def __init__(self, compiled: Any, function: Callable[..., None], maps: Sequence[Any]) -> None:
        super().__init__(compiled)
        self.function, self.maps, self.options = function, list(maps), options_of(compiled) or ()

    def launch(self, grid: tuple[int, int, int], stream: int, values: list[Any]) -> None:
        self.function(*grid, stream, *self.options, *values)

    def described(self, descriptor: Any) -> tuple[Sequence[int], Callable[[int], Any]]:
        from triton.backends.nvidia.driver import make_tensordesc_arg

        like, how, known = _Like(descriptor), self.maps.pop(0), dict[int, Any]()  # in the order of the arguments

        def at(address: int) -> Any:
            found = known.get(address)
            if found is None:
                if len(known) >= MOST:
                    known.clear()
                found = known[address] = make_tensordesc_arg(like.at(address), how)[0]
            return found

        return (*descriptor.shape, *descriptor.strides), at


def options_of(compiled: Any) -> tuple[Any, ...] | None:
    """What Triton 3.6's function takes between the stream and the kernel's arguments; None where it is not that one."""
    run = compiled.run
    if not _is_known(run):
        return None
    asked, scratch, hooks = (run.launch_cooperative_grid, run.launch_pdl), (None, None), (None, None, None)
    return (compiled.function, *asked, *scratch, compiled.packed_metadata, *hooks)


def _is_known(run: Any) -> bool:
    """Whether a launcher is Triton 3.6's and asks for no memory."""
    known = hasattr(run, "launch_pdl") and not hasattr(run, "arg_annotations")
    return known and not (run.global_scratch_size or run.profile_scratch_size)


def _function_of(run: Any) -> tuple[Callable[..., None], Sequence[Any]] | None:
    """Triton 3.6's launcher in C and what it knows of descriptors; None for another one's, or one that allocates."""
    launch = getattr(run, "launch", None)
    if not _is_known(run):
        return None
    if inspect.isbuiltin(launch):
        return launch, ()
    around = inspect.getclosurevars(launch).nonlocals if inspect.isfunction(launch) else {}
    function, maps = around.get("launcher"), around.get("tensordesc_meta")
    return (function, maps) if inspect.isbuiltin(function) and maps and None not in maps else None
