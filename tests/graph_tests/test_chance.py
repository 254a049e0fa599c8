"""One graph for images that are as large as the batch and for those that are not, with the model's own comparisons in force."""

import functools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, fx
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.functions import FloorDiv
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRangeError, ValueRanges

from mmqc.graph.chance import FLATTEN, RESHAPE, chance_left_open
from mmqc.graph.tracing import varies, varying

LEFT_OPEN = functools.partial(chance_left_open, varies)
SIZES = [(4, 6), (6, 6), (4, 8), (6, 8), (5, 7)]
X = torch.randn(3, 6, 8)


def flattened(x: Tensor, size: list[int]) -> Tensor:
    return x[:, : size[0], : size[1]].flatten(1).T * 2


def reshaped(x: Tensor, size: list[int]) -> Tensor:
    return x[:, : size[0], : size[1]].reshape(x.shape[0], -1) * 2


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.fx.experimental._config.patch(use_duck_shape=False):  # type: ignore[attr-defined]
        yield
    torch._dynamo.reset()


def graphs_of(function: Callable[..., Any], sizes: list[tuple[int, int]], context: Callable[[], Any]) -> int:
    """How many graphs these calls take; each is right."""
    graphs: list[fx.GraphModule] = []

    def keep(graph: fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(function, backend=keep, fullgraph=True, dynamic=True)
    for size in sizes:
        with context():
            assert torch.equal(compiled(X, varying(list(size))), function(X, list(size)))
    return len(graphs)


@pytest.mark.parametrize("function", [flattened, reshaped])
def test_chance_left_open__one_graph_for_all_crops(function: Callable[..., Any]) -> None:
    assert graphs_of(function, SIZES, nullcontext) > 1
    torch._dynamo.reset()
    assert graphs_of(function, SIZES, LEFT_OPEN) == 1


def test_chance_left_open__what_the_model_asks_is_answered() -> None:
    def function(x: Tensor, size: list[int]) -> Tensor:
        return x[:, : size[0]] + 1 if size[1] == x.shape[2] else x[:, : size[0]] - 1

    assert graphs_of(function, SIZES, LEFT_OPEN) == 2


def test_chance_left_open__views_that_no_chance_decides_stay_views() -> None:
    def function(x: Tensor, size: list[int]) -> Tensor:
        y = x[:, : size[0]].clone()
        y.flatten(1).add_(1)
        y.reshape(3, -1, 2, 4)[..., 0].mul_(3)
        return y

    assert graphs_of(function, SIZES, LEFT_OPEN) == 1


def rows_equal_columns_times_rows() -> None:
    """Asks for a guard that holds for an image of one row and one column, and of whose sizes torch concludes nonsense."""
    env = ShapeEnv()
    h, w = (env.create_symbol(32, ConstantSource(name), DimDynamic.DYNAMIC) for name in "hw")
    for size in (h, w):
        env.evaluate_expr(sympy.Ge(size, 24))
    a, b = (FloorDiv(FloorDiv(size, 8) - 1, 4) for size in (h, w))
    assert env.evaluate_expr(sympy.Eq(a * b + a, 0))
    assert env.var_to_range[h] == ValueRanges(24, int_oo)
    assert str(env.guards[-1].expr) == str(sympy.Eq(a * b + a, 0))


def test_chance_left_open__a_conclusion_that_contradicts_is_none() -> None:
    with pytest.raises(ValueRangeError):
        rows_equal_columns_times_rows()
    with LEFT_OPEN():
        rows_equal_columns_times_rows()


def test_chance_left_open__leaves_nothing_behind() -> None:
    with chance_left_open(varies):
        pass
    assert not RESHAPE.py_kernels
    assert not FLATTEN.py_kernels
