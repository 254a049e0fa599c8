"""The root of every error that mmqc raises on purpose, and the exit codes of the command line.

Each class also has the built-in that fits (`ValueError`, `RuntimeError`, `MemoryError`), so that code which knows nothing of
mmqc catches it as it would any other.  What a function was plainly called wrong with stays a `ValueError` or `TypeError`.
"""

from __future__ import annotations

from typing import ClassVar

DONE, WANTING, USAGE, REFUSED, MEMORY, UNEXPECTED = range(6)  # exit codes; mmqc/cli/app.py says what they mean


class MmqcError(Exception):
    """Something cannot be done: says what, where, why, and what to do.

    Attributes:
        exit_code: of the command that it ends.
    """

    exit_code: ClassVar[int] = REFUSED
