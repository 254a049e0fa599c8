"""Sizes that come again are recorded: a compiled graph of any size, replayed as a CUDA graph where the host would be waited for.

    1st call of a size    runs
    2nd                   runs, and is timed by the clock and on the device
    3rd                   is recorded, if the host took about as long to launch it as the device to run it, or if its first half
                          may begin before the host is ready and the whole is short; and replayed; if not, it is timed again when
                          twice as many have come, for the device may have been another's, too
    later                 what goes in is copied, one launch, what comes out is copied; two launches, where the first half needs so
                          little that compiled_loop begins with it (head_start.py)

A size is everything that a recording takes for granted: shapes, strides and dtypes of the tensors that are others in every call,
numbers (those of other tensors' shapes among them), and the addresses of the tensors that stay (weights, static caches).

    why     a prompt has hundreds of launches, each 10 to 50 us of the host; services send images of few sizes
    memory  recordings share one pool, as large as the largest of them needs; the last ``limit`` sizes used are kept
    ranks   of a process group do not time: all of them record in the third call, for they see the same sizes
    not     under autograd, in a capture, on another stream, while another thread is in here, or with values on the CPU: that call
            runs as if this were not here; nor, from then on, a size whose recording fails, or writes to an input that is another
            tensor in every call
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor, nn

from mmqc.compiler.cuda_recorder import Cuda, Replay
from mmqc.compiler.dense import dense
from mmqc.compiler.head_start import COMPARED, CURRENT, Head, Memory
from mmqc.compiler.regions import Halves
from mmqc.compiler.stamp import addresses, versions
from mmqc.front.handover import handed_over

LIMIT = 16  # sizes, where no other number is asked for
SEEN = 8  # times as many are counted
COPIED = 1 << 28  # bytes that may be copied in front of a replay
SHORT = 100.0  # ms: what a head start spares, some 10 to 20, is worth the memory of a recording

_GRAPHS: WeakSet[RecordedSizes] = WeakSet()

Graph = Callable[..., Sequence[Any]]


class Device(Protocol):
    """What records; the tests have one that needs no GPU.

    Attributes:
        kind: of the device, as torch.device has it: tensors of another have values that a recording would take for granted.
    """

    kind: str

    def usable(self) -> bool:
        """Whether this call may be timed, recorded or replayed."""
        ...

    def timed(self, run: Callable[[], Any], short: float = 0.0) -> tuple[Any, Callable[[], bool | None]]:
        """What ``run`` gives, and who says later whether the device waited for the host in it; None: not known yet.

        So is said of what took less than ``short`` milliseconds.
        """
        ...

    def record(self, run: Callable[[], Any], beside: bool = False) -> tuple[Any, Replay]:
        """What ``run`` gives, in memory that a replay writes anew; nothing has been computed in it yet.

        ``beside``: replays may run at the same time as anything else but other such replays.
        """
        ...

    def beside(self, run: Callable[[], Any]) -> None:
        """Run it behind what has been launched, and let what comes next go on."""
        ...

    def joined(self) -> None:
        """What comes next runs behind it."""
        ...


@dataclass
class _Size:
    """What is known of a size.

    Attributes:
        calls: that came.
        next: the call that is timed next.
        waited: says of a timed one whether the device waited for the host in it.
        stood: the memory of what seemed to stay, when it was timed.
        recording: of it.
        refused: why there will be none.
    """

    calls: int = 0
    next: int = 2
    waited: Callable[[], bool | None] | None = None
    stood: Memory | None = None
    recording: _Recording | None = None
    refused: str = ""

    @property
    def why_not(self) -> str:
        """Why it is not recorded; empty if it is, or may be in the next calls."""
        timed = self.recording is None and self.next > 2
        return self.refused or ("the device takes longer than its launches" if timed else "")


@dataclass(frozen=True)
class _Recording:
    """A recorded call.

    Attributes:
        inputs: (place, what a call's tensor is copied to).
        replay: runs it on them.
        outputs: of each the place of the argument that it is, or None; itself; and whether the next replay writes to it.
        written: places of the arguments that it writes to.
        storages: where the memory of these begins.
        head: its first part, which may run ahead of the call; then ``replay`` is the rest.
    """

    inputs: list[tuple[int, Tensor]]
    replay: Replay
    outputs: list[tuple[int | None, Any, bool]]
    written: list[int]
    storages: set[int]
    head: Head | None = None


@dataclass(frozen=True)
class _Kinds:
    """Places of arguments by what they are; a compiled graph is guarded for that.

    Attributes:
        tensors: all tensors.
        away: those that are numbers on another device.
        numbers: what is no tensor.
        usable: whether nothing else is among them.
    """

    tensors: list[int]
    away: list[int]
    numbers: list[int]
    usable: bool

    @classmethod
    def of(cls, args: Sequence[Any], device: str) -> _Kinds:
        """Of a call's arguments."""
        tensors = [i for i, a in enumerate(args) if isinstance(a, Tensor)]
        away = [i for i in tensors if args[i].device.type != device]
        numbers = [i for i, a in enumerate(args) if not isinstance(a, Tensor)]
        plain = all(type(args[i]) in (Tensor, nn.Parameter) for i in tensors)  # others say nothing of what they hold
        known = all(args[i] is None or isinstance(args[i], bool | int | float | str) for i in numbers)
        return cls(tensors, away, numbers, plain and known and not any(args[i].dim() for i in away))


class _Places:
    """Places of tensors that are others in every call, and of those that stay; a change makes new ones.

    Attributes:
        moving: in order.
        sized: those among them whose sizes tell calls apart: not the numbers on another device.
        staying: places of all other tensors.
        pick: takes the latter out of a call's arguments; there are more than a thousand of them.
    """

    def __init__(self, kinds: _Kinds, moving: Iterable[int] = ()) -> None:
        self.moving = sorted(moving)
        known, away = set(self.moving), set(kinds.away)
        self.sized = [i for i in self.moving if i not in away]
        self.staying = [i for i in kinds.tensors if i not in known]
        self.pick: Callable[[Sequence[Any]], Sequence[Any]] = lambda args: [args[i] for i in self.staying]
        if len(self.staying) > 1:  # of one place it gives no tuple
            self.pick = itemgetter(*self.staying)


@dataclass(eq=False)
class RecordedSizes:
    """Calls a compiled graph.

    Attributes:
        graph: takes and gives flat tuples.
        limit: how many sizes are recorded at once.
        device: records.
        halves: cuts the graph in front of what needs the inputs at some places.
        replays: how many calls were replays.
    """

    graph: Graph
    limit: int
    device: Device
    halves: Callable[[set[int]], Halves | None] | None = None
    replays: int = 0
    _sizes: OrderedDict[Hashable, _Size] = field(default_factory=OrderedDict)
    _kinds: _Kinds | None = None
    _places: _Places | None = None
    _last: tuple[int, ...] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, *args: Any) -> Any:
        """Run the graph, or the recording of its size."""
        if torch.is_grad_enabled() or not self.device.usable() or not self._lock.acquire(blocking=False):
            return self.graph(*args)
        try:
            return self._call(args)
        finally:
            self._lock.release()

    def refusals(self) -> list[str]:
        """Why sizes are not recorded."""
        if self._kinds is not None and not self._kinds.usable:
            return ["an input is neither a number nor a plain tensor of the device"]
        return sorted({why for size in self._sizes.values() if (why := size.why_not)})

    @property
    def moving(self) -> set[int]:
        """Places of tensors that are others in every call."""
        return set(self._places.moving) if self._places is not None else set()

    def _call(self, args: tuple[Any, ...]) -> Any:
        kinds = self._kinds = self._kinds or _Kinds.of(args, self.device.kind)
        if not kinds.usable:
            return self.graph(*args)
        places = self._places = self._learn(args, kinds)
        if (key := self._key(args, kinds, places)) is None:
            return self.graph(*args)
        size = self._sizes.setdefault(key, _Size())
        self._sizes.move_to_end(key)
        size.calls += 1
        if size.recording is None and not size.refused:
            if size.waited is None and size.calls >= size.next:
                short = SHORT if self.halves is not None and CURRENT.get() is not None else 0.0
                result, size.waited = self.device.timed(lambda: self.graph(*args), short)
                size.stood = Memory.of(places.staying, args)
                return result
            if size.waited is not None and (waited := size.waited()) is not None:
                size.waited, size.next = None, 2 * size.calls
                if waited:
                    self._record(size, args, places)
        if size.recording is not None and not _overlap(size.recording.storages, places.moving, args):
            return self._replay(size.recording, args)
        self._forget()
        return self.graph(*args)

    def _learn(self, args: Sequence[Any], kinds: _Kinds) -> _Places:
        """Tensors that are elsewhere than in the last call; what is known to stay is told apart by its address instead."""
        places = self._places or _Places(kinds)
        now = tuple(addresses(places.pick(args)))
        if now == self._last:  # which stays the same object: two keys are compared at once
            return places
        if self._last is not None:
            pairs = zip(places.staying, now, self._last, strict=True)
            moved = {i for i, a, b in pairs if a != b and not _stays(args[i])}
            if moved:
                places = _Places(kinds, moved.union(places.moving))
                now = tuple(addresses(places.pick(args)))
                self._sizes.clear()  # their keys had addresses of these
        self._last = now
        return places

    def _key(self, args: Sequence[Any], kinds: _Kinds, places: _Places) -> Hashable | None:
        """The size of a call; None if it cannot be recorded."""
        moving = [args[i] for i in places.sized]
        if any(a.is_inference() for a in moving) or sum(a.nbytes for a in moving) > COPIED:
            return None  # what is written to the former could not be seen
        return (
            self._last,
            tuple((a.shape, a.stride(), a.dtype) for a in moving),
            tuple(args[i].item() for i in kinds.away),
            tuple(args[i] for i in kinds.numbers),
        )

    def _record(self, size: _Size, args: Sequence[Any], known: _Places) -> None:
        current, handed = CURRENT.get(), handed_over()
        gone = size.stood.gone() if size.stood is not None else set()
        brought = [i for i in known.staying if i in gone or id(args[i]) in handed or (current is not None and current.has(args[i]))]
        inputs = [(i, place_for(args[i])) for i in (*known.moving, *brought) if args[i].device.type == self.device.kind]
        given = list(args)
        for i, place in inputs:
            given[i] = place
        tensors = [a for a in given if isinstance(a, Tensor)]
        before = versions(tensors)
        try:
            head, run = self._head(args, given, inputs, handed, known)
            outputs, replay = self.device.record(run)
        except RuntimeError as error:  # out of memory, or what a capture does not allow
            size.refused = str(error).partition("\n")[0]
            return
        places = [i for i, a in enumerate(given) if isinstance(a, Tensor)]
        written = [i for i, a, b in zip(places, before, versions(tensors), strict=True) if a != b]
        moving, storages = {*known.moving, *brought}, {_storage(args[i]) for i in written}
        if moving.intersection(written) or _overlap(storages, moving, args):
            size.refused = "it writes to an input that is another tensor in every call"
            return
        at = {id(given[i]): i for i in places}
        staying = {_storage(given[i]) for i in known.staying if i not in moving}
        kept = [(at.get(id(o)), o, isinstance(o, Tensor) and _storage(o) not in staying) for o in outputs]
        size.recording = _Recording(inputs, replay, kept, written, storages, head)
        self._forget()

    def _head(
        self, args: Sequence[Any], given: Sequence[Any], inputs: Sequence[tuple[int, Tensor]], handed: set[int], known: _Places
    ) -> tuple[Head | None, Callable[[], Any]]:
        """The first part, recorded, if it needs only what the loop was given and the front handed over; and what is left to do."""
        current, whole = CURRENT.get(), lambda: self.graph(*given)
        if current is None or self.halves is None:
            return None, whole
        names = current.names(args, [i for i, _ in inputs])
        late = {i for i, _ in inputs if i not in names and id(args[i]) not in handed}
        halves = self.halves(late.union(i for i in known.staying if id(args[i]) in current.state))
        if halves is None or not any(given[i].is_floating_point() for i in halves.reads.intersection(names)):
            return None, whole
        if any(slot.nbytes > COMPARED for i, slot in inputs if i in halves.reads and i not in names):
            return None, whole  # it could not be seen whether a guess was right
        places = {i for i, _ in inputs}
        staying = sorted(i for i in halves.reads if i not in places and isinstance(given[i], Tensor))
        tensors = [a for a in given if isinstance(a, Tensor)]
        before = versions(tensors)
        crossing, replay = self.device.record(lambda: halves.head(*given), beside=True)
        if versions(tensors) != before:  # ahead of its call it must not write to what others read
            return None, whole
        reads = [(i, slot, names.get(i)) for i, slot in inputs if i in halves.reads]
        head = Head(self.device, replay, reads, Memory.of(staying, given))
        return head, lambda: halves.tail(*crossing, *given)

    def _replay(self, recording: _Recording, args: Sequence[Any]) -> tuple[Any, ...]:
        self.replays += 1
        head, current = recording.head, CURRENT.get()
        ahead = current is not None and current.take(self.device, head, args)
        known = {i for i, _, _ in head.inputs} if head is not None and ahead else ()
        for i, place in recording.inputs:
            if i not in known:
                dense(place).copy_(dense(args[i]))
        if head is not None and not ahead:
            head.replay()
        recording.replay()
        if head is not None and current is not None:
            current.remember(head, args, ahead)
        torch.autograd.graph.increment_version([args[i] for i in recording.written])
        outputs = recording.outputs
        return tuple(args[i] if i is not None else _copied(o) if passes else o for i, o, passes in outputs)

    def _forget(self) -> None:
        recorded = [key for key, size in self._sizes.items() if size.recording is not None]
        for key in recorded[: max(0, len(recorded) - self.limit)]:
            del self._sizes[key]
        while len(self._sizes) > SEEN * self.limit:
            self._sizes.popitem(last=False)


