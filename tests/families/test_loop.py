"""``mmqc.compiled_loop`` gives the tokens of transformers' own loop, whatever a family's layers keep of a prompt."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import mmqc
from tests.families import encoder_decoder, grids, images  # noqa: F401  their builders enter themselves
from tests.families.known import LOOP_MISSES, NO_TOKENS
from tests.families.parts import FAMILIES

NEW = 5
# Convolutions and linear attention, layers with heads of other widths, latent attention, towers by square roots and by crops.
SOME = ("lfm2_vl", "gemma4_unified", "kimi_k25", "aya_vision", "lighton_ocr")
NAMES = [pytest.param(n, marks=[] if n in SOME else [pytest.mark.slow]) for n in FAMILIES if n not in NO_TOKENS]


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize("name", NAMES)
def test_loop__gives_the_tokens_of_transformers(name: str) -> None:
    model: Any
    model, batch = FAMILIES[name]()
    plain = GenerationConfig(do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW, pad_token_id=0)
    static = GenerationConfig(**{**plain.to_diff_dict(), "cache_implementation": "static"})
    miss = LOOP_MISSES.get(name)
    with torch.no_grad(), pytest.raises((ValueError, RuntimeError, IndexError), match=miss) if miss else contextlib.nullcontext():
        expected = model.generate(**batch, generation_config=plain)
        for _ in range(3):  # with a new cache, and with the kept one
            got = model.generate(**batch, generation_config=static, custom_generate=mmqc.compiled_loop)
            assert torch.equal(got[:, -NEW:], expected[:, -NEW:])
