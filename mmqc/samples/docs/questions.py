"""Questions about rendered documents; a seed and a number fix each of them.

| kind    | pages                           | asked                                                    | scored by |
|---------|---------------------------------|----------------------------------------------------------|-----------|
| line    | one to three lines              | read the image.; what follows "glage"?                   | ANLS      |
| text    | a paragraph                     | read the second line.                                    | ANLS      |
| page    | up to 1,500 visual tokens       | read item 12.; read "ключ пер".                          | ANLS      |
| receipt | items with prices               | what does CHLEB cost?; what is the total?                | exact     |
| table   | rows and columns of numbers     | Winter, ferze?; read the row Winter.                     | exact     |
| chart   | bars or a line                  | what is the value of Mar?; which is the highest?         | exact     |
| form    | numbers written by hand         | what is written at postcode?                             | exact     |
| photo   | a photograph with a caption     | what does the photograph show?; read the caption.        | ANLS      |
| several | two or three of the smaller ones | in image 2: what is the total?; which image has "Brot"? | exact     |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from mmqc.samples.docs import charts, photos, receipts, tables, texts
from mmqc.samples.docs.alphabet import CELL
from mmqc.samples.docs.page import Fact, Page, know
from mmqc.samples.handwriting import Handwriting
from mmqc.samples.questions import Question

KINDS = ("line", "text", "page", "receipt", "table", "chart", "form", "photo", "several")
CARDS = ("text", "receipt", "table", "chart", "form", "photo")
DRAW: dict[str, Callable[[Random, int, int], Page]] = {
    "line": texts.line,
    "text": texts.text,
    "page": texts.page,
    "receipt": receipts.receipt,
    "table": tables.table,
    "chart": charts.chart,
    "photo": photos.photo,
}
MOST_TOKENS = 1500


def size(rnd: Random, bucket: str) -> tuple[int, int]:
    """Height and width in pixels: of a "line", a "card", one of "several" pages or a "page"."""
    low, high, left, right = {
        "line": (2, 4, 8, 26),
        "card": (9, 20, 9, 18),
        "several": (8, 13, 9, 13),
        "page": (24, 40, 24, 40),
    }[bucket]
    while True:
        rows, columns = rnd.randint(low, high), rnd.randint(left, right)
        if rows * columns <= MOST_TOKENS:
            return rows * CELL, columns * CELL


def draw(rnd: Random, kind: str, height: int, width: int, hand: Handwriting) -> Page:
    """A page of that kind and size about which something can be asked."""
    while True:
        page = tables.form(rnd, height, width, hand) if kind == "form" else DRAW[kind](rnd, height, width)
        if page.facts:
            return page


def about_several(rnd: Random, pages: Sequence[Page], image: int) -> Fact:
    """A question about one of several pages, or which of them it is."""
    fact = rnd.choice(pages[image].facts)
    others = ["".join(page.characters) for i, page in enumerate(pages) if i != image]
    if rnd.random() < 0.2 and len(fact.answer) > 3 and fact.where[0] >= 0 and not any(fact.answer in text for text in others):
        return know(f'which image has "{fact.answer}"?', str(image + 1))
    return Fact(f"in image {image + 1}: {fact.question}", fact.answer, fact.where)


def prompt(question: str, pages: int) -> str:
    """The whole prompt: numbered pages, then the question."""
    return "".join(f"image {i + 1}: <image>\n" for i in range(pages)) + question + "\n"


def question(seed: int, number: int, hand: Handwriting) -> Question:
    """Question `number`; the kinds come in turn."""
    rnd, kind = Random(f"{seed} {number}"), KINDS[number % len(KINDS)]
    bucket = kind if kind in ("line", "page", "several") else "card"
    height, width = size(rnd, bucket)
    if kind == "several":
        pages = [draw(rnd, rnd.choice(CARDS), height, width, hand) for _ in range(rnd.randint(2, 3))]
        fact = about_several(rnd, pages, rnd.randrange(len(pages)))
    else:
        pages = [draw(rnd, kind, height, width, hand)]
        fact = rnd.choice(pages[0].facts)
    return Question(kind, [page.image for page in pages], prompt(fact.question, len(pages)), fact.question, fact.answer)
