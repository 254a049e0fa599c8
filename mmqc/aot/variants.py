"""More batches made of a given one: other lengths, rows, images and grids, for what one example cannot tell an export.

    rows of image sizes  ─►  tokens: text columns and placeholder columns of the batch    features: its patches, again and again

An axis is dynamic if it differs between batches, and a reading of a grid is verified on each of them, so a single example fixes
everything.  The batches here hold the example's own tokens and patches in another arrangement; what a model makes of them is
of no interest, only that the program makes the same.

Shapes:  token inputs int [B, L], those shaped like ``input_ids``   grids int [n, 3], patches [sum of t h w, ...]
         tiles: anything with one entry an image, [n, ...], or an image and row, [B, n, ...]
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmqc.aot.index_find import find_lengths

Batch = Mapping[str, Tensor]
Size = tuple[int, int]

# By batch: rows of images, each so many visual tokens high and wide.  The first has two of everything: it can be traced.
LAYOUTS: tuple[tuple[tuple[Size, ...], ...], ...] = (
    (((2, 3), (4, 2)), ((3, 3),)),
    (((3, 2),),),
    (((2, 2), (1, 4)), ((5, 3), (2, 1)), ()),
)
LEVEL = (((2, 3), (4, 2)), ((2, 3), (4, 2)))  # rows of one length, where no mask says what is padding
SMALLEST = (((1, 1),),)  # a size that a trace excludes, and that not every model knows
WORDS = (7, 3, 11, 5)  # text tokens behind an image, in turn


@dataclass(frozen=True)
class Parts:
    """A batch taken apart.

    Attributes:
        batch: the batch.
        text: columns with text, as flat indices into [B, L].
        images: for each image the columns that stand for it.
        grids: its grid input, if any.
        patches: the input with its patches, if any.
        merged: patches for each visual token; 0 where images have no grid.
        per_row: images of a row where they have an axis of their own; else 0.
    """

    batch: Batch
    text: list[int]
    images: list[list[int]]
    grids: str | None = None
    patches: str | None = None
    merged: int = 0
    per_row: int = 0

    def compose(self, layout: Sequence[Sequence[Size]], left: bool) -> dict[str, Tensor]:
        """A batch with these images; shorter rows are padded."""
        rows, number = [], 0
        for sizes in layout:
            row = self.words(len(rows), number)
            for size in sizes:
                row += self.placeholders(size, number) + self.words(len(rows), number + 1)
                number += 1
            rows.append(row)
        return {**self.tokens(rows, left), **self.features([size for sizes in layout for size in sizes], len(rows))}

    def words(self, row: int, number: int) -> list[int]:
        """Text columns."""
        count = WORDS[number % len(WORDS)] + (row if self.mask is not None else 0)
        return [self.text[(3 * number + row + i) % len(self.text)] for i in range(count)]

    def placeholders(self, size: Size, number: int) -> list[int]:
        """The columns of an image."""
        own = self.images[number % len(self.images)]
        return [own[0]] * (size[0] * size[1]) if self.grids is not None else own

    @property
    def mask(self) -> str | None:
        """The input that is 0 at padding."""
        return "attention_mask" if "attention_mask" in self.batch else None

    def tokens(self, rows: list[list[int]], left: bool) -> dict[str, Tensor]:
        """Token inputs of these columns."""
        longest = max(map(len, rows))
        pads = [[-1] * (longest - len(row)) for row in rows]
        index = torch.tensor([[*pad, *row] if left else [*row, *pad] for pad, row in zip(pads, rows, strict=True)])
        found = {}
        for name in token_inputs(self.batch):
            value = self.batch[name]
            columns = torch.where(index < 0, self.text[0], index).to(value.device)
            found[name] = value.flatten()[columns]
            if name == self.mask:
                found[name] = (index >= 0).to(value)
        return found

    def features(self, sizes: list[Size], rows: int) -> dict[str, Tensor]:
        """Every other input for images of these sizes."""
        found = {}
        tokens = token_inputs(self.batch)
        for name, value in self.batch.items():
            if name in tokens:
                continue
            if name == self.grids:
                side = math.isqrt(self.merged)
                found[name] = torch.tensor([[1, h * side, w * side] for h, w in sizes]).to(value)
            elif name == self.patches:
                count = sum(h * w for h, w in sizes) * self.merged
                found[name] = value[torch.arange(count, device=value.device) % len(value)]
            elif self.per_row:
                found[name] = value[torch.arange(rows, device=value.device) % len(value)]
            else:
                found[name] = value[torch.arange(len(sizes), device=value.device) % len(value)]
        return found


def token_inputs(batch: Batch) -> list[str]:
    """Inputs shaped like ``input_ids``."""
    shape = batch["input_ids"].shape
    return [n for n, v in batch.items() if v.shape == shape and not v.is_floating_point()]


def variants(batch: Batch, visual_ids: Sequence[int]) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Batches of other sizes, some of kinds that not every model supports; none if the batch cannot be taken apart.

    Args:
        batch: tensors by name, ``input_ids`` [B, L] among them.
        visual_ids: ids that stand for visual tokens.
    """
    parts = taken_apart(batch, visual_ids)
    if parts is None:
        return [], []
    layouts = LAYOUTS if parts.mask is not None else (LEVEL, *LAYOUTS[1:2])
    if parts.per_row:
        one = tuple((1, 1) for _ in range(parts.per_row))
        layouts = ((one, one), (one,), (one, one, one))
    elif not parts.images:
        layouts = tuple(tuple(() for _ in layout) for layout in layouts)
    made = [parts.compose(layout, left=number % 2 == 0) for number, layout in enumerate(layouts)]
    return made, [parts.compose(SMALLEST, left=True)] if parts.grids is not None else []


