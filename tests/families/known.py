"""What is known not to work, as tables: an entry that no longer holds fails its test, and is taken away."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import pytest

from mmqc.checkpoint.checksum import CheckpointError


class Miss(NamedTuple):
    """A check that fails, with what, and why."""

    family: str
    checks: tuple[str, ...]
    error: type[Exception]
    says: str
    why: str


ROTATED, QUANTIZED, SAVED, GENERATES, COMPILED = ALL = ("rotated", "quantized", "saved", "generates", "compiled")
MISSES = [
    Miss(
        "udop",
        ALL,
        NotImplementedError,
        "nonzero",
        "its patches' places are written into a mask, which the analysis of channels has no value of",
    ),
    Miss(
        "kimi_k25",
        (SAVED,),
        RuntimeError,
        "is invalid for input of size 1",
        "transformers splits a weight's rows when it saves, and takes the activation scale for one",
    ),
    Miss("inkling", (SAVED,), IndexError, "Dimension out of range", "as Kimi K2.5"),
    Miss(
        "shieldgemma2",
        (SAVED,),
        CheckpointError,
        "and the checkpoint does not",
        "transformers loads this config as Gemma 3, under other names than it saved: a float model is lost the same way",
    ),
    Miss("pi0", (GENERATES,), AttributeError, "no attribute 'generate'", "it makes moves, not tokens"),
]

# Where transformers makes a mask in the default type, which float64's lowest number does not fit.
IN_DOUBLES = {"kosmos_2"}

# Weights that stay as they are and that the report does not name: it tells of spaces of channels that could not be rotated.
PIXELS = "between pixels and a LayerNorm, of whose channels none is a space that could be rotated"
UNNAMED = {
    "gemma4_unified": {"model.embed_vision.patch_dense.weight": PIXELS},
    "muse_glimmer": {"model.vision_tower.patch_embedder.patch_embedding.weight": PIXELS},
}

# How many tokens there are behind the prompt when four were asked for, where it is not four.
TOKENS = 4
LENGTHS = {
    "blip": 3,  # in place of the prompt's last
    "diffusion_gemma": 12,  # a canvas
}


def expected_of(family: str, check: str) -> contextlib.AbstractContextManager[object]:
    """Lets a check pass, or fail as the table says."""
    for miss in MISSES:
        if miss.family == family and check in miss.checks:
            return pytest.raises(miss.error, match=miss.says)
    return contextlib.nullcontext()
