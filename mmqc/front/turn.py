"""Whose call of a model it is: one thread's at a time, until the frame that took the turn has ended, however it ended.

A hook that gives the turn back would do, were it always called: while another thread compiles, torch leaves out the hooks of a
call that fails (``_call_impl`` asks ``torch.compiler.is_compiling()``, a flag of the process).  So whoever waits asks the frame
itself: one that is running cannot be cleared.  (The stack of another thread is not looked at: Dynamo's frames make that unsafe.)
"""

from __future__ import annotations

import math
import sys
import threading
import time
from types import FrameType

POLL = 0.05  # seconds between two looks


class Turn:
    """A lock that one thread may take again inside its own call."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.Lock())
        self.owner = 0
        self.frames: list[FrameType] = []

    def take(self, frame: FrameType, wait: bool | float = True) -> bool:
        """Take the turn until ``give``, or until ``frame``, of the calling thread, has ended.

        False if another thread has it, and still has it after ``wait`` seconds; True waits for ever.
        """
        me = threading.get_ident()
        end = math.inf if wait is True else time.monotonic() + wait
        with self.changed:
            self._forget_ended()
            while self.owner not in (0, me):
                if time.monotonic() >= end:
                    return False
                self.changed.wait(POLL)
                self._forget_ended()
            self.owner = me
            self.frames.append(frame)
            return True

    def give(self) -> None:
        """End the innermost call of the owner."""
        with self.changed:
            self.frames.pop()
            self._free()

    def is_mine(self) -> bool:
        """Whether a call of this thread has it."""
        with self.changed:
            self._forget_ended()
            return self.owner == threading.get_ident()

    def _forget_ended(self) -> None:
        if self.frames:
            self.frames = [frame for frame in self.frames if _is_running(frame)]
            self._free()

    def _free(self) -> None:
        if not self.frames:
            self.owner = 0
            self.changed.notify_all()


def _is_running(frame: FrameType) -> bool:
    try:
        frame.clear()
    except RuntimeError:
        return True
    return False


def caller(*behind: str) -> FrameType:
    """The frame that called the function which asks, behind those of files whose path has one of these parts."""
    frame = sys._getframe(2)
    while frame.f_back is not None and any(part in frame.f_code.co_filename for part in behind):
        frame = frame.f_back
    return frame
