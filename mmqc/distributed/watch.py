"""What ranks know of each other while they wait: whose error ended the work, and who gives no sign of life any more.

    rank 0 serves a store:    "failed"    the words of the first rank that failed
                              "told"      how many ranks have read them: rank 0 serves until all have
                              "left"      how many have ended their work
                              "alive 2"   a number that rank 2 raises every ``SIGN`` seconds

A rank whose process was stopped dead closes its connections, which the others notice at once on the CPU; on accelerators, whose
waits notice nothing, they notice that the number stands still.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from datetime import timedelta

from torch.distributed import TCPStore

from mmqc.errors import MmqcError

SIGN, SILENCE = 3.0, 30.0  # seconds
LOOK = 0.5
WORDS, TOLD, LEFT, ALIVE = "failed", "told", "left", "alive"


class RankError(MmqcError, RuntimeError):
    """Another rank ended the work: says which, and its error.

    Attributes:
        what: the same, as other ranks are told.
    """

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}; the model is as it was")
        self.what = what


class Watch:
    """One rank's view of the others.

    Args:
        host, port: where rank 0 serves.
        rank: this process's.
        size: how many there are.
        served: the store of rank 0 itself.
    """

    def __init__(self, host: str, port: int, rank: int, size: int, served: TCPStore | None = None) -> None:
        self.rank, self.size = rank, size
        self.store = served or _client(host, port)
        self.seen: dict[int, tuple[bytes, float]] = {}
        self.looked = 0.0
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._live, args=(_client(host, port),), name="mmqc sign of life", daemon=True)
        self._count(self.store, 0)
        self.thread.start()

    def _count(self, store: TCPStore, number: int) -> None:
        store.set(f"{ALIVE} {self.rank}", str(number))

    def _live(self, store: TCPStore) -> None:
        number = 0
        while not self.over.wait(SIGN):
            number += 1
            try:
                self._count(store, number)
            except RuntimeError:  # rank 0 is gone: whoever waits will say so
                return

    def tell(self, error: BaseException) -> None:
        """The others are to end with this error; the first one counts."""
        text = " ".join(f"{type(error).__name__}: {error}".split())
        words = error.what if isinstance(error, RankError) else f"rank {self.rank} failed: {text}"
        try:
            if not self.store.check([WORDS]):
                self.store.set(WORDS, words)
        except RuntimeError:  # rank 0 is gone
            return

    def look(self) -> None:
        """Raise if another rank has failed or gives no sign of life; cheap enough to be called all the time.

        Raises:
            RankError: says so.
        """
        now = time.monotonic()
        if now - self.looked < LOOK:
            return
        self.looked = now
        try:
            self._words()
            silent = next((rank for rank in range(self.size) if self._silent(rank, now)), None)
        except RuntimeError as error:
            if isinstance(error, RankError):
                raise
            raise RankError("rank 0 has ended: was it killed?") from error
        if silent is not None:
            raise RankError(f"rank {silent} has given no sign of life for {SILENCE:.0f} s: was it killed?")

    def _words(self) -> None:
        if self.store.check([WORDS]):
            words = self.store.get(WORDS).decode()
            self.store.add(TOLD, 1)
            raise RankError(words)

    def _silent(self, rank: int, now: float) -> bool:
        key = f"{ALIVE} {rank}"
        number = self.store.get(key) if rank != self.rank and self.store.check([key]) else b""
        if rank == self.rank or self.seen.get(rank, (None, 0.0))[0] != number:
            self.seen[rank] = number, now
        return now - self.seen[rank][1] > SILENCE

    def lost(self, error: BaseException) -> None:
        """A connection broke: raise what is known of it.

        Raises:
            RankError: always.
        """
        end = time.monotonic() + 2 * LOOK
        while time.monotonic() < end:  # the words of who failed may still be on their way
            self.looked = 0.0
            self.look()
            time.sleep(LOOK / 5)
        raise RankError("another rank has ended: was it killed?") from error

    def leave(self, failed: bool) -> None:
        """No more signs; rank 0 serves on until the others have left too, or know of an error (a few seconds at most)."""
        self.over.set()
        key, end = (TOLD, 10 * LOOK) if failed else (LEFT, SILENCE)
        if self.rank and not failed:
            with suppress(RuntimeError):  # rank 0 is gone, and all is done
                self.store.add(LEFT, 1)
        end += time.monotonic()
        while self.rank == 0 and time.monotonic() < end and self.store.add(key, 0) < self.size - 1:
            time.sleep(LOOK / 25)


def serve() -> TCPStore:
    """A store at a free port of this machine."""
    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def _client(host: str, port: int) -> TCPStore:
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=SILENCE))
