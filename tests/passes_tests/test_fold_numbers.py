"""What is read out of a tensor of known numbers is arithmetic on these: one program for all sizes, and no read."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tolerance import assert_close
from torch import Tensor, nn

from mmqc.compiler.record import GraphRecord, collect_records
from mmqc.graph.tracing import as_tensor_of_numbers, varying


@pytest.fixture(autouse=True)
def reads_are_traced() -> Iterator[None]:
    """As the backend has it for a model that is traced with its values."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True), as_tensor_of_numbers():
        yield
    torch._dynamo.reset()


class Images(nn.Module):
    """Attention within each image, then the mean of each: a mask and a split by what lies in small tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor, sizes: list[list[int]]) -> Tensor:
        areas = [h * w for h, w in sizes]
        mask = torch.full((x.shape[0], x.shape[0]), -1e9)
        ends, starts = torch.tensor(areas).cumsum(-1), torch.tensor([0, *areas[:-1]]).cumsum(-1)
        for start, end in zip(starts, ends, strict=True):
            mask[start:end, start:end] = 0
        y = self.linear(x)
        y = (y @ y.T + mask).softmax(-1) @ y
        return torch.cat([rows.mean(0, keepdim=True) for rows in y.split((torch.as_tensor(sizes) * 4 // 4).prod(-1).tolist())])


def found(records: list[GraphRecord]) -> list[int]:
    """Sites of the pass, by graph."""
    return [p.n_sites for r in records for p in r.passes if p.name == "fold_numbers"]


def test_fold_numbers__one_program_for_all_sizes() -> None:
    model = Images().eval()
    compiled = torch.compile(model, backend="mmqc", fullgraph=True, dynamic=True)
    with torch.no_grad(), collect_records() as records:
        for sizes in ([[4, 6], [4, 4]], [[3, 5], [8, 2]], [[2, 2], [5, 5]]):
            x = torch.randn(sum(h * w for h, w in sizes), 16)
            assert_close(compiled(x, varying(sizes)), model(x, sizes))
    assert found(records) == [6]
    assert not any(r.fallbacks for r in records)


def read(numbers: Callable[[int, int], Tensor]) -> Callable[..., Tensor]:
    """Rows up to what ``numbers`` has first."""

    def call(x: Tensor, weight: Tensor, a: int, b: int) -> Tensor:
        n = numbers(a, b)[0].item()
        torch._check(n >= 0)
        torch._check(n <= x.shape[0])
        return (x @ weight)[:n]

    return call


KNOWN = [
    lambda a, b: torch.tensor([a, b]),
    lambda a, b: torch.tensor([[a, b], [1, 2]])[:, 1].cumsum(0),
    lambda a, b: (torch.tensor([a, b]) + torch.tensor([b, a])).sum(0, keepdim=True).long(),
    lambda a, b: torch.tensor([a * 3 - b]) // 2,
    lambda a, b: (10 - torch.tensor((a, b)))[None].prod(0),
]


@pytest.mark.parametrize("numbers", KNOWN)
def test_fold_numbers__arithmetic(numbers: Callable[[int, int], Tensor]) -> None:
    x, weight = torch.randn(40, 8), torch.randn(8, 8)
    function: Any = read(numbers)
    compiled = torch.compile(function, backend="mmqc", fullgraph=True, dynamic=True)
    with torch.no_grad(), collect_records() as records:
        for a, b in ((7, 5), (6, 3)):
            assert_close(compiled(x, weight, a, b), function(x, weight, a, b))
    assert found(records) == [1]


UNKNOWN = [
    lambda a, b: torch.tensor([a, b], dtype=torch.int32),
    lambda a, b: torch.tensor([2.7, 1.2], dtype=torch.int64) + a,
    lambda a, b: torch.tensor([a, b]).clamp(max=6),
    lambda a, b: torch.tensor([a, b]).add_(1),
]


@pytest.mark.parametrize("numbers", UNKNOWN)
def test_fold_numbers__other_numbers_are_read(numbers: Callable[[int, int], Tensor]) -> None:
    x, weight = torch.randn(40, 8), torch.randn(8, 8)
    function: Any = read(numbers)
    with torch.no_grad(), collect_records() as records:
        assert_close(torch.compile(function, backend="mmqc", dynamic=True)(x, weight, 7, 5), function(x, weight, 7, 5))
    assert not sum(found(records))
