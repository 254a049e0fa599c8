"""Questions about pages of handwritten digits, with their answers; a seed fixes every one of them.

| kind  | question                                  | answer           | pages | scored by       |
|-------|-------------------------------------------|------------------|-------|-----------------|
| cell  | what is at row 2, column 3 of image 1?     | 7                | 1..3  | exact match     |
| count | how many 7s are in image 2?                | 3                | 1..3  | exact match     |
| any   | is there a 4 in image 3?                   | yes              | 1..3  | exact match     |
| row   | read row 3 of image 2.                     | 48120            | 1..2  | digit by digit  |
| image | read image 1.                              | 4812 5503 ...    | 1     | digit by digit  |

`image` pages hold 36 to 64 digits, so its answers need a long generation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from mmqc.samples.handwriting import INKS, Handwriting, draw_page

KINDS = ("cell", "count", "any", "row", "image")
TRANSCRIPTIONS = ("row", "image")
MAX_SHORT_CELLS = 32
MAX_CELLS = 64
MAX_SIDE = 8


@dataclass(frozen=True)
class Layout:
    """What a question asks, before any digit is known: `grids` (rows, columns) of each page, and where to look.

    `image`, `row` and `column` count from 0; a kind that does not use one leaves it 0.
    """

    kind: str
    grids: tuple[tuple[int, int], ...]
    image: int = 0
    row: int = 0
    column: int = 0


@dataclass(frozen=True)
class Question:
    """One question with its pages (RGB uint8 arrays) and the right answer."""

    kind: str
    images: list[np.ndarray] = field(repr=False)
    prompt: str
    question: str
    answer: str


def _grid(rng: np.random.Generator, kind: str, cells: int) -> tuple[int, int]:
    if kind == "image":
        low, high, fewest = 5, MAX_SIDE, 36
    elif kind == "row":
        low, high, fewest = 2, MAX_SIDE, 4
    else:
        low, high, fewest = 1, 6, 1
    while True:
        rows, columns = (int(v) for v in rng.integers(low, high + 1, 2))
        if fewest <= rows * columns <= cells:
            return rows, columns


def draw_layout(rng: np.random.Generator, kind: str) -> Layout:
    """A random layout of one kind, as evaluation uses them."""
    pages = {"image": 1, "row": int(rng.integers(1, 3))}.get(kind, int(rng.integers(1, 4)))
    left = MAX_CELLS if kind in TRANSCRIPTIONS else MAX_SHORT_CELLS
    grids = []
    for later in range(pages - 1, -1, -1):
        grids.append(_grid(rng, kind, left - 4 * later))
        left -= grids[-1][0] * grids[-1][1]
    order = rng.permutation(pages)
    grids = tuple(grids[i] for i in order)
    image = int(rng.integers(pages))
    rows, columns = grids[image]
    row = int(rng.integers(rows)) if kind in ("cell", "row") else 0
    column = int(rng.integers(columns)) if kind == "cell" else 0
    return Layout(kind, grids, image, row, column)


def ask(layout: Layout, digit: int) -> str:
    """The question in words; `digit` is what `count` and `any` ask about."""
    image = layout.image + 1
    return {
        "cell": f"what is at row {layout.row + 1}, column {layout.column + 1} of image {image}?",
        "count": f"how many {digit}s are in image {image}?",
        "any": f"is there a {digit} in image {image}?",
        "row": f"read row {layout.row + 1} of image {image}.",
        "image": f"read image {image}.",
    }[layout.kind]


def answer(layout: Layout, page: np.ndarray, digit: int) -> str:
    """The right answer, given the labels [R, C] of the page asked about."""
    if layout.kind == "cell":
        return str(page[layout.row, layout.column])
    if layout.kind == "count":
        return str(int((page == digit).sum()))
    if layout.kind == "any":
        return "yes" if (page == digit).any() else "no"
    if layout.kind == "row":
        return "".join(map(str, page[layout.row]))
    return " ".join("".join(map(str, row)) for row in page)


def prompt(question: str, pages: int) -> str:
    """The whole prompt: numbered pages interleaved with text, then the question."""
    return "".join(f"image {i + 1}: <image>\n" for i in range(pages)) + question + "\n"


def draw_question(rng: np.random.Generator, kind: str, handwriting: Handwriting) -> Question:
    """A random question of one kind over scans of one split."""
    while True:
        layout = draw_layout(rng, kind)
        picks = [rng.integers(len(handwriting.labels), size=grid) for grid in layout.grids]
        page = handwriting.labels[picks[layout.image]]
        # Half of the questions ask about a digit that is there, so that "no" and "0" are not the safe guess.
        digit = int(rng.choice(page.ravel())) if rng.random() < 0.5 else int(rng.integers(10))
        right = answer(layout, page, digit)
        if kind != "count" or len(right) == 1:
            break
    inks = INKS[rng.integers(len(INKS), size=len(picks))]
    images = [draw_page(handwriting.scans[pick], ink) for pick, ink in zip(picks, inks, strict=True)]
    question = ask(layout, digit)
    return Question(kind, images, prompt(question, len(images)), question, right)


def questions(handwriting: Handwriting, seed: int) -> Iterator[Question]:
    """Questions without end, the kinds in turn, so that any prefix is stratified."""
    rng = np.random.default_rng(seed)
    while True:
        for kind in KINDS:
            yield draw_question(rng, kind, handwriting)
