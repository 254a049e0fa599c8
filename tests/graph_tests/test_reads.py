"""Which operands decide how large a result is."""

from typing import Any

import pytest
import torch

from mmqc.graph.reads import cut_by_values, sizing

X, MASK, COUNTS = torch.randn(4), torch.tensor([True, False, True, True]), torch.tensor([1, 0, 2, 1])


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "expected"),
    [
        ("nonzero", (MASK,), {}, [MASK]),
        ("where", (MASK,), {}, [MASK]),
        ("where", (MASK, X, X), {}, []),
        ("unique", (X,), {"sorted": True}, [X]),
        ("masked_select", (X, MASK), {}, [MASK]),
        ("masked_select", (X,), {"mask": MASK}, [MASK]),
        ("__getitem__", (X, MASK), {}, [MASK]),
        ("__getitem__", (X, (slice(None), MASK)), {}, [MASK]),
        ("__getitem__", (X, COUNTS), {}, []),
        ("repeat_interleave", (X, COUNTS), {}, [COUNTS]),
        ("repeat_interleave", (X, COUNTS), {"output_size": 4}, []),
        ("repeat_interleave", (X, 2), {}, []),
        ("arange", (COUNTS[0],), {}, [COUNTS[0]]),
        ("add", (X, X), {}, []),
    ],
)
def test_sizing__names_the_operands(name: str, args: tuple, kwargs: dict, expected: list) -> None:
    found = sizing(name, args, kwargs)
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("name", "key", "expected"),
    [
        ("__getitem__", slice(None, COUNTS[0]), True),
        ("__setitem__", (0, slice(COUNTS[0], None)), True),
        ("__getitem__", (COUNTS, slice(0, 2)), False),
        ("__getitem__", MASK, False),
        ("narrow", COUNTS[0], False),
    ],
)
def test_cut_by_values__bounds_that_are_tensors(name: str, key: Any, expected: bool) -> None:
    assert cut_by_values(name, (X, key)) is expected
