"""What run-time passes take for granted, and what else they must not lose."""

from typing import Any

import pytest
import torch
from fusion_cases import Readers, linear
from quantized_vlm import quantized_vlm
from small_vlm import logits
from torch import nn

from mmqc.compiler import run_time
from mmqc.compiler.options import CompileOptions
from mmqc.compiler.record import collect_records
from mmqc.compiler.run_time import rewrite_at_run_time, where_equal


def test_fusion__a_scale_that_changes_later_is_seen(without_inductor: None) -> None:
    model, x = Readers(linear(8), linear(16)), torch.randn(3, 32)
    compiled = torch.compile(model, backend="mmqc", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=0)
        model.readers[1].input_scale.mul_(1.5)
        torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=0)
        model.readers[1].input_scale = torch.tensor([0.05])
        torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=0)
        model.readers[0].input_scale = torch.tensor([0.07])
        torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=0)


def test_fusion__static_inputs_stay_static(monkeypatch: pytest.MonkeyPatch) -> None:
    from mmqc.lowering import inductor

    seen, inner = [], inductor.compile_fx_inner

    def spy(gm: torch.fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        seen.append((len(inputs), len(kwargs.get("static_input_idxs") or ())))
        return inner(gm, inputs, **kwargs)

    monkeypatch.setattr(inductor, "compile_fx_inner", spy)
    model, x = Readers(linear(8), linear(24)), torch.randn(3, 32)
    with torch.no_grad(), collect_records():  # while somebody watches, AOTAutograd's cache is off
        torch.compile(model, backend="mmqc")(x)
    ((inputs, static),) = seen
    assert static == inputs - 1, "all but x: CUDA graphs would copy them before every replay"


@pytest.mark.slow
def test_fusion__through_inductor_equals_eager() -> None:
    model, batch = quantized_vlm(4, depth=1)
    with torch.no_grad(), collect_records() as records:
        expected = logits(model, batch)
        got = logits(torch.compile(model, backend="mmqc"), batch)
    assert records[-1].ops["scaled_matmuls"] == 2, "q, k and v of two layers"
    assert records[-1].ops["scaled_matmul_epilogue"] == 4, "the tower's MLP, the merger's, two gated ones"
    assert ((got - expected).norm() / expected.norm()).item() < 1e-5


def test_where_equal__compares_once_and_says_so_where_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(run_time.logger, "warning", said.append)
    call = where_equal(lambda *args: "fused", [(0, 1)], lambda *args: "plain")
    a, b, other = torch.ones(2), torch.ones(2), torch.zeros(2)
    assert [call(a, b, 1), call(a, b, 2), call(a, other, 3), call(a, other, 4)] == ["fused", "fused", "plain", "plain"]
    assert said == [run_time.UNEQUAL]
    b.add_(1)
    assert call(a, b, 5) == "plain"
    b.data.sub_(1)
    assert call(a, b, 6) == "fused", "a write through .data leaves no version"
    b.data = torch.zeros(2)
    assert call(a, b, 7) == "plain"


def test_rewrite_at_run_time__graph_without_our_ops_is_returned_as_it_is() -> None:
    gm = torch.fx.symbolic_trace(nn.Linear(4, 4))
    assert rewrite_at_run_time(gm, [], CompileOptions()).gm is gm


def test_fill_values__what_is_written_to_is_not_computed_again() -> None:
    """Between bounds that only data says it would be of a new size each time, which belongs to no node."""
    graphs: list[tuple[torch.fx.GraphModule, Any]] = []

    def keep(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        run_time._fill_values(gm.graph, inputs)
        graphs.append((gm, inputs))
        return gm.forward

    def write(x: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
        y = x * 1
        y[bounds[0] : bounds[1]] = 0
        return y

    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        torch.compile(write, backend=keep, fullgraph=True)(torch.ones(9), torch.tensor([2, 5]))
    modes = {value.fake_mode for n in graphs[0][0].graph.nodes if hasattr(value := n.meta.get("example_value"), "fake_mode")}
    assert [mode.shape_env.pending_fresh_unbacked_symbols for mode in modes] == [[]]
