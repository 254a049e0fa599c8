"""Batches for `train_digits_vqa.py`: prompts without digits, and digits drawn, distorted and rendered on the device.

Prompts are built once, on the CPU, by the code that ships (`samples.questions`, `samples.processor`). A step then picks
prompts, draws scans for their cells, and fills in the pixels, the digits asked about and the answers.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch
import torch.nn.functional as F

from mmqc.samples import handwriting
from mmqc.samples.processor import END, IMAGE, PAD, DigitsProcessor
from mmqc.samples.questions import MAX_CELLS, MAX_SHORT_CELLS, Layout, ask, draw_layout, prompt

BUCKETS = {
    "short": dict(kinds=("cell", "count", "any"), cells=MAX_SHORT_CELLS, length=112),
    "long": dict(kinds=("row", "image", "image"), cells=MAX_CELLS, length=168),
}
NOTHING = -1


@dataclass
class Templates:
    """Prompts without digits, [N, ...] each; V cells and L tokens are the bucket's maximum.

    `cell_of_token` names the cell whose digit stands at a token, `ask_at` the token that holds the digit asked about,
    `answer_at` the first token of a `count` or `any` answer; `NOTHING` where there is none.
    """

    tokens: torch.Tensor  # [N, L]
    positions: torch.Tensor  # [N, 3, L] M-RoPE
    cell_of_token: torch.Tensor  # [N, L]
    visual: torch.Tensor  # [N, L] index of the visual token at a token
    answer: torch.Tensor  # [N, L] True where the token is part of the answer
    ask_at: torch.Tensor  # [N]
    answer_at: torch.Tensor  # [N]
    kind_any: torch.Tensor  # [N]
    page: torch.Tensor  # [N, V] page of each cell
    asked: torch.Tensor  # [N, V] True for the cells of the page asked about
    place: torch.Tensor  # [N, V, 2] row and column of each cell
    edges: torch.Tensor  # [N, V, 4] True where a cell lies at the top, bottom, left or right edge of its page

    def to(self, device: str) -> Templates:
        return Templates(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})

    def pick(self, index: torch.Tensor) -> Templates:
        return Templates(**{f.name: getattr(self, f.name)[index] for f in fields(self)})


def mrope(tokens: list[int], grids: tuple[tuple[int, int], ...]) -> np.ndarray:
    """[3, len] positions: text counts up in all three, a page's tokens by their row and column (`--check`)."""
    out, at, position, pages = np.zeros((3, len(tokens)), np.int64), 0, 0, iter(grids)
    while at < len(tokens):
        if tokens[at] == IMAGE:
            rows, columns = next(pages)
            r, c = np.divmod(np.arange(rows * columns), columns)
            out[:, at : at + rows * columns] = position + np.stack([np.zeros_like(r), r, c])
            at, position = at + rows * columns, position + max(rows, columns)
        else:
            out[:, at] = position
            at, position = at + 1, position + 1
    return out


def shrink(rng: np.random.Generator, layout: Layout) -> Layout:
    """Whole-page transcription of a smaller page: short ones teach what long ones need."""
    grid = tuple(int(v) for v in rng.integers(1, 7, 2))
    return Layout("image", (grid,), 0)