def fixed_images(batch: Batch, visual_ids: Sequence[int]) -> list[dict[str, Tensor]]:
    """Batches of other lengths and numbers of rows with as many images as the given one, where images have one size."""
    parts = taken_apart(batch, visual_ids)
    if parts is None or parts.grids is not None or parts.per_row or not parts.images:
        return []
    row = tuple((1, 1) for _ in parts.images)
    layouts = ((row, ()), (row,)) if parts.mask is not None else ((row,),)
    return [parts.compose(layout, left=True) for layout in layouts]


def taken_apart(batch: Batch, visual_ids: Sequence[int]) -> Parts | None:
    """The parts of a batch, or None if they do not fit together."""
    ids = batch.get("input_ids")
    if ids is None or ids.dim() != 2:
        return None
    visual = torch.isin(ids, torch.tensor(list(visual_ids), dtype=ids.dtype, device=ids.device))
    kept = batch["attention_mask"].bool() if "attention_mask" in token_inputs(batch) else torch.ones_like(visual)
    columns = (visual & kept).flatten().nonzero().flatten().tolist()
    text = (~visual & kept).flatten().nonzero().flatten().tolist()
    others = [n for n in batch if n not in token_inputs(batch)]
    if not text or bool(columns) != bool(others):
        return None
    if not others:
        return Parts(batch, text, [])
    grids = [n for n in others if batch[n].dim() == 2 and batch[n].shape[1] == 3 and not batch[n].is_floating_point()]
    lengths = find_lengths([batch])
    if len(grids) == 1 and grids[0] in lengths and lengths[grids[0]][1] == 0 and len(others) == 2:
        merged, rest = divmod(int(batch[grids[0]].prod(-1).sum()), len(columns))
        fits = rest == 0 and math.isqrt(merged) ** 2 == merged
        return Parts(batch, text, [columns[:1]], grids[0], lengths[grids[0]][0], merged) if fits else None
    return None if grids else _tiles(batch, text, columns, others)


def _tiles(batch: Batch, text: list[int], columns: list[int], others: list[str]) -> Parts | None:
    """Images of one size each: so many placeholders, with what stands between them."""
    rows, per_row = len(batch["input_ids"]), 0
    if all(batch[n].shape[:2] == batch[others[0]].shape[:2] and batch[n].dim() >= 4 for n in others):
        per_row = batch[others[0]].shape[1] if batch[others[0]].dim() == 5 else 0
    count = rows * per_row if per_row else len(batch[others[0]])
    if len(columns) % count or any(len(batch[n]) != (rows if per_row else count) for n in others):
        return None
    each = len(columns) // count
    spans = [columns[i * each : (i + 1) * each] for i in range(count)]
    images = [list(range(span[0], span[-1] + 1)) for span in spans]
    inside = {i for image in images for i in image}
    return Parts(batch, [i for i in text if i not in inside], images, per_row=per_row)
