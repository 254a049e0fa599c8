"""``Ranks`` of a process group of torch.distributed: groups of our own in it, for the length of one piece of work.

    gloo    small values, and tensors in host memory             nccl    tensors on accelerators; made when the first one comes

Every wait ends with an error of another rank (watch.py).  Sums are made part by part in the ranks' order: they do not depend on how
a backend would reduce.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mmqc.distributed import packing, values
from mmqc.distributed.ranks import ALONE, K, Ranks, T
from mmqc.distributed.watch import RankError, Watch, serve

HEAD = 1 << 12  # bytes of the first message of a value: most are smaller, and need no other one
PART = 1 << 24  # elements of a tensor that are gathered at a time
MEET = timedelta(minutes=30)  # from the first rank that calls to the last
LONG = timedelta(days=7)  # a rank may solve for hours: that it lives is seen otherwise
PAUSE = 0.002


class Group(Ranks):
    """All ranks of the default process group."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.groups: dict[str, Any] = {"meeting": self._meet(), "cpu": dist.new_group(backend="gloo", timeout=LONG)}
        served = serve() if self.rank == 0 else None
        place: list[Any] = [None, None] if served is None else [_address(), served.port]
        dist.broadcast_object_list(place, src=0, group=self.groups["cpu"])
        host, port = place
        self.watch = Watch(host, port, self.rank, self.size, served)

    def _meet(self) -> Any:
        """Wait until all ranks are here, in a group that does not wait for ever; it stays, for others may still be coming in.

        Raises:
            RankError: somebody does not come.
        """
        try:
            return dist.new_group(backend="gloo", timeout=MEET)
        except RuntimeError as error:
            minutes = MEET.total_seconds() / 60
            raise RankError(f"not all {self.size} ranks came within {minutes:g} minutes: each has to make the same call") from error

    def mine(self, items: Sequence[T]) -> Sequence[T]:
        """Neighbours, as many as any other rank's or one more."""
        own = packing.part(len(items), self.rank, self.size)
        return items[own.start : own.stop]

    def collected(self, own: Sequence[T]) -> Sequence[T]:
        """In the ranks' order."""
        return [item for part in self._all(list(own)) for item in part]

    def shared(self, make: Callable[[], T], owner: int = 0) -> T:
        """A message: how many bytes, the first of them, the others if there are more, the tensors."""
        made = make() if self.rank == owner else None
        content, tensors = values.taken_apart(made) if self.rank == owner else (b"", [])
        head = torch.frombuffer(bytearray(len(content).to_bytes(8, "big") + content).ljust(HEAD, b"\0"), dtype=torch.uint8)
        head, rest = head[:HEAD].clone(), head[HEAD:]
        self._wait("cpu", dist.broadcast, head, owner)
        size = int.from_bytes(head[:8].numpy().tobytes(), "big")
        if size > HEAD - 8:
            rest = rest if self.rank == owner else torch.empty(size + 8 - HEAD, dtype=torch.uint8)
            self._wait("cpu", dist.broadcast, rest, owner)
        if self.rank == owner:
            self._send(tensors, owner)
            return made  # type: ignore[return-value]
        content = (head[8:].numpy().tobytes() + rest.numpy().tobytes())[:size]
        tensors = [torch.empty(shape, dtype=dtype, device=kind) for shape, dtype, kind in values.places(content)]
        self._send(tensors, owner)
        return values.put_together(content, tensors)

    def summed(self, parts: Mapping[K, Tensor], owners: Mapping[K, int] | None = None) -> dict[K, Tensor]:
        """In the ranks' order; in place where the tensor is this rank's."""
        return self._reduced(parts, owners, torch.add)

    def largest(self, parts: Mapping[K, Tensor]) -> dict[K, Tensor]:
        """In place where the tensor is this rank's."""
        return self._reduced(parts, None, torch.maximum)

    def owners(self, costs: Sequence[float]) -> list[int]:
        """The same on all ranks, which know the same costs."""
        return packing.owners(costs, self.size)

    def tell(self, error: BaseException) -> None:
        """Nobody waits for this rank any more."""
        self.watch.tell(error)

    def leave(self, failed: bool) -> None:
        """The work is over."""
        self.watch.leave(failed)
        if not failed:  # with an operation still on its way, this would wait for who is gone
            for group in self.groups.values():
                dist.destroy_process_group(group)

    def _all(self, value: Any) -> list[Any]:
        """The value of every rank."""
        return [self.shared(lambda: value, owner) for owner in range(self.size)]

    def _send(self, tensors: Sequence[Tensor], owner: int) -> None:
        for tensor in tensors:
            if tensor.numel():
                self._wait(tensor.device.type, dist.broadcast, values.raw(tensor), owner)

    def _reduced(self, parts: Mapping[K, Tensor], owners: Mapping[K, int] | None, how: Callable[..., Tensor]) -> dict[K, Tensor]:
        """Tensors over those ranks that have them."""
        known = self._all({name: (tuple(t.shape), t.dtype, t.device.type) for name, t in parts.items()})
        metas = {name: meta for there in known for name, meta in there.items()}
        found = {}
        for name, (shape, dtype, kind) in metas.items():
            having = [rank for rank, there in enumerate(known) if name in there]
            owner = None if owners is None else owners[name]
            wanted = owner is None or owner == self.rank
            own = parts[name].contiguous() if name in parts else torch.zeros(shape if wanted else (), dtype=dtype, device=kind)
            for start in range(0, shape_size(shape), PART):
                flat = own.view(-1)[start : start + PART]
                if name not in parts and not wanted:
                    flat = own.new_zeros(min(PART, shape_size(shape) - start))
                self._reduce(flat, having, owner, how)
            if wanted:
                found[name] = own
        return found

    def _reduce(self, flat: Tensor, having: Sequence[int], owner: int | None, how: Callable[..., Tensor]) -> None:
        """One part of a tensor, in place where it is wanted."""
        kind = flat.device.type
        wanted = owner is None or owner == self.rank
        every = [torch.empty_like(flat) for _ in range(self.size)] if wanted else None
        if owner is None:
            self._wait(kind, dist.all_gather, every, flat)
        else:
            self._wait(kind, dist.gather, flat, every, owner)
        if every is not None:
            total = every[having[0]]
            for rank in having[1:]:
                total = how(total, every[rank])
            flat.copy_(total)

    def _wait(self, kind: str, operation: Callable[..., Any], *args: Any) -> None:
        """Run a collective to its end.

        Raises:
            RankError: another rank failed or is gone.
        """
        if kind not in self.groups:
            self.groups[kind] = dist.new_group(backend=dist.get_default_backend_for_device(kind), timeout=LONG)
        try:
            work = operation(*args, group=self.groups[kind], async_op=True)
            start = time.monotonic()
            while not work.is_completed():
                self.watch.look()
                waited = time.monotonic() - start
                time.sleep(min(max(waited / 16, PAUSE / 64), PAUSE))  # to see the end late costs a sixteenth of it at most
            work.wait()
        except RuntimeError as error:
            self.watch.lost(error)


def shape_size(shape: Sequence[int]) -> int:
    """How many elements a tensor of this shape has."""
    return torch.Size(shape).numel()


def _address() -> str:
    """Where other ranks reach this one: where torchrun's were told to meet, else this machine."""
    import os

    return os.environ.get("MASTER_ADDR") or socket.gethostname()


def in_group() -> bool:
    """Whether this process is one of several ranks of torch's default process group."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


@contextmanager
def together() -> Iterator[Ranks]:
    """The ranks that work together: those of torch's default process group, if there is one of two or more."""
    if not in_group():
        yield ALONE
        return
    group, failed = Group(), True
    try:
        yield group
        failed = False
    except BaseException as error:
        group.tell(error)
        raise
    finally:
        group.leave(failed)