def template(processor: DigitsProcessor, layout: Layout, cells: int, length: int) -> dict[str, np.ndarray]:
    """One prompt's tensors."""
    pages = len(layout.grids)
    ids, other = (processor.encode(prompt(ask(layout, d), pages), layout.grids) for d in (0, 1))
    first = sum(r * c for r, c in layout.grids[: layout.image])
    rows, columns = layout.grids[layout.image]
    digit_at = [i for i, (a, b) in enumerate(zip(ids, other, strict=True)) if a != b]
    grid = first + np.arange(rows * columns).reshape(rows, columns)
    space = processor.tokenizer.encode(" ")[0]
    source, answer_at = [], NOTHING
    if layout.kind in ("count", "any"):
        answer_at, answer = len(ids), [END] * (2 if layout.kind == "count" else 4)
        source = [NOTHING] * len(answer)
    else:
        lines = {"cell": [[grid[layout.row, layout.column]]], "row": [grid[layout.row]], "image": grid}[layout.kind]
        for line in lines:
            source += [*map(int, line), NOTHING]
        answer = [space if s == NOTHING else 0 for s in source[:-1]] + [END]
    tokens = np.full(length, PAD)
    tokens[: len(ids) + len(answer)] = ids + answer
    out = dict(tokens=tokens, positions=np.zeros((3, length), np.int64), cell_of_token=np.full(length, NOTHING))
    out["positions"][:, : len(ids) + len(answer)] = mrope(ids + answer, layout.grids)
    out["cell_of_token"][len(ids) : len(ids) + len(source)] = source
    out["answer"] = np.zeros(length, bool)
    out["answer"][len(ids) : len(ids) + len(answer)] = True
    is_image = tokens == IMAGE
    out["visual"] = np.where(is_image, np.cumsum(is_image) - 1, NOTHING)
    out |= dict(ask_at=np.array(digit_at[0] if digit_at else NOTHING), answer_at=np.array(answer_at))
    out["kind_any"] = np.array(layout.kind == "any")
    out |= dict(page=np.full(cells, NOTHING), place=np.zeros((cells, 2), np.int64), edges=np.zeros((cells, 4), bool))
    at = 0
    for i, (rows, columns) in enumerate(layout.grids):
        n = rows * columns
        r, c = np.divmod(np.arange(n), columns)
        out["page"][at : at + n] = i
        out["place"][at : at + n] = np.stack([r, c], 1)
        out["edges"][at : at + n] = np.stack([r == 0, r == rows - 1, c == 0, c == columns - 1], 1)
        at += n
    out["asked"] = out["page"] == layout.image
    return out


def make_templates(name: str, count: int, seed: int, shrunk: float = 0.3) -> Templates:
    """A pool of prompts of one bucket."""
    rng, processor = np.random.default_rng(seed), DigitsProcessor()
    bucket, rows = BUCKETS[name], []
    for i in range(count):
        layout = draw_layout(rng, bucket["kinds"][i % len(bucket["kinds"])])
        if layout.kind == "image" and rng.random() < shrunk:
            layout = shrink(rng, layout)
        rows.append(template(processor, layout, bucket["cells"], bucket["length"]))
    return Templates(**{k: torch.from_numpy(np.stack([row[k] for row in rows])) for k in rows[0]})


def distort(scans: torch.Tensor) -> torch.Tensor:
    """Handwriting varies: shift, turn, scale, shear, bend, stroke width, contrast and noise. [N, 8, 8] in 0..1."""
    n, device = len(scans), scans.device

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(n, *shape, device=device) * 2 - 1

    strength = torch.rand(n, 1, device=device)
    turn, shear, shift = 0.25 * uniform(1) * strength, 0.25 * uniform(1) * strength, 0.22 * uniform(2) * strength
    scale = 1 + 0.18 * uniform(2) * strength
    cos, sin = turn.cos(), turn.sin()
    matrix = torch.cat([cos * scale[:, :1], shear - sin, shift[:, :1], sin, cos * scale[:, 1:], shift[:, 1:]], 1)
    grid = F.affine_grid(matrix.view(n, 2, 3), [n, 1, 8, 8], align_corners=False)
    bend = F.interpolate(uniform(2, 3, 3), size=(8, 8), mode="bilinear", align_corners=True)
    grid = grid + 0.16 * bend.permute(0, 2, 3, 1) * strength[:, :, None, None]
    x = F.grid_sample(scans[:, None], grid, padding_mode="zeros", align_corners=False)
    thin, thick = -F.max_pool2d(-x, 3, 1, 1), F.max_pool2d(x, 3, 1, 1)
    width = 0.35 * uniform(1, 1, 1) * strength[:, :, None, None]
    x = x + width.clamp(min=0) * (thick - x) + (-width).clamp(min=0) * (thin - x)
    x = x * (1 + 0.25 * uniform(1, 1, 1)) + 0.06 * torch.randn_like(x) * strength[:, :, None, None]
    return x[:, 0].clamp(0, 1)


@dataclass
class Batch:
    """What the forward reads."""

    tokens: torch.Tensor
    positions: torch.Tensor
    visual: torch.Tensor
    weight: torch.Tensor  # [B, L] of each answer token in the loss
    patches: torch.Tensor  # [B, 4V, 96]
    page: torch.Tensor
    place: torch.Tensor
    labels: torch.Tensor  # [B, V]


