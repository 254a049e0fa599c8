"""Python's search for garbage cycles, left out for a while."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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

    For many objects of which most stay; left out where the caller has objects that are never to be looked at.
    """
    if gc.get_freeze_count() == 0:
        gc.freeze()
        gc.unfreeze()
