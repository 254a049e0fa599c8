"""A warp-specialised Gluon kernel on the CPU: every warp role is a thread, and the asynchronous units are as slow as they may be.

    run(kernel, programs, args, constants, replaced)      the kernel's Python; ``gl``, ``mbarrier``, ``tma`` and wgmma are ours

Barriers   mbarriers with their parity: a wait for the parity that is not under way comes back at once, as it does in hardware.
Copies     by a thread of their own, some time later, into a slot that is garbage until then.
Products   read their operands when they are waited for, no earlier: a slot that is given back too soon is found overwritten.
Results    leave a tile when its store is waited for.
A role that waits longer than PATIENCE is a deadlock; an arrival too many is an error.
"""

from __future__ import annotations

import queue
import random
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import torch

PATIENCE = 20.0
_change = threading.Condition()
_here = threading.local()


class Barrier:
    """One mbarrier."""

    def __init__(self) -> None:
        self.count = self.pending = self.bytes = self.done = 0

    def complete(self) -> None:
        if self.pending < 0:
            raise RuntimeError("an arrival too many")
        if self.pending == 0 and self.bytes == 0:
            self.done, self.pending = self.done + 1, self.count
        _change.notify_all()


def until(ready: Callable[[], bool], what: str) -> None:
    """Wait, holding the lock, until ``ready``."""
    end = time.monotonic() + PATIENCE
    while not ready():
        if _here.failed:
            raise RuntimeError("another role failed")
        if not _change.wait(0.05) and time.monotonic() > end:
            raise TimeoutError(f"deadlock: {what}")


class Barriers:
    """An array of them."""

    def __init__(self, count: int) -> None:
        self.each = [Barrier() for _ in range(count)]

    def index(self, i: Any) -> Barrier:
        return self.each[int(i)]


class Shared:
    """Shared memory [slots, ...], or one slot, or its transpose."""

    def __init__(self, values: torch.Tensor, dtype: torch.dtype) -> None:
        self.values, self.dtype = values, dtype

    def index(self, i: Any) -> Shared:
        return Shared(self.values[int(i)], self.dtype)

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.values.permute(order), self.dtype)

    def reshape(self, shape: list[int]) -> Shared:
        return Shared(self.values.view(shape), self.dtype)

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Shared:
        return Shared(self.values.view(shape), dtype)

    def store(self, value: torch.Tensor) -> None:
        self.values.copy_(value)

    def load(self, layout: Any) -> torch.Tensor:
        return self.values.clone()


class Described:
    """A tensor and the block that is copied."""

    layout = None

    def __init__(self, tensor: torch.Tensor, block: tuple[int, ...]) -> None:
        self.tensor, self.block, self.dtype = tensor, block, tensor.dtype

    def part(self, at: list[Any]) -> torch.Tensor:
        """What there is of a block."""
        return self.tensor[tuple(slice(int(i), int(i) + size) for i, size in zip(at, self.block, strict=True))]

    def read(self, at: list[Any]) -> torch.Tensor:
        found, part = torch.zeros(self.block, dtype=self.dtype), self.part(at)
        found[tuple(map(slice, part.shape))] = part
        return found

    def write(self, at: list[Any], values: torch.Tensor) -> None:
        part = self.part(at)
        part.copy_(values[tuple(map(slice, part.shape))])


class Values(torch.Tensor):
    """A tensor that has a layout, as far as the kernels ask."""

    def split(self) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        return self.unbind(-1)

    @property
    def type(self) -> Any:
        return types.SimpleNamespace(layout=None)


class Pointer:
    """An address in a flat tensor."""

    def __init__(self, to: torch.Tensor, at: Any = 0) -> None:
        self.to, self.at = to, at

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.to, self.at + more)


class Products:
    """Sums, and how many products of theirs are still under way."""

    def __init__(self, sums: torch.Tensor) -> None:
        self.sums, self.waiting = sums, 0


def warpgroup_mma(a: Any, b: Shared, acc: Any, is_async: bool, use_acc: bool = True) -> Products:
    assert is_async
    made = acc if isinstance(acc, Products) else Products(acc if use_acc else torch.zeros_like(acc))
    made.waiting += 1
    _here.products.append((made, a, b))
    return made


def warpgroup_mma_wait(left: int, deps: tuple[Any, ...]) -> Any:
    """The oldest ones are computed, of this warpgroup's, until so many are left."""
    while len(_here.products) > left:
        made, a, b = _here.products.pop(0)
        operand = a.values if isinstance(a, Shared) else a  # in registers, which nobody else writes
        made.sums = made.sums + (operand.double() @ b.values.double()).to(made.sums.dtype)
        made.waiting -= 1
    done = tuple(d if not isinstance(d, Products) else d if d.waiting else d.sums.as_subclass(Values) for d in deps)
    return done[0] if len(done) == 1 else done


def _expect(barrier: Barrier, size: int) -> None:
    with _change:
        barrier.bytes += size
        barrier.pending -= 1
        barrier.complete()


def _arrive(barrier: Barrier, count: int = 1, pred: Any = True) -> None:
    time.sleep(random.choice((0, 0, 1e-4)))
    if pred:
        with _change:
            barrier.pending -= count
            barrier.complete()


def _wait(barrier: Barrier, phase: Any) -> None:
    with _change:
        until(lambda: barrier.done % 2 != int(phase), "a barrier")


