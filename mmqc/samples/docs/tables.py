"""Tables: names in front, headings above, numbers within; and forms that are filled in by hand."""

from __future__ import annotations

from random import Random

import numpy as np

from mmqc.samples.docs.canvas import Canvas, Run
from mmqc.samples.docs.glyphs import MONO, SANS, SERIF, Font, font
from mmqc.samples.docs.page import Fact, Page, colors, finish, read, read_all
from mmqc.samples.docs.words import LANGUAGES, word
from mmqc.samples.handwriting import Handwriting

FIELDS = ("phone", "postcode", "account", "order", "meter", "year", "weight", "pages", "score", "age", "code", "room")


def table(rnd: Random, height: int, width: int) -> Page:
    """Two to ten rows and one to five columns of numbers."""
    paper, ink = colors(rnd)
    canvas = Canvas(height, width, paper, ink)
    language = rnd.choice(LANGUAGES)
    face = font(rnd.choice((*SANS, *MONO, *SERIF)), rnd.choice((12, 13, 14)))
    pitch, left, ruled = face.size * 3 // 2 + rnd.randint(0, 3), 5, rnd.random() < 0.6
    names = _names(rnd, language, min(rnd.randint(2, 10), (height - 8) // pitch - 1), width // 3, face)
    first = left + max(face.width(n) for n in names) + 10
    digits = rnd.randint(2, 4)
    wide = face.width("0" * digits) + rnd.randint(14, 26)
    heads = _names(rnd, language, max(1, min(rnd.randint(1, 5), (width - 4 - first) // wide)), wide - 6, face)
    y = rnd.randint(2, max(2, height - (len(names) + 1) * pitch - 4)) + face.size
    for c, head in enumerate(heads):
        canvas.text(first + (c + 1) * wide - face.width(head) - 4, y, head, face)
    facts: list[Fact] = []
    for r, name in enumerate(names):
        line = y + (r + 1) * pitch
        canvas.text(left, line, name, face)
        cells: list[Run] = []
        for c, head in enumerate(heads):
            value = str(rnd.randrange(10 ** rnd.randint(max(1, digits - 2), digits)))
            cells.append(canvas.text(first + (c + 1) * wide - face.width(value) - 4, line, value, face))
            facts.append(read(f"{name}, {head}?", cells[-1]))
        facts.append(read_all(f"read the row {name}.", cells))
    if ruled:
        below = face.size // 3
        for r in range(len(names) + 2):
            canvas.rule(2, y + below + (r - 1) * pitch, first + len(heads) * wide, y + below + (r - 1) * pitch + 1, 140)
    return finish("table", canvas, facts)


def _names(rnd: Random, language: str, count: int, room: int, face: Font) -> list[str]:
    found: list[str] = []
    for _ in range(20 * max(count, 1)):
        name = word(rnd, language)
        if len(found) < max(count, 1) and face.width(name) <= room and name not in found:
            found.append(name)
    return found or ["x"]


def _write_by_hand(rnd: Random, canvas: Canvas, x: int, y: int, text: str, hand: Handwriting, digits: list) -> Run:
    first, start = len(canvas.characters), x
    for digit in text:
        scan = hand.scans[rnd.choice(digits[int(digit)])]
        big = np.rint(np.kron(scan, np.ones((2, 2), np.float32)) * 255).astype(np.uint8)
        canvas.stamp(x, y, big, digit)
        x += 13 + rnd.randint(0, 2)
    return Run(text, first, start, x)


def form(rnd: Random, height: int, width: int, hand: Handwriting) -> Page:
    """Printed labels and handwritten numbers behind them (scans of 8x8 pixels, twice as large)."""
    by_digit = [np.flatnonzero(hand.labels == digit).tolist() for digit in range(10)]
    paper, ink = colors(rnd)
    canvas = Canvas(height, width, paper, ink)
    face = font(rnd.choice((*SANS, *SERIF)), rnd.choice((12, 13, 14)))
    pitch = 20 + rnd.randint(0, 8)
    labels = rnd.sample(FIELDS, min(rnd.randint(1, 7), max(1, (height - 4) // pitch)))
    stop = 6 + max(face.width(label) for label in labels) + 10
    y = rnd.randint(2, max(2, height - len(labels) * pitch))
    facts: list[Fact] = []
    for label in labels:
        canvas.text(5, y + 14, label, face)
        x = stop + rnd.randint(0, 6)
        room = (width - x - 4) // 15
        if room >= 1 and y + 17 <= height:
            digits = "".join(str(rnd.randrange(10)) for _ in range(rnd.randint(1, min(room, 8))))
            facts.append(read(f"what is written at {label}?", _write_by_hand(rnd, canvas, x, y, digits, hand, by_digit)))
            if rnd.random() < 0.5:
                canvas.rule(stop, y + 17, width - 4, y + 18, 120)
        y += pitch
    return finish("form", canvas, facts)
