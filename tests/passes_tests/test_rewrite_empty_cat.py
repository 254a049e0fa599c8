"""What a cache begins with is laid out as PyTorch does it, so that the second step is no other program than the first."""

from typing import Any

import pytest
import torch
from fusion_cases import linear
from torch import Tensor, nn

from mmqc.compiler.record import collect_records


class Cached(nn.Module):
    """Keys as transformers' growing cache keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.k = linear(32)

    def forward(self, x: Tensor, keys: Tensor | None = None) -> tuple[Tensor, Tensor]:
        k = self.k(x).unflatten(-1, (-1, 8)).transpose(1, 2)
        keys = torch.cat([torch.tensor([], dtype=x.dtype) if keys is None else keys, k], dim=-2)
        return (keys @ keys.transpose(2, 3)).softmax(-1) @ keys, keys


def sites(records: list[Any]) -> list[int]:
    """Of the pass, by graph."""
    return [p.n_sites for r in records for p in r.passes if p.name == "rewrite_empty_cat"]


def test_rewrite_empty_cat__is_exact_and_lies_as_in_eager() -> None:
    model, x = Cached().eval(), torch.randn(1, 5, 32)
    with torch.no_grad(), collect_records() as records:
        expected, got = model(x), torch.compile(model, backend="mmqc", fullgraph=True)(x)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert got[1].stride() == expected[1].stride()
    assert sites(records) == [1]


def test_rewrite_empty_cat__two_steps_are_one_program() -> None:
    model, x = Cached().eval(), torch.randn(1, 5, 32)
    compiled: Any = torch.compile(model, backend="mmqc", fullgraph=True, dynamic=True)
    with torch.no_grad(), collect_records() as records:
        keys = compiled(x)[1]
        for _ in range(3):
            keys = compiled(x[:, :1], keys)[1]
    assert len(records) == 2
    assert keys.shape[2] == 8


@pytest.mark.parametrize("first", [torch.empty(1, 4, 0, 8), torch.ones(1, 4, 2, 8), torch.tensor([], dtype=torch.float64)])
def test_rewrite_empty_cat__leaves_other_cats_alone(first: Tensor) -> None:
    model, x = Cached().eval(), torch.randn(1, 5, 32)
    with torch.no_grad(), collect_records() as records:
        expected, got = model.k(x).unflatten(-1, (-1, 8)).transpose(1, 2), torch.compile(Other(model.k), backend="mmqc")(x, first)
    torch.testing.assert_close(got, torch.cat([first, expected], dim=-2), rtol=0, atol=0)
    assert not sum(sites(records))


class Other(nn.Module):
    """A ``cat`` with what it is given."""

    def __init__(self, k: nn.Module) -> None:
        super().__init__()
        self.k = k

    def forward(self, x: Tensor, first: Tensor) -> Tensor:
        return torch.cat([first, self.k(x).unflatten(-1, (-1, 8)).transpose(1, 2)], dim=-2)
