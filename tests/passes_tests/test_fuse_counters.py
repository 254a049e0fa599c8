"""Counters of a graph's layers move in one operation, as they would one by one."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mmqc.compiler.record import collect_records

LAYERS = 3


class Counting(nn.Module):
    """Layers that add their place to what they are given and move it, as a static cache does."""

    def __init__(self, moves: str = "") -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(8, 8) for _ in range(LAYERS))
        self.moves = moves

    def forward(self, x: Tensor, counters: list[Tensor]) -> Tensor:
        for i, (layer, counter) in enumerate(zip(self.linears, counters, strict=True)):
            x = layer(x) + (torch.arange(x.shape[0], device=x.device) + counter)[:, None]
            last = i == LAYERS - 1
            if last and self.moves == "by a tensor":
                counter.add_(counters[0])
            elif last and self.moves == "by two":
                counter.add_(2)
            else:
                counter.add_(1)
            if last and self.moves == "twice":
                counter.add_(1)
            if last and self.moves == "and is read":
                x = x * counter
        return x


@pytest.mark.parametrize(
    ("moves", "together"), [("", 3), ("by two", 2), ("by a tensor", 0), ("twice", 3), ("and is read", 2)]
)  # fmt: skip
def test_fuse_counters__moves_what_only_moves(moves: str, together: int) -> None:
    model = Counting(moves).eval()
    model.linears.requires_grad_(False)
    expected, got = ([torch.tensor(5 + i) for i in range(LAYERS)] for _ in range(2))
    compiled: Any = torch.compile(model, backend="mmqc", fullgraph=True)
    with torch.no_grad(), collect_records() as records:
        for _ in range(3):
            x = torch.randn(2, 8)
            torch.testing.assert_close(compiled(x, got), model(x, expected))
            assert got == expected
    assert len(records) == 1
    sites = [site for p in records[0].passes if p.name == "fuse_counters" for site in p.sites]
    assert sites == ([f"{together} counters moved by 1"] if together else [])