def _overlap(storages: set[int], moving: Iterable[int], args: Sequence[Any]) -> bool:
    """Whether what is copied in front of a replay lies in one of the storages that the replay writes to."""
    return any(_storage(args[i]) in storages for i in moving)


def _copied(tensor: Tensor) -> Tensor:
    copy = place_for(tensor)
    dense(copy).copy_(dense(tensor))
    return copy


def _stays(tensor: Tensor) -> bool:
    """Whether it is known as one that others than this call write to, where it is."""
    return isinstance(tensor, nn.Parameter) or hasattr(tensor, "_dynamo_static_input_type")


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def place_for(tensor: Tensor) -> Tensor:
    """Memory with the same strides."""
    least = dense(tensor)
    return torch.empty_strided(least.shape, least.stride(), dtype=tensor.dtype, device=tensor.device).as_strided(
        tensor.shape, tensor.stride()
    )


def recorded(
    graph: Graph, limit: int, example_inputs: Iterable[Any], halves: Callable[[set[int]], Halves | None] | None = None
) -> Graph:
    """``graph``, its sizes recorded where that is possible: on one CUDA device; ``halves`` cuts it."""
    devices = {a.device for a in example_inputs if isinstance(a, Tensor) and a.device.type != "cpu"}
    if not (limit and len(devices) == 1 and devices.pop().type == "cuda"):
        return graph
    made = RecordedSizes(graph, limit, Cuda(), halves)
    _GRAPHS.add(made)
    return made


def all_graphs() -> list[RecordedSizes]:
    """Those of this process that are still used: what they replayed, and why they did not."""
    return list(_GRAPHS)
