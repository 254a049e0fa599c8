"""A function through mmqc's backend, whose results are those of its eager call."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tolerance import assert_close

from mmqc.backend import GraphRecord, backend, collect_records

Compiled = Callable[..., tuple[torch.Tensor, ...]]


def check_compiled(function: Compiled, *args: torch.Tensor, dynamic: bool | None = None) -> tuple[Compiled, GraphRecord]:
    """The compiled function, after one call whose results equal the eager ones, and its record."""
    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=True)
    with collect_records() as records, torch.no_grad():
        got = compiled(*args)
    for actual, expected in zip(got, function(*args), strict=True):
        assert actual.dtype == expected.dtype
        assert_close(actual, expected) if actual.is_floating_point() else torch.testing.assert_close(actual, expected)
    (record,) = records
    return compiled, record
