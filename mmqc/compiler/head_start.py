"""What images alone decide of a recorded prompt is launched before the rest of the call is prepared.

    generate           the tower's recording, beside the usual stream, on the images just given
    transformers       arguments, positions, the cache  }  some milliseconds of the host,
    Dynamo, the front  guards, reads, addresses         }  in which the device has the tower to do
    RecordedSizes      waits for it if it was the right one on the right values, else runs it again; then the rest

A guess: a call of inputs with these shapes, and these numbers in its small ones, runs what the last such call ran.  Whether it does
is known when its graph is called, and asked there.  A wrong guess costs the device's time, never a result: what was started writes
to nothing but its recording's own memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from mmqc.compiler.dense import dense
from mmqc.compiler.kept_cache import tensors
from mmqc.compiler.stamp import expired, versions

SMALL = 64  # numbers of an integer input that tell calls apart: sizes of images, not their tokens
COMPARED = 1 << 24  # bytes of a value that is compared with the one that was guessed
KEPT = 16  # kinds of calls
TRIES = 4  # guesses in a row that may be wrong


class Beside(Protocol):
    """A device that runs something beside what comes next."""

    def usable(self) -> bool:
        """Whether this call may replay."""
        ...

    def beside(self, run: Callable[[], Any]) -> None:
        """Run it behind what has been launched, and let what comes next go on."""
        ...

    def joined(self) -> None:
        """What comes next runs behind it."""
        ...


@dataclass(frozen=True, eq=False)
class Memory:
    """What a recording reads where it lies: weights, most of it.

    Attributes:
        places: among the graph's arguments.
        versions: how often each had been written to.
        storages: as long as one is alive, its address is no other tensor's.
        numbers: of the storages, as torch knows them.
    """

    places: list[int]
    versions: list[int]
    storages: list[StorageWeakRef]
    numbers: list[int]

    @classmethod
    def of(cls, places: Sequence[int], args: Sequence[Any]) -> Memory:
        """That of some of a graph's arguments."""
        tensors = [args[i] for i in places]
        storages = [StorageWeakRef(t.untyped_storage()) for t in tensors]
        return cls(list(places), versions(tensors), storages, [s.cdata for s in storages])

    def alive(self) -> bool:
        """Whether it may be read."""
        return not any(map(expired, self.numbers))

    def gone(self) -> set[int]:
        """Places where another tensor is by now, even if it has the same address by chance."""
        return {place for place, number in zip(self.places, self.numbers, strict=True) if expired(number)}

    def same(self, args: Sequence[Any]) -> bool:
        """Whether nothing was written to it since; that it is where it was, the recording's key says."""
        return versions([args[i] for i in self.places]) == self.versions


@dataclass(eq=False)
class Head:
    """The first part of a recording.

    Attributes:
        device: of the recording.
        replay: runs it on its inputs.
        inputs: (place among the graph's arguments, what a call's tensor is copied to, the name of the one that was given, or None:
            then it is guessed that its values are those of the last call of its kind).
        memory: what else it reads.
        wrong: how many guesses in a row were.
    """

    device: Beside
    replay: Callable[[], None]
    inputs: list[tuple[int, Tensor, str | None]]
    memory: Memory
    wrong: int = 0

    def guessed(self, args: Sequence[Any]) -> dict[int, Tensor]:
        """Copies of what is not given, by place."""
        return {place: args[place].clone() for place, _, name in self.inputs if name is None}

    def start(self, given: Mapping[str, Tensor], guessed: Mapping[int, Tensor]) -> bool:
        """Launch it, if it can be."""
        named = [(slot, guessed[place] if name is None else given.get(name)) for place, slot, name in self.inputs]
        if not self.device.usable() or not self.memory.alive():
            return False
        if not all(t is not None and _layout(t) == _layout(slot) for slot, t in named):
            return False

        def run() -> None:
            for slot, tensor in named:
                dense(slot).copy_(dense(tensor))  # type: ignore[arg-type]
            self.replay()

        self.device.beside(run)
        return True

    def holds(self, args: Sequence[Any], given: Mapping[str, Tensor], writes: Mapping[str, int]) -> bool:
        """Whether it ran on the values of this call's arguments."""
        if not self.memory.same(args):
            return False
        for place, slot, name in self.inputs:
            tensor = args[place]
            if name is not None and tensor is given[name] and tensor._version == writes[name]:
                continue
            if tensor.nbytes > COMPARED or not torch.equal(dense(slot), dense(tensor)):
                return False
        return True


