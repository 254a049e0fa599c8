"""Fusion at run time: what is shared and fused computes the same, and what is not equal is not shared."""

from typing import Any

import pytest
import torch
from quantized_vlm import quantized_vlm
from small_vlm import logits
from torch import Tensor, nn
from torch.nn import functional as F

import mmqc.ops  # noqa: F401
from mmqc.compile_options import CompileOptions
from mmqc.compile_record import collect_records
from mmqc.modules import QuantLinear
from mmqc.run_time import run_time_passes, where_equal


def linear(
    width: int, scale: float = 0.05, *, static: bool = True, bias: bool = True, hadamard: bool = False
) -> QuantLinear:
    g = torch.Generator().manual_seed(width)
    codes = torch.randint(-128, 128, (width, 32), dtype=torch.int8, generator=g)
    return QuantLinear.from_parts(
        codes, torch.rand(width, generator=g), weight_bits=8, activation_bits=8 if static else None,
        bias=torch.randn(width, generator=g) if bias else None,
        input_scale=torch.tensor([scale]) if static else None, hadamard=hadamard,
    )  # fmt: skip


class Readers(nn.Module):
    """Several linears of one input, and one of another."""

    def __init__(self, *readers: nn.Module) -> None:
        super().__init__()
        self.readers = nn.ModuleList(readers)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (*(reader(x) for reader in self.readers), self.readers[0](x + 1))


class Gated(nn.Module):
    """What stands in front of a down_proj."""

    def __init__(self, down: nn.Module, act: Any = F.silu) -> None:
        super().__init__()
        self.down, self.act = down, act

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(x) * (x + 1))


def compile_and_compare(model: nn.Module, x: Tensor) -> tuple[dict[str, int], dict[str, list[str]]]:
    """The ops of the one graph, and what its passes refused; its result must be the model's to the bit."""
    with torch.no_grad(), collect_records() as records:
        expected = model(x)
        got = torch.compile(model, backend="mmqc", fullgraph=True)(x)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    (record,) = records
    return dict(record.ops), {p.name: [str(m) for m in p.misses] for p in record.passes}


def test_fusion__equal_scales_share_one_quantization_and_one_product(without_inductor: None) -> None:
    ops, _ = compile_and_compare(Readers(linear(8), linear(24), linear(40)), torch.randn(2, 5, 32))
    assert ops == {"quantize": 2, "scaled_matmuls": 1, "scaled_matmul": 1}


def test_fusion__weight_only(without_inductor: None) -> None:
    ops, _ = compile_and_compare(Readers(*(linear(n, static=False) for n in (8, 24))), torch.randn(2, 5, 32))
    assert ops == {"weight_only_matmuls": 1, "weight_only_matmul": 1}


def test_fusion__more_linears_than_a_kernel_takes(without_inductor: None) -> None:
    ops, _ = compile_and_compare(Readers(*(linear(n) for n in (8, 16, 24, 32, 40))), torch.randn(3, 32))
    assert ops == {"quantize": 2, "scaled_matmuls": 2, "scaled_matmul": 1}


def test_fusion__other_scale_or_no_bias_stays_apart(without_inductor: None) -> None:
    model = Readers(linear(8), linear(16, 0.06), linear(24, bias=False))
    ops, misses = compile_and_compare(model, torch.randn(3, 32))
    assert ops == {"quantize": 3, "scaled_matmul": 4}
    assert any("its scale differs" in miss for miss in misses["share_quantize"])


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


@pytest.mark.parametrize("act", [F.silu, F.gelu])
def test_fusion__hadamard(act: Any, without_inductor: None) -> None:
    ops, _ = compile_and_compare(Gated(linear(8, hadamard=True), act), torch.randn(2, 3, 32))
    assert ops == {"hadamard_quantize": 1, "scaled_matmul": 1}


def test_fusion__hadamard_that_something_else_reads(without_inductor: None) -> None:
    down = linear(8, hadamard=True)
    down.outlier_index, down.outlier_weight = torch.tensor([3, 9]), torch.randn(8, 2)
    ops, misses = compile_and_compare(Gated(down), torch.randn(2, 3, 32))
    assert ops == {"hadamard": 1, "quantize": 1, "scaled_matmul": 1}
    assert "2 operations read" in misses["fuse_hadamard_quantize"][0]


def test_fusion__gradients_keep_the_single_ops(without_inductor: None) -> None:
    model, x = Readers(linear(8, static=False), linear(16, static=False)), torch.randn(3, 32, requires_grad=True)
    with collect_records() as records:
        got = torch.compile(model, backend="mmqc", fullgraph=True)(x)
    assert records[0].ops == {"weight_only_matmul": 3}
    torch.testing.assert_close(got, model(x), rtol=0, atol=0)


def test_fusion__through_inductor_equals_eager() -> None:
    model, batch = quantized_vlm(4)
    with torch.no_grad(), collect_records() as records:
        expected = logits(model, batch)
        got = logits(torch.compile(model, backend="mmqc"), batch)
    assert records[-1].ops["scaled_matmuls"] == 4
    assert ((got - expected).norm() / expected.norm()).item() < 1e-5


@pytest.mark.parametrize("act", [F.silu, F.gelu])
def test_fusion__hadamard_through_inductor(act: Any) -> None:
    model, x = Gated(linear(8, hadamard=True), act), torch.randn(2, 3, 32)
    with torch.no_grad():
        difference = torch.compile(model, backend="mmqc", fullgraph=True)(x) - model(x)
    assert difference.abs().max() <= 127 * 0.05 + 1e-3, "a code or two may fall on the other side"
    assert (difference.abs() > 1e-3).float().mean() < 0.2


def test_fusion__static_inputs_stay_static(monkeypatch: pytest.MonkeyPatch) -> None:
    from mmqc.lowering import inductor

    seen, inner = [], inductor.compile_fx_inner

    def spy(gm: torch.fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        seen.append((len(inputs), len(kwargs.get("static_input_idxs") or ())))
        return inner(gm, inputs, **kwargs)

    monkeypatch.setattr(inductor, "compile_fx_inner", spy)
    model, x = Readers(linear(8), linear(24)), torch.randn(3, 32)
    with torch.no_grad():
        torch.compile(model, backend="mmqc")(x)
    ((inputs, static),) = seen
    assert static == inputs - 1, "all but x: CUDA graphs would copy them before every replay"


def test_where_equal__compares_once_and_compiles_the_plain_form_when_needed() -> None:
    made: list[str] = []

    def plain() -> Any:
        made.append("plain")
        return lambda *args: "plain"

    call = where_equal(lambda *args: "fast", [(0, 1)], plain)
    a, b = torch.ones(2), torch.ones(2)
    assert [call(a, b, 1), call(a, b, 2), call(a, torch.zeros(2), 3), call(a, torch.zeros(2), 4)] == [
        "fast", "fast", "plain", "plain",
    ]  # fmt: skip
    b.add_(1)
    assert call(a, b, 5) == "plain"
    assert made == ["plain"]


def test_run_time_passes__graph_without_our_ops_is_returned_as_it_is() -> None:
    gm = torch.fx.symbolic_trace(nn.Linear(4, 4))
    assert run_time_passes(gm, [], CompileOptions()).gm is gm