class Source:
    """Draws batches of one bucket on the device; nothing in `draw` waits for the host."""

    def __init__(self, name: str, count: int, seed: int, split: str, device: str, augment: bool = True) -> None:
        scans = handwriting.load_split(split)
        self.scans = torch.from_numpy(scans.scans).to(device)
        self.labels = torch.from_numpy(scans.labels).to(device)
        self.templates = make_templates(name, count, seed).to(device)
        self.inks = torch.from_numpy(handwriting.INKS).to(device)
        self.augment, self.device = augment, device
        encode = DigitsProcessor().tokenizer.encode
        self.zero = encode("0")[0]
        self.yes_no = torch.tensor([[*encode("no"), END, PAD], [*encode("yes"), END]], device=device)

    def draw(self, size: int) -> Batch:
        """A batch of `size` prompts."""
        device = self.device
        t = self.templates.pick(torch.randint(len(self.templates.tokens), (size,), device=device))
        cells = t.page.shape[1]
        scan = torch.randint(len(self.scans), (size, cells), device=device)
        labels = self.labels[scan]
        x = self.scans[scan.view(-1)]
        x = (distort(x) if self.augment else x).view(size, cells, 8, 8)
        tokens, weight = self.fill(t, labels)
        return Batch(tokens, t.positions, t.visual, weight, self.render(x, t), t.page, t.place, labels)

    def fill(self, t: Templates, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens with their digits, and each answer token's weight in the loss."""
        size = len(labels)
        rows = torch.arange(size, device=self.device)
        tokens = torch.where(t.cell_of_token >= 0, labels.gather(1, t.cell_of_token.clamp(min=0)) + self.zero, t.tokens)
        present = labels.gather(1, (torch.rand_like(labels, dtype=torch.float) * t.asked).argmax(1, keepdim=True))[:, 0]
        digit = torch.where(torch.rand(size, device=self.device) < 0.5, present, torch.randint_like(present, 10))
        count = ((labels == digit[:, None]) & t.asked).sum(1)
        has = t.ask_at >= 0
        at = t.ask_at.clamp(min=0)
        tokens[rows, at] = torch.where(has, digit + self.zero, tokens[rows, at])
        at = t.answer_at.clamp(min=0)
        word = self.yes_no[(count > 0).long()]
        single = torch.where(t.kind_any, word[:, 0], count.clamp(max=9) + self.zero)
        tokens[rows, at] = torch.where(has, single, tokens[rows, at])
        for i in range(1, 4):
            tokens[rows, at + i] = torch.where(t.kind_any, word[:, i], tokens[rows, at + i])
        answer = t.answer & (tokens != PAD) & (count <= 9)[:, None]
        # Between a mean over questions and a mean over tokens: 64 digits weigh 8 times as much as one.
        return tokens, answer / answer.sum(1, keepdim=True).clamp(min=1).sqrt()

    def render(self, x: torch.Tensor, t: Templates) -> torch.Tensor:
        """`handwriting.draw_page` and `DigitsProcessor.patches` on the device. [B, V, 8, 8] to [B, 4V, 96]."""
        ink = self.inks[torch.randint(len(self.inks), (len(x), 3), device=self.device)]
        ink = ink.gather(1, t.page.clamp(min=0)[:, :, None].expand(-1, -1, 3))
        x = x[:, :, None] * ink[..., None, None]
        frame = torch.zeros_like(x[:, :, 2])
        top, bottom, left, right = (t.edges[..., i, None] * handwriting.FRAME_BLUE for i in range(4))
        frame[:, :, 0] = top
        frame[:, :, -1] = bottom
        frame[..., 0] = frame[..., 0].maximum(left)
        frame[..., -1] = frame[..., -1].maximum(right)
        x = torch.cat([x[:, :, :2], x[:, :, 2:].maximum(frame[:, :, None])], 2)
        x = (torch.round(x * 255) / 127.5 - 1).view(*x.shape[:3], 2, 4, 2, 4)
        x = x.permute(0, 1, 3, 5, 2, 4, 6)[:, :, :, :, :, None].expand(-1, -1, -1, -1, -1, 2, -1, -1)
        return x.reshape(len(x), -1, 96)
