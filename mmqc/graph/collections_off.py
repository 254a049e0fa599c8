"""Python's search for garbage cycles, left out for a while."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_callers_own: bool = False  # whether the caller has frozen objects: known once it is true, for Python counts them one by one


@contextmanager
def without_collections() -> Iterator[None]:
    """No search for garbage in the block: one that makes many objects and no cycles, or must not free anything by chance."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def count_as_old() -> None:
    """Whatever is there is looked through for garbage when Python next looks through everything, and not before.

    For many objects of which most stay; left out where the caller has, or once had, objects that are never to be looked at.
    """
    global _callers_own
    _callers_own = _callers_own or gc.get_freeze_count() > 0
    if not _callers_own:
        gc.freeze()
        gc.unfreeze()