def _init(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.pending = count


def _copy_in(source: Described, at: list[Any], barrier: Barrier, slot: Shared) -> None:
    slot.values.fill_(99)

    def later() -> None:
        slot.values.copy_(source.read(at))
        with _change:
            barrier.bytes -= slot.values.numel() * slot.values.element_size()
            barrier.complete()

    _here.copies.put(later)


def _copy_out(target: Described, at: list[Any], tile: Shared) -> None:
    _here.stores.append(lambda: target.write(at, tile.values))


def _store_wait(left: int) -> None:
    while len(_here.stores) > left:
        _here.stores.pop(0)()


def _atomic_add(to: Pointer, more: Any, sem: str) -> int | None:
    if isinstance(more, torch.Tensor):
        assert sem == "relaxed"
        with _change:
            to.to[to.at.long()] += more
        return None
    assert sem in ("acquire", "release", "acq_rel")
    time.sleep(1e-4)
    if _here.failed:
        raise RuntimeError("another role failed")
    with _change:
        old = int(to.to[int(to.at)])
        to.to[int(to.at)] += more
        return old


def _store(to: Pointer, value: Any, **_: Any) -> None:
    to.to[to.at if isinstance(to.at, int) else to.at.long()] = value


def _specialize(roles: list[tuple[Callable[..., None], tuple[Any, ...]]], *_: Any) -> None:
    """Every role in a thread; the copies in another."""
    shared = dict(_here.__dict__)
    copies: queue.Queue[Callable[[], None] | None] = queue.Queue()

    def role(function: Callable[..., None], args: tuple[Any, ...]) -> None:
        _here.__dict__.update(shared, copies=copies, stores=[], products=[])
        try:
            function(*args)
        except BaseException as error:
            _here.failed.append(error)

    def copier() -> None:
        while (job := copies.get()) is not None:
            time.sleep(random.choice((0, 0, 2e-4)))
            try:
                job()
            except RuntimeError as error:
                shared["failed"].append(error)

    threads = [threading.Thread(target=role, args=given) for given in roles]
    copying = threading.Thread(target=copier)
    for thread in (copying, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    copies.put(None)
    copying.join()


def _pick(condition: Any, a: Any, b: Any) -> Any:
    return a if condition else b


gl: Any = types.SimpleNamespace(
    uint8=torch.uint8,
    int8=torch.int8,
    int32=torch.int32,
    int64=torch.int64,
    float32=torch.float32,
    bfloat16=torch.bfloat16,
    float16=torch.float16,
    constexpr=None,
    program_id=lambda axis: torch.tensor(_here.program),
    cdiv=lambda a, b: -(-a // b),
    minimum=lambda a, b: _pick(a < b, a, b),
    maximum=lambda a, b: _pick(a < b, b, a),
    where=_pick,
    static_range=range,
    zeros=lambda shape, dtype, layout=None: torch.zeros(shape, dtype=dtype).as_subclass(Values),
    zeros_like=torch.zeros_like,
    arange=lambda first, last, layout=None: torch.arange(first, last),
    NVMMADistributedLayout=lambda *_: None,
    SliceLayout=lambda *_: None,
    BlockedLayout=lambda *_: None,
    DotOperandLayout=lambda *_: None,
    SwizzledSharedLayout=lambda *_: None,
    full=lambda shape, value, dtype, layout=None: torch.full(shape, value, dtype=dtype).as_subclass(Values),
    join=lambda a, b: torch.stack((a, b), -1),
    NVMMASharedLayout=types.SimpleNamespace(get_default_for=lambda *_: None),
    convert_layout=lambda x, layout, assert_trivial=False: x,
    atomic_add=_atomic_add,
    store=_store,
    load=lambda at, **_: at.to[at.at.long()].as_subclass(Values),
    split=lambda x: x.unbind(-1),
    allocate_shared_memory=lambda dtype, shape, layout: (
        Barriers(shape[0]) if dtype == torch.int64 else Shared(torch.full(shape, 77, dtype=dtype), dtype)
    ),
    warp_specialize=_specialize,
)
REPLACED: dict[str, Any] = {
    "gl": gl,
    "tl": types.SimpleNamespace(
        debug_barrier=lambda: None,
        minimum=gl.minimum,
        constexpr=None,
        cdiv=gl.cdiv,
        where=gl.where,
        int32=torch.int32,
        float32=torch.float32,
    ),
    "mbarrier": types.SimpleNamespace(expect=_expect, arrive=_arrive, wait=_wait, init=_init, MBarrierLayout=lambda: None),
    "tma": types.SimpleNamespace(store_wait=_store_wait),
    "async_load": _copy_in,
    "async_store": _copy_out,
    "reinterpret": lambda tile, *how: tile._reinterpret(*how),
    "warpgroup_mma": warpgroup_mma,
    "warpgroup_mma_wait": warpgroup_mma_wait,
    "fence_async_shared": lambda: None,
    "gdc_wait": lambda: None,
    "await_inputs": lambda: None,
}


def as_python(kernel: Any, replaced: dict[str, Any]) -> Callable[..., Any]:
    """The kernel's function, and those that it calls, with other globals."""
    known: dict[int, Callable[..., Any]] = {}

    def convert(function: Any) -> Callable[..., Any]:
        plain = function.fn
        if id(plain) not in known:
            names: dict[str, Any] = {}
            known[id(plain)] = types.FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__)
            for name, value in plain.__globals__.items():
                names[name] = convert(value) if hasattr(value, "fn") and name not in replaced else value
            names.update(replaced)
        return known[id(plain)]

    return convert(kernel)


def run(kernel: Any, programs: int, args: dict[str, Any], constants: dict[str, Any], replaced: dict[str, Any]) -> None:
    """All programs at once; the first error of any role."""
    function, failed = as_python(kernel, REPLACED | replaced), list[BaseException]()

    def program(number: int) -> None:
        _here.__dict__.update(program=number, failed=failed)
        try:
            _specialize([(lambda: function(**args, **constants), ())])  # one role, or that which starts the others
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=program, args=(i,)) for i in range(programs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
