"""Numbers that are equal by chance: a trace does not go by it.

    w == W         an image is as wide as the batch that it is padded to, or as another image: in this call

Where:   numbers that vary: the sizes of images that are handed over.  torch compares them to find out whether rows lie behind
         each other or two sizes are one, and guards the answer: each pattern of images compiled anew.
Instead: where torch has an answer for numbers that only data says (``fallback_value``), it is that one: it is right whether they
         are equal or not.  Where a reshape would be a view if they were equal, it is a copy.
Not:     comparisons with a constant, or of the same numbers on both sides; what the model's own code compares.
Also:    what torch concludes of a size from a guard may be no size at all (a b + a = 0 of the a + 1 rows and b + 1 columns of an
         image with one row, where a and b are quotients): the guard stands, and nothing is concluded.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest import mock

import sympy
import torch
from torch import Tensor
from torch._C import DispatchKey
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.value_ranges import ValueRangeError

Varies = Callable[[Any], bool]
IMPLICIT = DispatchKey.CompositeImplicitAutograd
PLACE = list(inspect.signature(ShapeEnv.evaluate_expr).parameters).index("fallback_value") - 2  # behind the expression
RESHAPE, FLATTEN = torch.ops.aten.reshape.default, torch.ops.aten.flatten.using_ints


@contextmanager
def chance_left_open(varies: Varies) -> Iterator[None]:
    """Until the end of the block; ``varies`` tells of the source of a symbol whether it is a number that varies."""
    theirs, narrow = ShapeEnv.evaluate_expr, ShapeEnv._refine_ranges

    def evaluate(env: ShapeEnv, expr: Any, *args: Any, **kwargs: Any) -> Any:
        answer = kwargs.get("fallback_value", args[PLACE] if len(args) > PLACE else None)
        compared = answer is not None and isinstance(expr, sympy.Eq | sympy.Ne)
        if compared and by_chance(env, expr.args, varies) and env._maybe_evaluate_static(expr) is None:
            return sympy.sympify(answer)
        return theirs(env, expr, *args, **kwargs)

    def conclude(env: ShapeEnv, guard: Any) -> None:
        with suppress(ValueRangeError):
            narrow(env, guard)

    with (
        mock.patch.object(ShapeEnv, "evaluate_expr", evaluate),
        mock.patch.object(ShapeEnv, "_refine_ranges", conclude),
        _traced_as(RESHAPE, functools.partial(reshape, varies)),
        _traced_as(FLATTEN, functools.partial(flatten, varies)),
    ):
        yield


def by_chance(env: ShapeEnv, sides: Sequence[Any], varies: Varies) -> bool:
    """Whether two expressions, neither a constant, have not the same numbers that vary."""
    left, right = sides
    if not left.free_symbols or not right.free_symbols:
        return False
    return any(varies(source) for symbol in left.free_symbols ^ right.free_symbols for source in env.var_to_sources.get(symbol, ()))


@contextmanager
def _traced_as(op: Any, function: Callable[..., Any]) -> Iterator[None]:
    """Until the end of the block torch traces ``op`` so; the choice is kept with the op, per key."""
    with ExitStack() as stack:
        stack.callback(op._dispatch_cache.clear)
        stack.enter_context(mock.patch.dict(op.py_kernels, {IMPLICIT: function}))
        op._dispatch_cache.clear()
        yield


def reshape(varies: Varies, x: Tensor, shape: Sequence[Any]) -> Tensor:
    """``reshape``, a copy where it would be a view by chance."""
    same = range(min(x.dim(), len(shape)))
    first = next((d for d in same if not _is(x.shape[d], shape[d])), len(same))
    behind = next((d for d in same if not _is(x.shape[-1 - d], shape[-1 - d])), len(same))
    if joins_by_chance(x, range(first, x.dim() - behind), varies):
        x = x.clone(memory_format=torch.contiguous_format)
    return RESHAPE._op_dk(IMPLICIT, x, shape)


def flatten(varies: Varies, x: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    """``flatten``, likewise."""
    if x.dim() and joins_by_chance(x, range(start_dim % x.dim(), end_dim % x.dim() + 1), varies):
        x = x.clone(memory_format=torch.contiguous_format)
    return FLATTEN._op_dk(IMPLICIT, x, start_dim, end_dim)


def joins_by_chance(x: Tensor, dims: range, varies: Varies) -> bool:
    """Whether rows along one of the dimensions lie behind each other by chance."""
    pairs = ((x.stride(d), x.stride(d + 1) * x.shape[d + 1]) for d in dims[:-1])
    return any(
        isinstance(step, torch.SymInt)
        and isinstance(rows, torch.SymInt)
        and by_chance(step.node.shape_env, (step.node.expr, rows.node.expr), varies)
        for step, rows in pairs
    )


def _is(a: Any, b: Any) -> bool:
    """Whether two sizes are one, without asking for their values."""
    if isinstance(a, torch.SymInt) and isinstance(b, torch.SymInt):
        return a.node.expr == b.node.expr
    return type(a) is int and type(b) is int and a == b
