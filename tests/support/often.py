"""Which cases of a test ``make test`` runs: one of each kind; the others are left to ``make test-slow``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def often(cases: Iterable[Any], *wanted: Any) -> list[Any]:
    """All cases as parameters, those that are not wanted marked as slow; a tuple is one of several parameters."""
    cases = list(cases)
    assert all(case in cases for case in wanted), f"{wanted} are not all among {cases}"
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*v, marks=[] if c in wanted else pytest.mark.slow) for c, v in zip(cases, values, strict=True)]
