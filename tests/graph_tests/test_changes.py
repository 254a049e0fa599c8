"""Each change is a linear map along one axis, and survives being written down (graph/change_data.py)."""

import json

import pytest
import torch
from tolerance import assert_close

from mmqc.graph.change_data import KEPT, from_data, to_data
from mmqc.graph.changes import Based, Centred, Moved, Placed, Spread, Times, Turned, Unknown

N = 12
G = torch.Generator().manual_seed(0)
CHANGES = {
    "times": Times(torch.randn(N, generator=G, dtype=torch.float64)),
    "centred": Centred(),
    "turned": Turned.of(N, 3, False),
    "mean kept": Turned.of(N, 3, True),
    "based": Based(torch.linalg.qr(torch.randn(N, N, generator=G, dtype=torch.float64))[0]),
    "spread": Spread.of(N),
    "spread in blocks": Spread.of(N, 3),
}


def written(step):
    return from_data(json.loads(json.dumps(to_data({"w": [step]}))), "w")[0]


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", CHANGES)
def test_placed__is_its_matrix_and_is_read_again(name: str, axis: int) -> None:
    change = CHANGES[name]
    matrix = change(torch.eye(N, dtype=torch.float64))  # [N, N], rows: v -> v M
    groups = torch.stack([torch.arange(1, 2 * N, 2), torch.randperm(N) + 2 * N]) if "spread" not in name else None
    size = 3 * N if groups is not None else N
    whole = torch.eye(size, dtype=torch.float64)
    for group in groups if groups is not None else [torch.arange(N)]:
        whole[group[:, None], group] = matrix
    w = torch.randn(*((size, 5) if axis == 0 else (5, size)), dtype=torch.float64)
    expected = whole.T @ w if axis == 0 else w @ whole
    step = Placed(axis, groups, change)
    assert_close(step(w), expected)
    assert_close(written(step)(w), step(w))


def test_moved__and_unknown_are_read_again() -> None:
    step = Moved(1, torch.tensor([[4, 5, 6], [0, 1, 2]]), torch.randn(3))
    w = torch.randn(7, 8, dtype=torch.float64)
    expected = w[:, [4, 5, 6]] @ step.beta.double() + w[:, [0, 1, 2]] @ step.beta.double()
    assert_close(step(w), expected)
    assert torch.equal(written(step)(w), step(w))
    assert written(Unknown("W + 1")) == Unknown("W + 1")


def test_tables__are_kept_once_and_no_wider_than_needed() -> None:
    narrow, wide = torch.randn(5).double(), torch.randn(5, dtype=torch.float64)
    data = to_data({"a": [Placed(0, None, Times(narrow)), Placed(1, None, Times(wide))], "b": [Placed(0, None, Times(narrow))]})
    assert [table[0] for table in data["tables"]] == ["float32", "float64"]
    assert torch.equal(from_data(data, "b")[0].change.factors, narrow)
    assert torch.equal(from_data(data, "a")[1].change.factors, wide)
    assert from_data(data, "c") == []
    large = to_data({"a": [Placed(0, None, Based(torch.eye(KEPT + 1)))]})
    assert "measured on data and is not kept" in from_data(large, "a")[0].formula
