"""Batches to train docs-vqa on, drawn without end by worker processes.

All pages of a batch have one size and all rows one number of pages, so that nothing is padded but the ends of the rows,
no attention needs a mask and the positions are those of every row. Several questions share the pages of a row: the vision
tower sees these once.
"""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from random import Random

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from mmqc.samples import handwriting
from mmqc.samples.docs import questions
from mmqc.samples.docs.alphabet import CELL, END, IMAGE, PAD, TOKEN, VISION_END, VISION_START
from mmqc.samples.docs.page import Fact, Page

SLOTS = 4  # characters of a visual token that the probe reads
# Cost of a visual token in the vision tower and of any token in the decoder (million FLOPs, forward and backward), and of
# a pair of visual tokens of one page in the vision tower's attention, which runs nearer to the device's peak.
SEE, READ, PAIR = 160, 60, 0.25
TAIL = 80  # tokens of a question and its answer


@dataclass(frozen=True)
class Bucket:
    """Pages in a row, questions about them, kinds, and how often: at the start and from a fifth of the training on."""

    name: str
    kinds: tuple[str, ...]
    asked: int
    early: float
    late: float


BUCKETS = (
    Bucket("line", ("line",), 2, 0.6, 0.12),
    Bucket("card", questions.CARDS, 6, 0.4, 0.45),
    Bucket("several", questions.CARDS, 8, 0.0, 0.15),
    Bucket("page", ("page",), 12, 0.0, 0.28),
)
OFTEN = {"text": 2, "receipt": 1, "table": 3, "chart": 3, "form": 2, "photo": 1}  # how often a card is of which kind
WORDS = tuple(kind for kind, count in OFTEN.items() for _ in range(count))


def mrope(pieces: list[int | tuple[int, int]]) -> np.ndarray:
    """[3, T] positions of runs of text (their length) and pages (rows, columns): text counts up, a page's by row and column."""
    found, position = [], 0
    for piece in pieces:
        if isinstance(piece, int):
            found.append(np.tile(np.arange(piece) + position, (3, 1)))
            position += piece
        else:
            r, c = np.divmod(np.arange(piece[0] * piece[1]), piece[1])
            found.append(np.stack([np.zeros_like(r), r, c]) + position)
            position += max(piece)
    return np.concatenate(found, 1)


