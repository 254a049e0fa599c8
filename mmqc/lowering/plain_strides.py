"""How far apart a loop's values lie in memory, found by arithmetic where the index is a polynomial.

    stride of 768 i + j in j  =  (768 i + j + 1) - (768 i + j), expanded  =  1

Inductor's C++ backend asks this of every index, loop and kernel, and has ``sympy.simplify`` answer: a search among many forms, 447
times and 1.1 of 17 s for the demo's model.
Exact:    the expansion of a polynomial is unique, so a difference that does not depend on anything becomes a number.
Else:     what is divided, or depends on something still, is left to Inductor's functions.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import sympy
from torch._inductor.codegen.cpp import stride_at_vec_range
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

# where it looks up the functions that it calls: another module from one version of torch to the next
_names: dict[str, Any] = stride_at_vec_range.__wrapped__.__globals__
_simplify, _stride = _names["simplify_index_in_vec_range"], _names["stride_at"]


@contextmanager
def plain_strides() -> Iterator[None]:
    """Code that Inductor generates for the CPU meanwhile finds strides so."""
    with mock.patch.dict(_names, simplify_index_in_vec_range=_in_vec_range, stride_at=stride_at):
        yield


@functools.lru_cache(maxsize=4096)
def stride_at(index: sympy.Expr, var: sympy.Symbol) -> sympy.Expr:
    """By how much ``index`` grows with ``var``: in the place of Inductor's function."""
    if is_polynomial(index):
        step = sympy.expand(index.xreplace({var: var + 1}) - index)
        if step.is_number:
            return step
    return _stride(index, var)


def _in_vec_range(index: sympy.Expr, var: sympy.Symbol, vec_length: int) -> sympy.Expr:
    """Without divisions there are none to be found even within a vector."""
    return index if is_polynomial(index) else _simplify(index, var, vec_length)


def is_polynomial(index: sympy.Expr) -> bool:
    """Whether an index is made of sums, products and whole powers alone."""
    return not index.has(FloorDiv, ModularIndexing) and bool(index.is_polynomial())
