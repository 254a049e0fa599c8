import pytest
import torch
from float64 import recorded
from pass_cases import CASES, check_exact, check_golden, check_once, program
from torch import Tensor, nn

from mmqc.graph.kinds import kind
from mmqc.passes.raise_linear import RaiseLinear

WAYS = {
    "matmul": lambda x, w, b: x @ w.T,
    "bias": lambda x, w, b: x @ w.T + b,
    "bias_first": lambda x, w, b: b + x.matmul(w.t()),
    "transpose": lambda x, w, b: torch.matmul(x, w.transpose(0, 1)),
    "transpose_backwards": lambda x, w, b: torch.matmul(x, w.transpose(-1, -2)),
    "addmm": lambda x, w, b: torch.addmm(b, x[0], w),
    "cast": lambda x, w, b: x @ w.type(torch.float64).T,
}


class Product(nn.Module):
    """One way to multiply by a weight."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.bias = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        return WAYS[self.how](x, self.weight, self.bias)


@pytest.mark.parametrize("how", WAYS)
def test_raise_linear__spellings_of_one_linear(how: str) -> None:
    prog = recorded(Product(how), {"x": torch.randn(2, 3, 8)})
    check_exact(prog, RaiseLinear())
    linear = prog.nodes("linear")[0]
    assert len(prog.records[-1].sites) == 1
    assert ("bias" in how or how == "addmm") == (linear.args[2] is not None)
    assert not [n for n in prog.graph.nodes if kind(n) in ("matmul", "addmm", "add")]


class LookAlike(Product):
    """Products that are no linear of a stored weight, or whose sum is used elsewhere too."""

    def forward(self, x: Tensor) -> Tensor:
        ways = {
            "not_transposed": lambda: x @ self.weight,
            "computed": lambda: x @ (2 * self.weight).T,
            "scores": lambda: x @ x.transpose(-1, -2),
        }
        return ways[self.how]()


@pytest.mark.parametrize("how", ["not_transposed", "computed", "scores"])
def test_raise_linear__look_alikes_are_left_alone(how: str) -> None:
    prog = recorded(LookAlike(how), {"x": torch.randn(2, 3, 8)})
    check_exact(prog, RaiseLinear())
    assert prog.records[-1].sites == []


class Twice(Product):
    """The product itself is used beside its sum with the bias."""

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight.T
        return y.relu() + (y + self.bias)


def test_raise_linear__bias_stays_where_the_product_is_used_too() -> None:
    prog = recorded(Twice("twice"), {"x": torch.randn(2, 3, 8)})
    check_exact(prog, RaiseLinear())
    assert prog.nodes("linear")[0].args[2] is None
    assert prog.nodes("add")


@pytest.mark.parametrize("case", CASES)
def test_raise_linear__exact(case: str) -> None:
    check_exact(program(case, RaiseLinear()), RaiseLinear())


@pytest.mark.parametrize("case", CASES)
def test_raise_linear__once(case: str) -> None:
    check_once(program(case, RaiseLinear()), RaiseLinear())


def test_raise_linear__golden() -> None:
    check_golden(program("vlm", RaiseLinear()), RaiseLinear(), "vlm")
