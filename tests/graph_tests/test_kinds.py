import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mmqc.ops  # noqa: F401
from mmqc.graph.kinds import kind, mutates
from mmqc.graph.record import record

X, Y = "x", "y"
SPELLINGS: dict[str, list[Callable[[Tensor, Tensor], Any]]] = {
    "add": [operator.add, torch.add, Tensor.add, lambda x, y: 1 + x, lambda x, y: x.clone().add_(y), operator.iadd],
    "sub": [operator.sub, torch.sub, torch.subtract, lambda x, y: x.sub(y), lambda x, y: x.clone().sub_(y)],
    "mul": [operator.mul, torch.mul, torch.multiply, lambda x, y: 2 * x, lambda x, y: x.clone().mul_(y)],
    "div": [operator.truediv, torch.div, torch.true_divide, torch.divide, lambda x, y: x.clone().div_(2)],
    "matmul": [operator.matmul, torch.matmul, torch.mm, lambda x, y: torch.bmm(x[None], y[None])],
    "cat": [lambda x, y: torch.cat((x, y)), lambda x, y: torch.concat((x, y)), lambda x, y: torch.concatenate((x, y))],
    "transpose": [lambda x, y: x.transpose(0, 1), lambda x, y: torch.swapaxes(x, 0, 1), lambda x, y: x.swapdims(0, 1)],
    "view": [lambda x, y: x.view(-1), lambda x, y: x.view_as(y)],
    "pow": [lambda x, y: x**2, lambda x, y: x.pow(2), lambda x, y: torch.pow(x, 2)],
    "rsqrt": [lambda x, y: torch.rsqrt(x), lambda x, y: x.rsqrt()],
    "getattr:T": [lambda x, y: x.T],
    "getitem": [lambda x, y: x[0], lambda x, y: x[:, 1:]],
    "linear": [lambda x, y: F.linear(x, y)],
    "conv": [lambda x, y: F.conv1d(x[None], y[:, :, None])],
    "neg": [lambda x, y: -x, lambda x, y: torch.negative(x), lambda x, y: x.neg()],
    "softmax": [lambda x, y: x.softmax(-1), lambda x, y: torch.softmax(x, -1), lambda x, y: F.softmax(x, -1)],
    "quantize": [lambda x, y: torch.ops.mmqc.quantize(x, torch.ones(1), None, 8)],
}
CASES = [(word, i) for word, ways in SPELLINGS.items() for i in range(len(ways))]


class Call(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.function(x, y)


@pytest.mark.parametrize(("word", "i"), CASES)
def test_kinds__one_word_for_every_spelling(word: str, i: int) -> None:
    way = SPELLINGS[word][i]
    xs = {"x": torch.rand(4, 4) + 1, "y": torch.rand(4, 4) + 1}
    prog = record(Call(lambda x, y: way(x, y) if isinstance(x, Tensor) else None), xs)
    output = next(n for n in prog.graph.nodes if n.op == "output")
    assert kind(output.args[0][0]) == word


@pytest.mark.parametrize(
    ("way", "is_written"),
    [
        (lambda x: x.add_(1), True),
        (lambda x: x.relu_(), True),
        (lambda x: x.__setitem__(0, 1.0), True),
        (lambda x: operator.iadd(x, 1), True),
        (lambda x: F.relu(x, inplace=True), True),
        (lambda x: x.masked_fill_(x > 0, 0), True),
        (lambda x: x.copy_(x * 2), True),
        (lambda x: x.add(1), False),
        (lambda x: F.relu(x), False),
        (lambda x: x.__add__(1), False),
        (lambda x: x.__getitem__(0), False),
    ],
)
def test_kinds__in_place(way: Callable[[Tensor], Any], is_written: bool) -> None:
    def forward(x: Tensor, y: Tensor) -> Tensor:
        x = x.clone()
        way(x)
        return x

    prog = record(Call(forward), {"x": torch.randn(3, 3), "y": torch.randn(1)})
    assert any(mutates(n) for n in prog.graph.nodes) == is_written


def test_kinds__placeholders_and_outputs_are_their_own() -> None:
    prog = record(nn.Linear(2, 2), {"input": torch.randn(1, 2)})
    assert [kind(n) for n in prog.graph.nodes] == ["get_attr", "get_attr", "placeholder", "linear", "output"]
