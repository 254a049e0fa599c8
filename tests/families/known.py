"""What is known not to work, as tables: an entry that no longer holds fails its test, and is taken away."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import pytest
from torch._dynamo.exc import TorchRuntimeError

from tests.families.parts import FAMILIES


class Miss(NamedTuple):
    """A check that fails, with what, and why."""

    family: str
    checks: tuple[str, ...]
    error: type[Exception]
    says: str
    why: str


ROTATED, QUANTIZED, SAVED, GENERATES, COMPILED = ("rotated", "quantized", "saved", "generates", "compiled")
MISSES = [
    Miss("pi0", (GENERATES,), AttributeError, "no attribute 'generate'", "it makes moves, not tokens"),
    Miss(
        "udop",
        (COMPILED,),
        TorchRuntimeError,
        "making fake tensor call",
        "Dynamo takes no tuple of 0-dimensional tensors as an index",
    ),
]

# What ``compiled_loop`` raises; the last four fail in transformers' own loop with a static cache, too, or say something wrong.
REFUSED = "compiled_loop decodes greedily or by sampling with a static or quantized cache"
UNFILLED = "(must match the (existing )?size|out of bounds|Failed to run|failed to run|making fake tensor call)"
LOOP_MISSES = {
    **dict.fromkeys(("evolla", "florence2", "pix2struct", "pp_formulanet", "t5gemma2", "udop"), REFUSED),
    **dict.fromkeys((n for n in FAMILIES if n.startswith(("vision_encoder_decoder", "instructblipvideo_t5"))), REFUSED),
    **dict.fromkeys(("inkling", "kosmos_2", "mllama"), UNFILLED),
    "blip": "has stored 25 tokens in its static cache for a prompt of 8: keys of its cross-attention",
}
NO_TOKENS = {"diffusion_gemma", "pi0"}  # one after the other

# Where transformers makes a mask in the default type, which float64's lowest number does not fit.
IN_DOUBLES = {"kosmos_2"}

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