class HeadStart:
    """Of one model: by kind of call, what to launch ahead."""

    def __init__(self) -> None:
        self.known: OrderedDict[Hashable, tuple[Head, dict[int, Tensor]]] = OrderedDict()
        self.given: dict[str, Tensor] = {}
        self.writes: dict[str, int] = {}
        self.kind: Hashable = None
        self.cache: Any = None  # of transformers, which the call writes to
        self.started: Head | None = None
        self.right = 0  # heads that were what was needed

    @contextmanager
    def call(self, given: Mapping[str, Any]) -> Iterator[None]:
        """One call of ``generate`` with these inputs; one in it goes with it."""
        if CURRENT.get() is self:
            yield
            return
        self.given = {name: t for name, t in given.items() if isinstance(t, Tensor) and not t.is_inference()}
        self.writes = {name: t._version for name, t in self.given.items()}
        self.kind = tuple((name, *_layout(t), _numbers(t)) for name, t in sorted(self.given.items()))
        head, guessed = self.known.get(self.kind, (None, {}))
        with torch.no_grad():
            self.started = head if head is not None and head.start(self.given, guessed) else None
        token = CURRENT.set(self)
        try:
            yield
        finally:
            CURRENT.reset(token)
            if self.started is not None:  # nobody asked for it: its recording was forgotten, or the call failed
                self.known.pop(self.kind, None)
                self.join()
            self.given, self.cache = {}, None

    @property
    def state(self) -> set[int]:
        """The ids of the cache's tensors."""
        return {id(t) for t in tensors(self.cache)} if self.cache is not None else set()

    def has(self, tensor: Tensor) -> bool:
        """Whether it is one of those that were given."""
        return any(tensor is t for t in self.given.values())

    def names(self, args: Sequence[Any], places: Collection[int]) -> dict[int, str]:
        """Of those arguments at ``places`` that were given, as they are or copied, the names."""
        found = {}
        for place in places:
            tensor = args[place]
            for name, t in self.given.items():
                if tensor is t or (_layout(tensor) == _layout(t) and tensor.nbytes <= COMPARED and torch.equal(tensor, t)):
                    found[place] = name
                    break
        return found

    def take(self, device: Beside, head: Head | None, args: Sequence[Any]) -> bool:
        """Whether ``head`` runs already, for these arguments; what was started on ``device`` is waited for by what comes next."""
        started = self.started
        if started is None or started.device is not device:
            return False
        right = started is head and started.holds(args, self.given, self.writes)
        started.wrong = 0 if right else started.wrong + 1
        if not right:
            self.known.pop(self.kind, None)
        self.join()
        self.right += right
        return right

    def join(self) -> None:
        """What comes next runs behind what was started."""
        started, self.started = self.started, None
        if started is not None:
            started.device.joined()

    def remember(self, head: Head, args: Sequence[Any], right: bool) -> None:
        """The next call of this kind starts with it, on the same values unless they were ``right`` already."""
        if not right and head.wrong >= TRIES:
            return
        if not right:
            self.known[self.kind] = head, head.guessed(args)
        self.known.move_to_end(self.kind)
        while len(self.known) > KEPT:
            self.known.popitem(last=False)


CURRENT: ContextVar[HeadStart | None] = ContextVar("what was launched ahead of this call", default=None)


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _numbers(tensor: Tensor) -> Hashable:
    small = not tensor.is_floating_point() and tensor.numel() <= SMALL
    return tuple(tensor.flatten().tolist()) if small else None
