"""Errors put into mmqc on purpose, by name: each is a context in which mmqc has it, and the fuzzer must find it.

The check of ``quantize_`` itself (equivalence.py) is off meanwhile, so that nothing but the fuzzer's own comparison finds them.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from unittest.mock import patch

import torch

from mmqc.graph.spaces import coordinates, spaces
from mmqc.graph.spaces.space import Touch
from mmqc.graph.spaces.spaces import Spaces
from mmqc.passes import fold_norm_scale, fuse_rotation
from mmqc.quantization import rewrite
from tests.fuzz.build import features
from tests.fuzz.campaign import STRIDE, outcome_of
from tests.fuzz.check import BAD
from tests.fuzz.draw import draw
from tests.fuzz.grammar import Data


@contextmanager
def dropped_reader() -> Iterator[None]:
    """The last reader of every space that has several is forgotten."""
    analysed = Spaces._analysed

    def dropped(prog, plan, through_norms):
        found = analysed(prog, plan, through_norms)
        for space in found:
            if len(space.readers) > 2:
                space.touches.remove(space.readers[-1])
        return found

    with patch.object(Spaces, "_analysed", dropped):
        yield


@contextmanager
def skipped_bias() -> Iterator[None]:
    """Biases of writers are not rotated with their weights."""
    with patch.object(fuse_rotation, "bias_of", lambda prog, node: ""):
        yield


@contextmanager
def wrong_slice() -> Iterator[None]:
    """Where a space covers a part of a weight's axis, its channels are taken in another order."""
    apply = Touch.apply

    def shifted(touch: Touch, turn):
        whole = len(touch.groups) == 1 and torch.equal(touch.groups[0], torch.arange(touch.groups.shape[-1]))
        return apply(touch if whole else dataclasses.replace(touch, groups=touch.groups.roll(1, -1)), turn)

    with patch.object(Touch, "apply", shifted):
        yield


@contextmanager
def skipped_gain() -> Iterator[None]:
    """A gain is folded into all of its linears but the first."""
    fold = fold_norm_scale.FoldNormScale.rewrite

    def without_first(self, prog, site):
        return fold(self, prog, dataclasses.replace(site, readers=site.readers[1:]) if len(site.readers) > 1 else site)

    with patch.object(fold_norm_scale.FoldNormScale, "rewrite", without_first):
        yield


@contextmanager
def unread_weights() -> Iterator[None]:
    """Other readers of a weight are not looked for."""
    with patch.object(spaces, "pin_other_uses", lambda *_: None):
        yield


@contextmanager
def shared_memory() -> Iterator[None]:
    """What was computed before a write is taken for what was written."""
    with patch.object(coordinates, "apart", lambda ids, _: ids):
        yield


PLANTED: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "dropped reader": dropped_reader,
    "skipped bias": skipped_bias,
    "wrong slice": wrong_slice,
    "skipped gain": skipped_gain,
    "unread weights": unread_weights,
    "shared memory": shared_memory,
}


ONLY = {"shared memory": "scratch"}  # what a program must have to show it at all


def hunt(name: str, seconds: float, seed: int = 0) -> tuple[Data | None, float]:
    """Draws cases until one fails with the planted error and not without; the case, if any, and the seconds it took."""
    start, number = time.monotonic(), seed * STRIDE
    while time.monotonic() - start < seconds:
        case = draw(number)
        number += 1
        if name in ONLY and ONLY[name] not in features(case["program"]):
            continue
        with patch.object(rewrite, "check", lambda *_, **__: 0.0):
            with PLANTED[name]():
                failed = outcome_of(case).kind in BAD
            if failed and outcome_of(case).kind not in BAD:
                return case, time.monotonic() - start
    return None, time.monotonic() - start
