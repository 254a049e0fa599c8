"""Positions, segments and orders of image patches and of their tokens, from integer inputs alone and without reading a value.

    patch p  ->  image i = #{k : e_k <= p}, e the running sum of t·h·w;  the rest of p by division

Shapes:  grid int [n, 3], rows (t, h, w)   P patches in all, a number that the caller knows   types, mask int [B, L]
Why:     models compute these in Python, image by image, with numbers read out of the grid; a graph for every grid cannot.
How:     each is a function of a patch's (or token's) number, so its size is that of an input, never a value.  Where the number
         of segments is a value, the ends of segments are padded with the last one: empty segments, [P + 1] in all.
Source:  the conventions of transformers.vision_utils and of the models' three-dimensional positions; which of them a model
         follows, and with which numbers, is found and verified in ``index_find``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

IMAGE = 1  # the type of image tokens; of the types beyond it images have frames that are apart in time
BICUBIC = -0.75  # a of the Keys kernel, as torch's interpolate has it


@dataclass(frozen=True)
class Places:
    """Where each patch lies: of which image [P], frame, row and column in it [P]; the grid of its image (t, h, w), each [P]."""

    image: Tensor
    frame: Tensor
    row: Tensor
    column: Tensor
    size: tuple[Tensor, Tensor, Tensor]


def _divisor(size: Tensor) -> Tensor:
    """A size as a divisor: the lanes of a vector behind the last element hold zeros, and Inductor 2.11 divides by them as well."""
    return size.clamp(min=1)


def places(grid: Tensor, patches: int, merge: int = 1) -> Places:
    """The place of each patch, where the patches of merge x merge neighbours follow one another (1: row by row)."""
    grid = grid.long()
    counts = grid[:, 0] * grid[:, 1] * grid[:, 2]
    ends = counts.cumsum(0)
    number = torch.arange(patches, device=grid.device)
    image = _image_of(ends, number)
    t, h, w = grid[image].unbind(-1)
    within = number - (ends - counts)[image]
    area, across = _divisor(h * w), _divisor(w // merge)
    frame, within = within // area, within % area
    block, inner = within // merge**2, within % merge**2
    row = block // across * merge + inner // merge
    column = block % across * merge + inner % merge
    return Places(image, frame, row, column, (t, h, w))


def position_ids(grid: Tensor, patches: int, merge: int, temporal: bool) -> Tensor:
    """(row, column) of each patch [P, 2]; (frame, row, column) [P, 3] if ``temporal``."""
    at = places(grid, patches, merge)
    return torch.stack([*([at.frame] if temporal else []), at.row, at.column], dim=-1)


def segment_ends(grid: Tensor, patches: int, by_frame: bool) -> Tensor:
    """Ends of the sequences that attend to themselves [P + 1], from 0, padded with P: frames, or whole images."""
    at = places(grid, patches)
    frames = grid.long()[:, 0]
    group = (frames.cumsum(0) - frames)[at.image] + at.frame if by_frame else at.image
    return _ends(group, patches)


def lengths(grid: Tensor, patches: int, by_frame: bool) -> tuple[Tensor, int]:
    """The ends of the sequences, and a bound for the longest of them."""
    return segment_ends(grid, patches, by_frame), patches


def window_order(grid: Tensor, patches: int, merge: int, window: int) -> tuple[Tensor, Tensor]:
    """Merged tokens ordered by windows of window x window tokens [P / merge²], and the ends of windows in patches, padded."""
    unit = merge**2
    tokens = patches // unit
    grid = grid.long() // torch.tensor([1, merge, merge], device=grid.device)
    at = places(grid, tokens)
    down, across = (-(-side // window) for side in grid[:, 1:].unbind(-1))
    windows = grid[:, 0] * down * across
    down, across, before = (v[at.image] for v in (down, across, windows.cumsum(0) - windows))
    group = before + (at.frame * down + at.row // window) * across + at.column // window
    group, order = torch.sort(group, stable=True)  # within a window tokens stay row by row
    return order, _ends(group, tokens) * unit


def interpolation(
    grid: Tensor, patches: int, side: int, merge: int, mode: str, align_corners: bool, padding: str
) -> tuple[Tensor, Tensor]:
    """Entries of a [side, side] table and their weights for each patch, each [P, taps²]: torch's interpolate as a gather."""
    at = places(grid, patches, merge)
    _, h, w = at.size
    rows, weights_r = _taps(at.row, h, side, mode, align_corners, padding)
    columns, weights_c = _taps(at.column, w, side, mode, align_corners, padding)
    index = rows[:, :, None] * side + columns[:, None, :]
    return index.flatten(1), (weights_r[:, :, None] * weights_c[:, None, :]).flatten(1)


