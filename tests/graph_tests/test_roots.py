"""Sizes of square images are constants where a root is taken of them, and others are not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mmqc.graph.roots import roots_are_constants

ROOTS: dict[str, Callable[[int], float]] = {"power": lambda n: n**0.5, "math": math.sqrt}


class Squares(nn.Module):
    """Patches of images in rows of squares, four of them joined, as InternVL's."""

    def __init__(self, root: Callable[[int], float]) -> None:
        super().__init__()
        self.patches, self.linear, self.root = nn.Conv2d(3, 8, 4, 4), nn.Linear(32, 16), root

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patches(pixels).flatten(2).transpose(1, 2)
        side = int(self.root(x.shape[1]))
        n, channels, factor = x.shape[0], x.shape[2], 0.5
        if side % factor != 0:
            raise ValueError
        x = x.reshape(n, side, int(side * factor), int(channels / factor)).permute(0, 2, 1, 3)
        x = x.reshape(n, int(side * factor), int(side * factor), int(channels / factor**2))
        return self.linear(x.flatten(1, 2))


@pytest.mark.parametrize("root", ROOTS)
@torch.no_grad()
def test_roots__are_constants_and_the_number_of_images_is_not(root: str) -> None:
    model, graphs = Squares(ROOTS[root]).eval(), list[Any]()

    def keep(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled: Any = torch.compile(model, backend=keep, fullgraph=True)
    for n, size in ((2, 32), (5, 32), (3, 32), (2, 16), (4, 16), (7, 32)):
        pixels = torch.randn(n, 3, size, size)
        torch._dynamo.maybe_mark_dynamic(pixels, [0, 2, 3])
        with roots_are_constants():
            assert torch.equal(compiled(pixels), model(pixels))
    assert len(graphs) == 2  # one for each size


def test_roots__integers_stay_symbols() -> None:
    def function(x: Tensor) -> Tensor:
        return x + x.shape[0] ** 2 + x.shape[1] ** 2.0

    graphs = list[Any]()

    def keep(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(function, backend=keep, fullgraph=True, dynamic=True)
    with roots_are_constants():
        for sizes in ((2, 3), (4, 6), (5, 7)):
            x = torch.randn(sizes)
            assert torch.equal(compiled(x), function(x))
    assert len(graphs) == 1
