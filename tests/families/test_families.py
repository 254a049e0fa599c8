"""Image-text models of transformers, tiny and with random weights: rotated, quantized, saved, loaded, asked to generate."""

from __future__ import annotations

import copy
import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from float64 import EXACT, Float64, output_of, relative_error, to_float64
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

import mmqc
from mmqc import recipes
from mmqc.checkpoint.hf import default_dtype
from tests.families import encoder_decoder, grids, images  # noqa: F401  their builders enter themselves
from tests.families.known import COMPILED, GENERATES, IN_DOUBLES, LENGTHS, QUANTIZED, ROTATED, SAVED, TOKENS, expected_of
from tests.families.parts import FAMILIES, Batch

NOISE = (12, 80)  # dB below the logits: with less something is broken, with more nothing is quantized
NOISE_IN_FOUR = 5  # dB, of models so small and so random
LONG = {  # to record and to analyse
    "deepseek_ocr2",
    "diffusion_gemma",
    "glm5_next",
    "granite4_vision",
    "minimax_m3_vl",
    "qwen4_exp",
    "step3p7",
    "t5gemma2",
}
SHARE = 0.7  # of the weights that linears multiply by; the rest are layers that no forward reaches


@torch.no_grad()
def logits(model: nn.Module, batch: Batch) -> Tensor:
    return model(**batch, use_cache=False).logits


class Family:
    """One model, built once for all of its tests, and what they are compared with."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.model, self.batch = FAMILIES[name]()
        self.expected = logits(self.model, self.batch)

    @functools.cached_property
    def quantized(self) -> Any:
        """The model in W8A8."""
        model = copy.deepcopy(self.model)
        mmqc.quantize_(model, recipes.mquant(weight_bits=8, solver="rtn"), [self.batch], progress=False)
        return model


@pytest.fixture(scope="module", params=[pytest.param(n, marks=[pytest.mark.slow] if n in LONG else []) for n in FAMILIES])
def family(request: pytest.FixtureRequest) -> Family:
    return Family(request.param)


def matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """Weights that linears and stacked experts multiply by."""
    owners = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D) or "Experts" in type(m).__name__}
    return {f"{n}.{p}": w for n, m in owners.items() for p, w in m.named_parameters(recurse=False) if w.dim() > 1}


def used(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Copies of those that the logits depend on: towers run layers behind the one whose output is taken, and poolers."""
    named = matrices(model)
    with Float64():
        slopes = torch.autograd.grad(model(**batch, use_cache=False).logits.sum(), list(named.values()), allow_unused=True)
    return {n: w.detach().clone() for (n, w), slope in zip(named.items(), slopes, strict=True) if slope is not None}


def is_mixed(before: Tensor, after: Tensor | None) -> bool:
    """Whether rows or columns are others than before, as a rotation makes them; gains and means that are folded keep both alike."""
    if after is None or after.shape != before.shape:
        return True
    flat = [w.detach().double().reshape(-1, before.shape[-1]) for w in (before, after)]
    return min(F.cosine_similarity(*flat, dim=dim).square().median().item() for dim in (0, 1)) < 0.5


def test_rotated__computes_the_same_and_names_what_stays(family: Family) -> None:
    with default_dtype(torch.float64 if family.name in IN_DOUBLES else torch.float32):
        exact, batch = to_float64(copy.deepcopy(family.model), family.batch)
        expected, before = output_of(exact, batch), used(exact, batch)
        with expected_of(family.name, ROTATED):
            report = mmqc.quantize_(exact, recipes.rotate(), [batch], progress=False)
            assert relative_error(output_of(exact, batch), expected) < EXACT
            now, named = exact.state_dict(), {refusal.fqn for refusal in report.refused}
            alone = {name for name, weight in before.items() if not is_mixed(weight, now.get(name))}
            assert all({name, name.rpartition(".")[0]} & named for name in alone)


def test_quantized__computes_nearly_the_same_in_integers(family: Family) -> None:
    with expected_of(family.name, QUANTIZED):
        noise = relative_error(logits(family.quantized, family.batch), family.expected)
        assert NOISE[0] < -20 * math.log10(noise) < NOISE[1]
        codes = [w.numel() for w in family.quantized.state_dict().values() if w.dtype == torch.int8]
        assert sum(codes) > SHARE * sum(w.numel() for w in matrices(family.model).values())


def test_saved__computes_the_same_when_loaded(family: Family, tmp_path: Path) -> None:
    with expected_of(family.name, SAVED):
        family.quantized.save_pretrained(tmp_path)
        loaded = type(family.quantized).from_pretrained(tmp_path).eval()
        assert torch.equal(logits(loaded, family.batch), logits(family.quantized, family.batch))


def test_generates__as_many_tokens_as_asked_for(family: Family) -> None:
    with expected_of(family.name, GENERATES), torch.no_grad():
        said = family.quantized.generate(**family.batch, max_new_tokens=TOKENS, do_sample=False)
        continued = [family.batch[name] for name in ("decoder_input_ids", "input_ids") if name in family.batch]
        prompt = continued[-1 if family.name in LENGTHS else 0]
        said = getattr(said, "sequences", said)
        assert said.shape == (len(prompt), prompt.shape[1] + LENGTHS.get(family.name, TOKENS))


@pytest.mark.slow
def test_quantized__in_four_bits(family: Family) -> None:
    with expected_of(family.name, QUANTIZED):
        model = copy.deepcopy(family.model)
        mmqc.quantize_(model, recipes.gptq(), [family.batch], progress=False)
        assert -20 * math.log10(relative_error(logits(model, family.batch), family.expected)) > NOISE_IN_FOUR


@pytest.mark.slow
def test_compiled__computes_the_same(family: Family) -> None:
    with expected_of(family.name, COMPILED):
        torch._dynamo.reset()
        fast = copy.deepcopy(family.quantized)
        fast.compile(backend="mmqc")
        eager = logits(family.quantized, family.batch)
        rounding = relative_error(eager, family.expected)
        assert relative_error(logits(fast, family.batch), eager) < rounding / 3  # a code here and there is its neighbour
