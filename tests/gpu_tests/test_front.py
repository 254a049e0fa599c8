"""What runs in front of a compiled call, on a GPU: what it writes to is put back, and ``fullgraph=True`` has it too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from float64 import relative_error
from models import Counting, tiny_qwen2_vl
from torch import Tensor, nn

import mmqc
from mmqc import recipes
from mmqc.backend import collect_records
from tests.families import grids

pytestmark = pytest.mark.gpu

FLIPS = 0.1  # of logits: rounded values on the edge between two codes, in models so small
SAME = 1e-3  # products in float32 by TF32


@torch.no_grad()
@pytest.mark.parametrize("fullgraph", [False, True])
def test_front__a_model_that_counts_its_calls_is_called_as_often_as_it_is_called(fullgraph: bool) -> None:
    torch._dynamo.reset()
    model, counter = Counting(64).eval().cuda(), torch.zeros(1, device="cuda")
    compiled = torch.compile(model, backend="mmqc", fullgraph=fullgraph)
    for calls, rows in enumerate((2, 2, 3, 17, 3), start=1):
        x = torch.randn(rows, 64, device="cuda")
        assert relative_error(compiled(x, [counter]), model.linear(x) * calls) < SAME
        assert (float(model.calls), float(counter)) == (calls, calls)


@torch.no_grad()
@pytest.mark.parametrize("build", [tiny_qwen2_vl, grids.qwen3_vl])
def test_front__one_graph_where_one_is_asked_for(build: Callable[[], tuple[nn.Module, dict[str, Any]]]) -> None:
    torch._dynamo.reset()
    model, batch = build()
    model.to("cuda")
    batch = {key: value.to("cuda") if isinstance(value, Tensor) else value for key, value in batch.items()}
    mmqc.quantize_(model, recipes.mquant(weight_bits=8, solver="rtn"), [batch], progress=False)
    eager = model(**batch, use_cache=False).logits
    with collect_records() as records:
        compiled = torch.compile(model, backend="mmqc", fullgraph=True)
        actual = [compiled(**batch, use_cache=False).logits for _ in range(3)]
    assert len(records) == 1
    assert max(relative_error(a, eager) for a in actual) < FLIPS
