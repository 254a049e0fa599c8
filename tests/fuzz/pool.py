"""Processes that check programs; one that dies or hangs is a finding and is replaced, and never holds up the others.

A worker notes which program it is at, and since when, in memory that the campaign reads.  Signals raise ``Hang`` in a worker that
takes too long in Python; one that does not come back from that is killed.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.fuzz.grammar import Data

LIMIT, GRACE, DRAIN = 120, 15, 40.0  # seconds for one program; until it is killed; for the last ones after the end
STARTING = 180  # seconds for the imports of a new process
ALONE = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}
Work = Callable[[list[int], Any, Data], Any]
SPAWN = multiprocessing.get_context("spawn")


@dataclass
class Shared:
    """What a worker and the campaign both see: the seed that is at work, when its latest run began, shrinkings that are left."""

    seed: Any = field(default_factory=lambda: SPAWN.Value("q", -1))
    since: Any = field(default_factory=lambda: SPAWN.Value("d", 0.0))
    shrinks: Any = None

    def at(self, seed: int) -> None:
        """The worker begins to run a case of this seed."""
        self.seed.value, self.since.value = seed, time.time()

    def may_shrink(self) -> bool:
        """Whether one more failure is made smaller; takes it from what is left."""
        with self.shrinks.get_lock():
            self.shrinks.value -= 1
            return self.shrinks.value >= 0


class Worker:
    """A process and what it is at."""

    def __init__(self, work: Work, options: Data, shrinks: Any) -> None:
        self.shared, self.seeds = Shared(shrinks=shrinks), []
        self.pipe, other = SPAWN.Pipe()
        self.process = SPAWN.Process(target=_serve, args=(other, work, {**options, "shared": self.shared}), daemon=True)
        self.process.start()
        other.close()

    def give(self, seeds: list[int], known: Any) -> None:
        """The next seeds."""
        self.seeds: list[int] = seeds
        self.shared.at(-1)
        self.pipe.send((seeds, known))

    def stuck(self) -> bool:
        """Whether it is at one run, or at its imports, for too long."""
        allowed = STARTING if self.shared.seed.value < 0 else LIMIT + GRACE
        return bool(self.seeds) and time.time() - self.shared.since.value > allowed

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _serve(pipe: Connection, work: Work, options: Data) -> None:
    while True:
        try:
            seeds, known = pipe.recv()
        except EOFError:
            return
        pipe.send(work(seeds, known, options))


def pool(
    work: Work, jobs: int, seconds: float, chunk: Callable[[], list[int]], known: Any, options: Data, shrinks: int
) -> Iterator[tuple[Any, tuple[int, str] | None]]:
    """Results of ``work``, or (None, (seed, what happened)) for a program that a worker died of or hung at."""
    os.environ.update(ALONE)
    end, left = time.monotonic() + seconds, SPAWN.Value("i", shrinks)
    workers, again = [Worker(work, options, left) for _ in range(jobs)], []
    try:
        while time.monotonic() < end + DRAIN:
            for worker in workers:
                if not worker.seeds and time.monotonic() < end:
                    worker.give(again.pop() if again else chunk(), list(known))
            busy = {worker.pipe: worker for worker in workers if worker.seeds}
            if not busy:
                return
            for pipe in wait(list(busy), 1.0):
                worker = busy.pop(pipe)  # type: ignore[call-overload]
                try:
                    result = worker.pipe.recv()
                except (EOFError, OSError):
                    workers.remove(worker)
                    workers.append(Worker(work, options, left))
                    yield None, _lost(worker, again, "died")
                else:
                    worker.seeds = []
                    yield result, None
            for worker in [w for w in busy.values() if w.stuck()]:
                workers.remove(worker)
                workers.append(Worker(work, options, left))
                yield None, _lost(worker, again, "hang")
    finally:
        for worker in workers:
            worker.end()


def _lost(worker: Worker, again: list[list[int]], how: str) -> tuple[int, str]:
    """Ends a worker; the other programs that it had are given to the next."""
    seed = worker.shared.seed.value
    worker.end()
    code = worker.process.exitcode
    again += [rest] if (rest := [s for s in worker.seeds if s != seed]) and seed >= 0 else []
    return seed, how if how == "hang" else f"died with exit code {code}"
