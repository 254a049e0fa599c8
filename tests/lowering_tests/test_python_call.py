"""Calls of Python functions in generated code, in a graph for any number of rows."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from sympy import Max, Min
from torch import Tensor
from torch._inductor.utils import fresh_inductor_cache

from mmqc.lowering import inductor
from mmqc.lowering.kernel_names import kernel_names
from mmqc.lowering.python_call import call, has_python, result
from tests.support.tolerance import assert_close

calls: list[tuple[Any, ...]] = []


def fill(name: str, x: Tensor, others: tuple[Tensor | None, ...], y: Tensor) -> None:
    """Y = 2 x, or what else its name says."""
    calls.append((name, len(x), [other is None for other in others]))
    y.copy_(2 * x + sum(other for other in others if other is not None))


def times(x: Tensor, other: Tensor, name: str, size: int, nothing: None) -> Tensor:
    """X other size, its axes in memory the other way round."""
    calls.append((name, size, nothing))
    return (x * other * size).t().contiguous().t()


@torch.library.custom_op("mmqc_tests::twice_and", mutates_args=())
def twice_and(x: Tensor, other: Tensor) -> Tensor:
    return 2 * x + other


@twice_and.register_fake
def _(x: Tensor, other: Tensor) -> Tensor:
    return torch.empty_like(x)


@pytest.fixture
def lowered() -> Any:
    """The op as two calls: one for every number of rows, and one for more than three, which adds the other operand."""
    op = torch.ops.mmqc_tests.twice_and.default

    @inductor.register_lowering(op, type_promotion_kind=None)
    def lower(x: Any, other: Any) -> Any:
        assert has_python()
        rows = x.get_size()[0]
        y = inductor.empty(x.get_size(), x.get_dtype(), x.get_device_or_error())
        call(fill, ("all", x, [None], y), [y], once="mmqc_test_python_call.calls.append(('loaded',))")
        call(fill, ("many", x, [other, None], y), [y], Min(1, Max(0, rows - 3)))
        return y

    yield op
    del inductor.lowerings[op]


@pytest.mark.slow
def test_call__runs_where_it_is_meant_to_between_other_kernels(lowered: Any) -> None:
    def f(x: Tensor, other: Tensor) -> Tensor:
        return twice_and(x + 1, other * 3) * 5

    compiled = torch.compile(f, dynamic=True, fullgraph=True)
    for i, rows in enumerate((8, 3, 4)):
        x, other = torch.randn(rows, 6), torch.randn(rows, 6)
        calls.clear()
        with fresh_inductor_cache() if i == 0 else nullcontext():
            y = compiled(x, other)
        assert_close(y, (2 * (x + 1) + (3 * other if rows > 3 else 0)) * 5)
        loaded = [("loaded",)] if i == 0 else []
        assert calls == [*loaded, ("all", rows, [True]), *([("many", rows, [False, True])] if rows > 3 else [])]


@pytest.mark.slow
def test_result__is_what_the_function_made_as_it_lies_in_memory() -> None:
    op = torch.ops.mmqc_tests.twice_and.default

    @inductor.register_lowering(op, type_promotion_kind=None)
    def lower(x: Any, other: Any) -> Any:
        rows, width = x.get_size()
        like = inductor.FixedLayout(x.get_device_or_error(), x.get_dtype(), [rows, width], [1, rows])
        return result(times, [x, other], ["it", rows + 1, None], like)

    def f(x: Tensor, other: Tensor) -> Tensor:
        return twice_and(x + 1, other * 3) * 5

    try:
        compiled = torch.compile(f, dynamic=True, fullgraph=True)
        for i, rows in enumerate((8, 3)):
            x, other = torch.randn(rows, 6), torch.randn(rows, 6)
            calls.clear()
            with fresh_inductor_cache() if i == 0 else nullcontext():
                assert_close(compiled(x, other), (x + 1) * (3 * other) * (rows + 1) * 5)
            assert calls == [("it", rows + 1, None)]
    finally:
        del inductor.lowerings[op]


def test_kernel_names__a_call_by_rows_is_a_kernel_of_ours() -> None:
    assert kernel_names("    if rows:\n        mmqc_by_rows.scaled('int8', buf0)\n") == ["mmqc by_rows.scaled"]
    assert kernel_names("    buf3 = mmqc_variable_length.reference(buf0, 0.125)\n") == ["mmqc variable_length.reference"]
