"""Bar and line charts in the style of matplotlib's: axes with ticks, a title, its first colours."""

from __future__ import annotations

from random import Random

import numpy as np

from mmqc.samples.docs.canvas import Canvas, Color
from mmqc.samples.docs.glyphs import font
from mmqc.samples.docs.page import Fact, Page, finish, know, read
from mmqc.samples.docs.words import LANGUAGES, word

TAB10: tuple[Color, ...] = ((31, 119, 180), (255, 127, 14), (44, 160, 44), (214, 39, 40), (148, 103, 189), (140, 86, 75))
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def _categories(rnd: Random, count: int, room: int) -> list[str]:
    """Short names for the axis: months, years or words, none of them twice."""
    face, form = font("DejaVuSans", 12), rnd.random()
    if form < 0.35:
        start = rnd.randrange(12)
        return [MONTHS[(start + i) % 12] for i in range(count)]
    if form < 0.5 and room >= 36:
        start = rnd.randint(1990, 2030)
        return [str(start + i) for i in range(count)]
    found: list[str] = []
    language = rnd.choice(LANGUAGES)
    while len(found) < count:
        name = word(rnd, language)[: rnd.randint(2, 5)]
        if name not in found and face.width(name) <= room - 3:
            found.append(name)
    return found


def chart(rnd: Random, height: int, width: int) -> Page:
    """One series of 3 to 8 values, as bars or as a line with markers; half of the charts write each value at its mark."""
    canvas = Canvas(height, width)
    face = font("DejaVuSans", 12)
    step = rnd.choice((1, 2, 5, 10, 20, 50))
    ticks = rnd.randint(4, 6)
    left, right = 10 + face.width(str(step * ticks)) + 6, width - 8
    top, bottom = 30, height - 24
    count = max(2, min(rnd.randint(3, 8), (right - left) // 30))
    pitch = (right - left) / count
    names = _categories(rnd, count, int(pitch))
    # Values that a reader can tell: whole ticks and the middle between two.
    fine = step if step % 2 else step // 2
    values = [rnd.randint(1, step * ticks // fine) * fine for _ in names]
    title = word(rnd, rnd.choice(LANGUAGES))
    heading = canvas.text((left + right - face.width(title)) // 2, 20, title, face)
    bar, written, color = rnd.random() < 0.5, rnd.random() < 0.5, rnd.choice(TAB10)

    def level(value: float) -> int:
        return round(bottom - value / (step * ticks) * (bottom - top - 10))

    for i in range(ticks + 1):
        y, label = level(i * step), str(i * step)
        canvas.rule(left - 4, y, left, y + 1)
        canvas.text(left - 7 - face.width(label), y + 4, label, face)
        if not bar:
            canvas.fill(left, y, right, y + 1, (215, 215, 215))
    facts: list[Fact] = [read("what is the title?", heading)]
    centres = [round(left + (i + 0.5) * pitch) for i in range(count)]
    if not bar:
        for (a, b), (c, d) in zip(zip(centres, values, strict=True), list(zip(centres, values, strict=True))[1:], strict=False):
            xs = np.arange(a, c + 1)
            ys = np.rint(np.linspace(level(b), level(d), len(xs))).astype(int)
            reach = max(1, abs(level(d) - level(b)) // max(c - a, 1) + 1)
            for k in range(-(reach // 2), reach - reach // 2 + 1):
                canvas.paint()[np.clip(ys + k, top - 4, bottom), xs] = color
    runs = []
    for name, x, value in zip(names, centres, values, strict=True):
        y = level(value)
        if bar:
            half = max(3, int(pitch * 0.4))
            canvas.fill(x - half, y, x + half, bottom, color)
        else:
            canvas.fill(x - 3, y - 3, x + 4, y + 4, color)
        canvas.rule(x, bottom, x + 1, bottom + 4)
        runs.append(canvas.text(x - face.width(name) // 2, bottom + 16, name, face))
        if written:
            label = str(value)
            run = canvas.text(min(max(x - face.width(label) // 2, left + 2), width - face.width(label) - 2), y - 5, label, face)
            facts.append(read(f"what is the value of {name}?", run))
        else:
            facts.append(know(f"what is the value of {name}?", str(value)))
    for which, best in (("highest", max(values)), ("lowest", min(values))):
        if values.count(best) == 1:
            facts.append(read(f"which is the {which}?", runs[values.index(best)]))
    canvas.rule(left, top - 6, left + 1, bottom + 1)
    canvas.rule(left, bottom, right, bottom + 1)
    if rnd.random() < 0.7:
        canvas.rule(left, top - 6, right, top - 5)
        canvas.rule(right - 1, top - 6, right, bottom)
    return finish("chart", canvas, facts)
