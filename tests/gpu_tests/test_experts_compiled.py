"""Mixtures of experts with activation scales, compiled on a GPU: what their eager kernels give, but for codes on an edge."""

from __future__ import annotations

import pytest
from float64 import relative_error
from mixtures import FORMS, logits, mixture, quantized, tokens

from mmqc import recipes

FLIPS = 0.05  # a rounded value on the edge between two codes, of 8 bits


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_experts__compiled_as_eager(form: str) -> None:
    model, _ = quantized(mixture(form).float(), recipes.mquant(weight_bits=8, solver="rtn"))
    model.to("cuda")
    batches = [{"input_ids": tokens(rows, length, seed)["input_ids"].cuda()} for seed, (rows, length) in
               enumerate([(4, 25), (1, 7), (3, 40), (4, 26)])]  # fmt: skip
    expected = [logits(model, batch) for batch in batches]
    model.compile(backend="mmqc")
    errors = [relative_error(logits(model, batch), e) for batch, e in zip(batches, expected, strict=True)]
    assert sorted(errors)[1] < 1e-4, errors
    assert max(errors) < FLIPS, errors