def token_positions(
    types: Tensor, mask: Tensor | None, grids: Mapping[int, Tensor], merge: int, by_frame: bool, interval: int
) -> tuple[Tensor, Tensor]:
    """Three-dimensional positions of tokens [3, B, L], and how far the next position is from the number of tokens [B, 1].

    A text token is one further than what precedes it, in all three dimensions.  The tokens of an image, of type c with grids[c]
    in the order of the batch, count frame, row and column from there on; what follows is max(h, w) / merge further.

    Args:
        types: 0 for text, c for a token of an image of ``grids[c]`` [B, L].
        mask: 0 where a token is padding [B, L]: its position is 0.
        grids: grids [n, 3] by type.
        merge: rows and columns of patches in one token.
        by_frame: whether each frame of a video is an image of its own.
        interval: positions between the frames of a video.
    """
    valid = torch.ones_like(types, dtype=torch.bool) if mask is None else mask.bool()
    step = valid.long()
    inside = torch.zeros((3, *types.shape), dtype=torch.long, device=types.device)
    for kind, grid in grids.items():
        here = valid & (types == kind)
        apart, spacing = (by_frame, interval) if kind > IMAGE else (False, 1)
        offset, advance = _in_image(here.flatten(), grid.long(), merge, apart, spacing)
        inside = torch.where(here, offset.unflatten(1, types.shape), inside)
        step = torch.where(here, advance.view(types.shape), step)
    start = step.cumsum(-1) - step
    position = torch.where(valid, start + inside, 0)
    return position, position.amax((0, 2))[:, None] + 1 - valid.sum(-1, keepdim=True)


def _in_image(here: Tensor, grid: Tensor, merge: int, by_frame: bool, interval: int) -> tuple[Tensor, Tensor]:
    """For tokens of images [T]: their offset in the image [3, T], and by how much the last one advances the positions [T]."""
    t, h, w = grid[:, 0], grid[:, 1] // merge, grid[:, 2] // merge
    counts = t * h * w
    ends = counts.cumsum(0)
    number = here.cumsum(0) - 1
    image = _image_of(ends, number)
    within = number - (ends - counts)[image]
    t, h, w, wide = (v[image] for v in (t, h, w, grid[:, 1:].amax(-1) // merge))
    area, across = _divisor(h * w), _divisor(w)
    frame, rest = within // area, within % area
    last = (rest == h * w - 1) & ((frame == t - 1) | by_frame)
    frame = frame * 0 if by_frame else frame * interval
    return torch.stack([frame, rest // across, rest % across]), torch.where(last, wide, 0)


def _image_of(ends: Tensor, number: Tensor) -> Tensor:
    """The segment that each number falls into; numbers beyond the last end fall into the last."""
    return torch.searchsorted(ends, number, right=True).clamp(max=ends.shape[0] - 1)


def _ends(group: Tensor, length: int) -> Tensor:
    """Where the runs 0, ..., 0, 1, ... of ``group`` [length] end: from 0, and padded with ``length`` to [length + 1]."""
    return torch.searchsorted(group, torch.arange(length + 1, device=group.device))


def _taps(index: Tensor, size: Tensor, side: int, mode: str, align_corners: bool, padding: str) -> tuple[Tensor, Tensor]:
    """Entries of an axis of ``side`` and their weights [P, 2 or 4] at places ``index`` of an axis of ``size``."""
    at = index.float()
    at = at * (side - 1) / (size - 1).clamp(min=1) if align_corners else (at + 0.5) * side / size - 0.5
    offsets = torch.arange(*((0, 2) if mode == "bilinear" else (-1, 3)), device=index.device)
    floor = at.floor()
    raw = floor.long()[:, None] + offsets
    d = (at[:, None] - floor[:, None] - offsets).abs()
    if mode == "bilinear":
        weights = (1 - d).clamp(min=0)
    else:
        near = ((BICUBIC + 2) * d - (BICUBIC + 3)) * d * d + 1
        far = ((BICUBIC * d - 5 * BICUBIC) * d + 8 * BICUBIC) * d - 4 * BICUBIC
        weights = torch.where(d <= 1, near, far)
    if padding == "zeros":
        weights = weights * ((raw >= 0) & (raw < side))
    return raw.clamp(0, side - 1), weights


# --- the table --------------------------------------------------------------------------------------------------------

EQUAL, ENDS, BOUND = "equal", "ends up to repetitions", "a bound"
SMALL = (1, 2, 3, 4)
FLAGS = (False, True)


@dataclass(frozen=True)
class Candidate:
    """One row of the table.

    Attributes:
        function: of (grid, patches, **numbers), or of (types, mask, grids by type, **numbers) where ``of_tokens``.
        results: in which sense each result has to equal what the model computes.
        numbers: what may stand for each further argument, apart from the model's own numbers of that kind.
        of_tokens: whether the results are for the tokens of text, rather than for patches.
    """

    function: Callable[..., Any]
    results: tuple[str, ...]
    numbers: Mapping[str, tuple[Any, ...]]
    of_tokens: bool = False


CANDIDATES = (
    Candidate(position_ids, (EQUAL,), {"merge": SMALL, "temporal": FLAGS}),
    Candidate(segment_ends, (ENDS,), {"by_frame": FLAGS}),
    Candidate(lengths, (ENDS, BOUND), {"by_frame": FLAGS}),
    Candidate(window_order, (EQUAL, ENDS), {"merge": SMALL, "window": tuple(range(1, 17))}),
    Candidate(
        interpolation,
        (EQUAL, EQUAL),
        {"side": (), "merge": SMALL, "mode": ("bilinear", "bicubic"), "align_corners": FLAGS, "padding": ("border", "zeros")},
    ),
    Candidate(token_positions, (EQUAL, EQUAL), {"merge": SMALL, "by_frame": FLAGS, "interval": SMALL}, of_tokens=True),
)
