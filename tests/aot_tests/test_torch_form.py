"""A graph in another form of words: the same function, in words that passes know."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram, export
from torch.nn import functional as F

from mmqc.aot.torch_form import torch_form
from mmqc.graph.kinds import kind, mutates
from mmqc.graph.sizes import sizes

X = torch.randn(3, 6, 8)


class Of(nn.Module):
    """A function as a module with a weight, a table and a kernel."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.linear, self.norm, self.conv = nn.Linear(8, 4), nn.LayerNorm(8), nn.Conv2d(3, 5, 2)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def exported(function: Callable[..., Any]) -> ExportedProgram:
    return export(Of(function), (X.clone(),), dynamic_shapes={"x": {1: Dim.DYNAMIC}})


def results(program: ExportedProgram, graph: fx.Graph, x: Tensor) -> tuple[Any, Tensor]:
    """The outputs, and the input as it is left behind."""
    weights, x = {**program.state_dict, **program.constants}, x.clone()
    given = [weights.get(str(spec.target), x) for spec in program.graph_signature.input_specs]
    with torch.no_grad():
        return fx.GraphModule(program.graph_module, graph)(*given), x


def same(function: Callable[..., Any]) -> list[fx.Node]:
    """The calls of the new form, which computes what the old one does, to the bit, for another size too."""
    program = exported(function)
    new = torch_form(program.graph)
    for x in (X, torch.randn(3, 9, 8)):
        (one, left), (other, behind) = results(program, program.graph, x), results(program, new, x)
        assert torch.equal(left, behind)
        for a, b in zip(one, other, strict=True):
            assert torch.equal(a, b)
    return [n for n in new.nodes if n.op in ("call_function", "call_method")]


CASES: dict[str, Callable[[Of, Tensor], Any]] = {
    "getitem": lambda m, x: x[0],
    "mean": lambda m, x: x.mean(-1, keepdim=True),
    "sum": lambda m, x: x.sum((0, 2)),
    "pow": lambda m, x: x.pow(2),
    "rsqrt": lambda m, x: x.abs().rsqrt(),
    "to": lambda m, x: x.to(torch.float64),
    "linear": lambda m, x: m.linear(x),
    "layer_norm": lambda m, x: m.norm(x),
    "conv": lambda m, x: m.conv(x[None]),
    "silu": lambda m, x: F.silu(x),
    "gelu": lambda m, x: F.gelu(x, approximate="tanh"),
    "cat": lambda m, x: torch.cat([x, x.neg()], -1),
    "expand": lambda m, x: x.unsqueeze(1).expand(3, 2, -1, 8).reshape(6, -1, 8),
    "masked_scatter": lambda m, x: x.masked_scatter(x > 0, x.neg()),
    "scaled_dot_product_attention": lambda m, x: F.scaled_dot_product_attention(x, x, x, x @ x.mT > 0, scale=0.3),
    "split": lambda m, x: x.split([3, 5], -1),
    "chunk": lambda m, x: x.chunk(2, -1),
    "unbind": lambda m, x: x.unbind(-1),
    "stack": lambda m, x: torch.stack([x, x.neg()]),
    "rms_norm": lambda m, x: F.rms_norm(x, (8,), eps=1e-6),
    "add": lambda m, x: x[:, 1:].add(1.0),
}


@pytest.mark.parametrize("word", CASES)
def test_torch_form__the_word_for(word: str) -> None:
    nodes = same(CASES[word])
    (node,) = (n for n in nodes if kind(n) == word)
    assert not isinstance(node.target, torch._ops.OpOverload)
    assert sizes(node) is not None


def test_torch_form__names_what_models_name() -> None:
    (node,) = (n for n in same(CASES["scaled_dot_product_attention"]) if kind(n) == "scaled_dot_product_attention")
    assert len(node.args) == 3
    assert isinstance(node.kwargs["attn_mask"], fx.Node)
    assert node.kwargs["scale"] == 0.3


def test_torch_form__writes_into_inputs_and_says_so() -> None:
    def write(m: Of, x: Tensor) -> Tensor:
        x[:, 2:4].copy_(x[:, :2] + 1)
        x.mul_(2)
        x[:, torch.tensor([0, 2])] = 3.0
        return x + 1

    words = [str(n.target) for n in same(write) if mutates(n) and "detach" not in str(n.target)]
    assert words == ["aten.copy_.default", "aten.mul_.Tensor", "aten.index_put_.default"]


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: 2**x,
        lambda m, x: x.to(x.dtype, copy=True).mul_(2) + x,
        lambda m, x: x.to("cpu", torch.float64),
        lambda m, x: x[:, :, torch.tensor([0, 3, 3])],
        lambda m, x: x.repeat_interleave(2, 0),
        lambda m, x: torch.arange(3).repeat_interleave(torch.tensor([1, 0, 4])) + x[0, 0, 0],
        lambda m, x: torch.repeat_interleave(torch.tensor([1, 0, 4])) + x[0, 0, 0],
        lambda m, x: x.add(x, alpha=2).div(3, rounding_mode="floor"),
        lambda m, x: m.conv(x[None]).new_zeros(2, x.shape[1]),
    ],
)
def test_torch_form__arguments_that_few_models_give(function: Callable[..., Any]) -> None:
    assert same(function)


def test_torch_form__has_no_slices_of_everything_and_no_checks() -> None:
    nodes = same(lambda m, x: x[:, :, None, :].to(torch.float32) + x[:, 0:, None])
    assert {kind(n) for n in nodes} == {"unsqueeze", "to", "add"}


INDEX = st.one_of(
    st.integers(-3, 2), st.builds(slice, st.sampled_from([None, 0, 1, -2]), st.sampled_from([None, 2, -1]), st.just(None))
)


@settings(max_examples=20, deadline=None)
@given(st.tuples(st.one_of(st.integers(0, 2), st.just(slice(None))), st.just(slice(None)), INDEX))
def test_torch_form__indices(index: tuple[Any, ...]) -> None:
    assert {n.target for n in same(lambda m, x: x[index] + 1) if kind(n) != "add"} <= {operator.getitem}
