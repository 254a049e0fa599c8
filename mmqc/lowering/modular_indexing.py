"""(a // b) % c whose base may have negative terms hidden in a division keeps all its terms.

    (x + 4 + (-k) // 2) % 4      torch      (x + (-k) // 2) % 4      4 % 4 is 0
                                 here       as it is

Why:     generated code divides as C does, towards zero: of what is left the remainder is negative, and memory in front of the
         tensor is read.  torch leaves terms alone beside one that has a minus sign itself, not beside a division of one.
Where:   whatever is cropped by half of a difference of sizes that are symbols, as LLaVA-NeXT's and Granite's images are.
For:     all of the process, from the import on: sympy keeps what was once simplified.
"""

from __future__ import annotations

from typing import Any

import sympy
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

_theirs: Any = ModularIndexing.eval.__func__  # type: ignore[attr-defined]


def may_hide_a_sign(term: sympy.Expr) -> bool:
    """Whether a division in it has a numerator that may be negative."""
    return any(division.is_nonnegative is not True and _negative(division.args[0]) for division in term.atoms(FloorDiv))


def _negative(numerator: Any) -> bool:
    terms = numerator.args if isinstance(numerator, sympy.Add) else (numerator,)
    return any(term.could_extract_minus_sign() or may_hide_a_sign(term) for term in terms)


def _eval(cls: Any, base: Any, divisor: Any, modulus: Any) -> Any:
    if isinstance(base, sympy.Add) and any(map(may_hide_a_sign, base.args)):
        return None
    return _theirs(cls, base, divisor, modulus)


def mend() -> None:
    """Once; nothing where torch keeps the terms itself."""
    x, k = sympy.Symbol("x", integer=True, nonnegative=True), sympy.Symbol("k", integer=True, positive=True)
    base = x + 4 + FloorDiv(-k, 2)
    if ModularIndexing.eval.__func__ is _theirs and _theirs(ModularIndexing, base, sympy.Integer(1), sympy.Integer(4)) is not None:  # type: ignore[attr-defined]
        ModularIndexing.eval = classmethod(_eval)  # type: ignore[method-assign,assignment]
