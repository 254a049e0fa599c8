"""Other integer inputs of the same kind as given ones: what a model's function and a candidate must agree on, too.

A rule that holds for one batch may do so by chance: two images of equal size, square grids, no padding.  Drawn inputs have
between one and four images of other sizes, of several frames, and rows of tokens with text in between and padding on either side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd
from random import Random
from typing import Any

import torch
from torch import Tensor

DRAWS = 12
Inputs = Mapping[str, Any]


def draw_grids(name: str, batches: Sequence[Inputs]) -> list[dict[str, Tensor]]:
    """Grids [n, 3] whose heights and widths are multiples of what the given ones are multiples of."""
    random = Random(0)
    return [{name: _grid(random, batches[0][name], _unit(name, batches), frames)} for frames in _frames()]


def draw_tokens(
    types: str, mask: str | None, others: Sequence[str], grids: Mapping[int, str], batches: Sequence[Inputs]
) -> list[dict[str, Tensor]]:
    """Grids and token inputs [B, L] that belong together, made of columns of the first batch; none if that is not possible.

    Args:
        types: input that tells the type of each token.
        mask: input that is 0 where a token is padding: without it rows are of equal length, that is, one row.
        others: the remaining inputs [B, L].
        grids: by type, the input with the grids of its images.
        batches: the given inputs.
    """
    random, given = Random(0), batches[0]
    columns = {kind: (given[types][0] == kind).nonzero().flatten().tolist() for kind in (0, *grids)}
    drawn: list[dict[str, Tensor]] = []
    for number, frames in enumerate(_frames()):
        case = {n: _grid(random, given[n], _unit(n, batches), frames) for n in grids.values()}
        rows = [[] for _ in range(1 if mask is None else 2)]
        for position, (kind, name) in enumerate(grids.items()):
            patches = _patches_per_token(given[types] == kind, given[name])
            if not patches or not columns[kind] or not columns[0]:
                return []
            counts = (case[name].prod(-1) // patches).tolist()
            for i, (count, t) in enumerate(zip(counts, case[name][:, 0].tolist(), strict=True)):
                row = rows[i * len(rows) // len(counts)]
                # the frames of one image follow one another, or text stands between them: a model knows one of the two
                for part in [count] if number >> position & 1 else [count // t] * t:
                    row += random.choices(columns[0], k=random.randint(1, 4))
                    row += (columns[kind] * part)[:part]
        drawn.append({**case, **_rows(rows, (types, *others), mask, given, columns[0][0], left=number % 3 == 0)})
    return drawn


def _rows(
    rows: list[list[int]], names: tuple[str, ...], mask: str | None, given: Inputs, text: int, left: bool
) -> dict[str, Tensor]:
    """Columns of the given inputs by row, padded to equal length with a text column whose mask is 0."""
    rows = [[*row, text] for row in rows]
    length = max(map(len, rows))
    inputs: dict[str, Tensor] = {}
    pads = [[-1] * (length - len(row)) for row in rows]
    index = torch.tensor([[*pad, *row] if left else [*row, *pad] for pad, row in zip(pads, rows, strict=True)])
    for name in (*names, *([mask] if mask else [])):
        inputs[name] = given[name][0].cpu()[torch.where(index < 0, text, index)].to(given[name].device)
    if mask:
        inputs[mask] = (index >= 0).to(inputs[mask])
    return inputs


def _frames() -> list[int]:
    """How many frames an image may have, by draw: half of them still images, which every model knows."""
    return [1] * (DRAWS // 2) + [3] * (DRAWS - DRAWS // 2)


def _unit(name: str, batches: Sequence[Inputs]) -> int:
    return gcd(*(int(v) for batch in batches for v in batch[name][:, 1:].flatten()))


def _grid(random: Random, given: Tensor, unit: int, frames: int) -> Tensor:
    side = lambda: unit * random.randint(1, 7)  # noqa: E731
    rows = [[random.randint(1, frames), side(), side()] for _ in range(random.randint(1, 4))]
    return torch.tensor(rows, dtype=given.dtype, device=given.device)


def _patches_per_token(here: Tensor, grid: Tensor) -> int:
    """How many patches make one token; 0 if that is no whole number."""
    patches, tokens = int(grid.prod(-1).sum()), int(here.sum())
    return patches // tokens if tokens and patches % tokens == 0 else 0
