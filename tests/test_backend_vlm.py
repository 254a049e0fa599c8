"""A whole quantized Qwen2-VL through the backend: images, decode steps, beams; compiled once for all tests of this file."""

import copy
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from models import tiny_qwen2_vl
from quantized_vlm import quantized_vlm
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import mmqc
from mmqc.backend import GraphRecord, backend, collect_records
from mmqc.nn.linear import QuantLinear
from mmqc.nn.modality import attached
from mmqc.ops.integer_matmul import cpu_int_mm_is_a_loop, why_not_int_mm

FLOAT_PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::linear", "mkl::_mkl_linear", "mkldnn::_linear_pointwise"}


class Case(NamedTuple):
    model: nn.Module
    compiled: nn.Module
    inputs: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def case() -> Iterator[Case]:
    torch._dynamo.reset()
    threads = torch.get_num_threads()
    # Hundreds of tiny parallel regions: on a busy machine their barriers cost more than the work.
    torch.set_num_threads(1)
    model, inputs = quantized_vlm(depth=1)
    compiled = copy.deepcopy(model)
    compiled.compile(backend=backend)
    yield Case(model, compiled, inputs)
    torch.set_num_threads(threads)
    torch._dynamo.reset()


def compiled_graphs(records: list[GraphRecord]) -> list[GraphRecord]:
    return [r for r in records if r.how != "eager"]


def test_backend__vlm_compiled_equals_eager_and_runs_integers(case: Case) -> None:
    shapes = {(m.out_features, m.in_features) for m in case.model.modules() if isinstance(m, QuantLinear)}
    with torch.no_grad(), collect_records() as records:
        case.compiled(**case.inputs)
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as run:
            logits = case.compiled(**case.inputs).logits
        expected = case.model(**case.inputs).logits
    assert ((logits - expected).norm() / expected.norm()).item() < 1e-3
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    assert sum(r.ops["scaled_matmul"] for r in records) > 0
    if cpu_int_mm_is_a_loop():  # slower than float64, which is as exact
        assert {why for r in records for _, why in r.fallbacks} == {why_not_int_mm("cpu", True, 8, 8)}
        return
    assert sum("_int_mm" in e.name for e in run.events()) >= sum(isinstance(m, QuantLinear) for m in case.model.modules())
    operands = [tuple(s) for e in run.events() if e.name in FLOAT_PRODUCTS for s in e.input_shapes if s and len(s) == 2]
    assert not [s for s in operands if s in shapes or s[::-1] in shapes]


BEAMS = {"max_new_tokens": 3, "num_beams": 2}


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"max_new_tokens": 6}, BEAMS], ids=["greedy", "beams"])
def test_backend__vlm_generates_the_same_tokens(case: Case, how: dict[str, int]) -> None:
    expected = case.model.generate(**case.inputs, do_sample=False, **how)
    assert torch.equal(case.compiled.generate(**case.inputs, do_sample=False, **how), expected)
    with collect_records() as records:
        assert torch.equal(case.compiled.generate(**case.inputs, do_sample=False, **how), expected)
    assert compiled_graphs(records) == [], "the second call compiles nothing"


@pytest.mark.slow
def test_backend__vlm_decode_logits_equal_eager(case: Case) -> None:
    how = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    expected, got = (m.generate(**case.inputs, **how).logits for m in (case.model, case.compiled))
    for step, (actual, wanted) in enumerate(zip(got, expected, strict=True)):
        assert ((actual - wanted).norm() / wanted.norm()).item() < 1e-3, f"step {step}"


@pytest.mark.slow
def test_backend__vlm_breaks_no_more_than_the_float_model(case: Case) -> None:
    def breaks(model: nn.Module) -> tuple[int, set[str]]:
        with torch.no_grad():
            explanation = torch._dynamo.explain(model.forward)(**case.inputs)
        return explanation.graph_count, {reason.user_stack[-1].name for reason in explanation.break_reasons}

    model = copy.deepcopy(case.model)
    # ``forward`` alone does not run the hook that finds the mask.
    context = attached(model)
    context.begin(model, (), case.inputs)
    assert breaks(model) == breaks(tiny_qwen2_vl(depth=1)[0])


def test_explain__says_that_nothing_was_compiled() -> None:
    class Skipped(nn.Module):
        @torch.compiler.disable
        def forward(self, x: Tensor) -> Tensor:
            return x + 1

    found = mmqc.explain(Skipped(), {"x": torch.ones(2)})
    assert not found.graphs
    assert "nothing was compiled" in str(found)