def in_cells(page: Page, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """The visual token of each character [C], and the characters of each visual token [rows*columns, SLOTS] as ids, 0 none."""
    at = np.array(page.ys, np.int64) // CELL * columns + np.minimum(np.array(page.xs, np.int64) // CELL, columns - 1)
    at = np.clip(at, 0, rows * columns - 1)
    ids = np.array([TOKEN[c] for c in page.characters], np.int64)
    seen = np.flatnonzero(ids != TOKEN[" "])
    order = seen[np.argsort(at[seen], kind="stable")]
    held = at[order]
    slot = np.arange(len(held)) - np.searchsorted(held, held)
    cells = np.zeros((rows * columns, SLOTS), np.int64)
    keep = slot < SLOTS
    cells[held[keep], slot[keep]] = ids[order[keep]]
    return at, cells


class Batches(IterableDataset):
    """Dictionaries of tensors:

    images [B, N, H, W, 3] uint8    cells [B, N*V, 4]: the characters that the visual tokens show, 0 none
    head [P]: the tokens in front of every question    visual [N*V]: where in it the visual tokens stand
    tokens [B*Q, T]: question and answer    positions [3, P+T]    start [B*Q]: where the question's last token stands
    answer [B*Q, A]: the tokens that follow, 0 behind the end    source [B*Q, A]: the visual token of each, or -1
    """

    def __init__(self, seed: str, budget: float, split: str = "train", done: Synchronized | None = None) -> None:
        self.seed, self.budget, self.split, self.done = seed, budget, split, done

    def __iter__(self):
        info = get_worker_info()
        rnd = Random(f"{self.seed} {info.id if info else 0}")
        hand = handwriting.load_split(self.split)
        while True:
            done = 1.0 if self.done is None else self.done.value
            late = min(done * 5, 1.0)
            bucket = rnd.choices(BUCKETS, [b.early + (b.late - b.early) * late for b in BUCKETS])[0]
            yield make(rnd, bucket, self.budget, hand)


def make(rnd: Random, bucket: Bucket, budget: float, hand: handwriting.Handwriting) -> dict[str, torch.Tensor]:
    """A batch whose step costs about `budget` million FLOPs."""
    height, width = questions.size(rnd, bucket.name)
    count = rnd.randint(2, 3) if bucket.name == "several" else 1
    rows, columns = height // CELL, width // CELL
    seen = rows * columns * count
    cost = seen * (SEE + READ + rows * columns * PAIR) + bucket.asked * TAIL * (READ + seen * PAIR / 8)
    size = max(1, round(budget / cost))
    kinds = ("line",) if bucket.name == "line" else ("page",) if bucket.name == "page" else WORDS
    drawn = [[questions.draw(rnd, rnd.choice(kinds), height, width, hand) for _ in range(count)] for _ in range(size)]
    cells, asked = [], []
    for pages in drawn:
        places = [in_cells(page, rows, columns) for page in pages]
        cells.append(np.concatenate([c for _, c in places]))
        facts = rnd.sample(pages[0].facts, len(pages[0].facts))
        for i in range(bucket.asked):
            image = rnd.randrange(count)
            fact = questions.about_several(rnd, pages, image) if count > 1 else facts[i % len(facts)]
            asked.append((fact, places[image][0], image * rows * columns))
    out = rows_of(asked, count, (rows, columns))
    out["cells"] = torch.from_numpy(np.stack(cells).astype(np.int16))
    out["images"] = torch.from_numpy(np.stack([np.stack([page.image for page in pages]) for pages in drawn]))
    return out


def rows_of(asked: list[tuple[Fact, np.ndarray, int]], count: int, grid: tuple[int, int]) -> dict[str, torch.Tensor]:
    """The text of a batch: prompts, answers, positions."""
    cells = grid[0] * grid[1]
    head, pieces, visual = [], [], []
    for i in range(count):
        before = [TOKEN[c] for c in ("\n" if i else "") + f"image {i + 1}: "] + [VISION_START]
        visual += range(len(head) + len(before), len(head) + len(before) + cells)
        head += [*before, *[IMAGE] * cells, VISION_END]
        pieces += [len(before) + (1 if i else 0), grid]
    questions_ = [[TOKEN[c] for c in f"\n{fact.question}\n"] for fact, _, _ in asked]
    answers = [[*(TOKEN[c] for c in fact.answer), END] for fact, _, _ in asked]
    longest = max(len(q) + len(a) - 1 for q, a in zip(questions_, answers, strict=True))
    tail, window = -(-longest // 16) * 16, -(-max(map(len, answers)) // 8) * 8
    # A window may reach over the row's end: its last places repeat the last token and have no answer.
    tokens = np.full((len(asked), tail), PAD, np.int64)
    answer = np.zeros((len(asked), window), np.int64)
    source = np.full((len(asked), window), -1, np.int64)
    start = np.zeros(len(asked), np.int64)
    for i, ((fact, at, offset), q, a) in enumerate(zip(asked, questions_, answers, strict=True)):
        tokens[i, : len(q) + len(a) - 1] = q + a[:-1]
        start[i] = len(q) - 1
        answer[i, : len(a)] = a
        source[i, : len(a) - 1] = [at[w] + offset if w >= 0 else -1 for w in fact.where]
    # VISION_END and what follows it count on from the page.
    found = dict(tokens=tokens, answer=answer, source=source, start=start, positions=mrope([*pieces, 1 + tail]))
    found |= dict(head=np.array(head), visual=np.array(visual))
    return {name: torch.from_numpy(value) for name, value in found.items()}
