"""Bar and line charts in the style of matplotlib's: axes with ticks, a title, its first colours."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from random import Random

import numpy as np

from mmqc.samples.docs.canvas import Canvas, Color, Run
from mmqc.samples.docs.glyphs import font
from mmqc.samples.docs.page import Fact, Page, finish, know, read
from mmqc.samples.docs.words import LANGUAGES, word

TAB10: tuple[Color, ...] = ((31, 119, 180), (255, 127, 14), (44, 160, 44), (214, 39, 40), (148, 103, 189), (140, 86, 75))
GRID: Color = (215, 215, 215)
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


@dataclass(frozen=True)
class Axes:
    """The plot's rectangle in pixels, and the scale of its y axis: `ticks` of `step`."""

    left: int
    right: int
    top: int
    bottom: int
    step: int
    ticks: int

    def level(self, value: float) -> int:
        """The row of a value."""
        return round(self.bottom - value / (self.step * self.ticks) * (self.bottom - self.top - 10))


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


def _draw_axes(canvas: Canvas, axes: Axes, grid: bool, boxed: bool) -> None:
    face = font("DejaVuSans", 12)
    for i in range(axes.ticks + 1):
        y, label = axes.level(i * axes.step), str(i * axes.step)
        canvas.rule(axes.left - 4, y, axes.left, y + 1)
        canvas.text(axes.left - 7 - face.width(label), y + 4, label, face)
        if grid:
            canvas.fill(axes.left, y, axes.right, y + 1, GRID)
    canvas.rule(axes.left, axes.top - 6, axes.left + 1, axes.bottom + 1)
    canvas.rule(axes.left, axes.bottom, axes.right, axes.bottom + 1)
    if boxed:
        canvas.rule(axes.left, axes.top - 6, axes.right, axes.top - 5)
        canvas.rule(axes.right - 1, axes.top - 6, axes.right, axes.bottom)


def _draw_bars(canvas: Canvas, axes: Axes, points: list[tuple[int, int]], half: int, color: Color) -> None:
    for x, y in points:
        canvas.fill(x - half, y, x + half, axes.bottom, color)


def _draw_line(canvas: Canvas, axes: Axes, points: list[tuple[int, int]], color: Color) -> None:
    """A line two pixels wide through square markers."""
    paint = canvas.paint()
    for (a, b), (c, d) in pairwise(points):
        xs = np.arange(a, c + 1)
        ys = np.rint(np.linspace(b, d, len(xs))).astype(int)
        reach = max(1, abs(d - b) // max(c - a, 1) + 1)  # steep lines need more rows a column
        for k in range(-(reach // 2), reach - reach // 2 + 1):
            paint[np.clip(ys + k, axes.top - 4, axes.bottom), xs] = color
    for x, y in points:
        canvas.fill(x - 3, y - 3, x + 4, y + 4, color)


def _ask(names: list[Run], values: list[int], labels: list[Run]) -> list[Fact]:
    """The value of each category (read off where `labels` has it), and which is the highest and the lowest."""
    facts = []
    for i, (name, value) in enumerate(zip(names, values, strict=True)):
        question = f"what is the value of {name.text}?"
        facts.append(read(question, labels[i]) if labels else know(question, str(value)))
    for which, best in (("highest", max(values)), ("lowest", min(values))):
        if values.count(best) == 1:
            facts.append(read(f"which is the {which}?", names[values.index(best)]))
    return facts


def chart(rnd: Random, height: int, width: int) -> Page:
    """One series of 3 to 8 values, as bars or as a line with markers; half of the charts write each value at its mark."""
    canvas, face = Canvas(height, width), font("DejaVuSans", 12)
    step, ticks = rnd.choice((1, 2, 5, 10, 20, 50)), rnd.randint(4, 6)
    axes = Axes(16 + face.width(str(step * ticks)), width - 8, 30, height - 24, step, ticks)
    room = axes.right - axes.left
    count = max(2, min(rnd.randint(3, 8), room // 30))
    pitch = room / count
    categories = _categories(rnd, count, int(pitch))
    # Values that a reader can tell: whole ticks and the middle between two.
    fine = step if step % 2 else step // 2
    values = [rnd.randint(1, step * ticks // fine) * fine for _ in categories]
    title = word(rnd, rnd.choice(LANGUAGES))
    heading = canvas.text((axes.left + axes.right - face.width(title)) // 2, 20, title, face)
    bar, written, color = rnd.random() < 0.5, rnd.random() < 0.5, rnd.choice(TAB10)
    points = [(round(axes.left + (i + 0.5) * pitch), axes.level(value)) for i, value in enumerate(values)]
    _draw_axes(canvas, axes, grid=not bar, boxed=rnd.random() < 0.7)
    if bar:
        _draw_bars(canvas, axes, points, max(3, int(pitch * 0.4)), color)
    else:
        _draw_line(canvas, axes, points, color)
    names, labels = [], []
    for name, (x, y), value in zip(categories, points, values, strict=True):
        canvas.rule(x, axes.bottom, x + 1, axes.bottom + 4)
        names.append(canvas.text(x - face.width(name) // 2, axes.bottom + 16, name, face))
        if written:
            wide = face.width(str(value))
            labels.append(canvas.text(min(max(x - wide // 2, axes.left + 2), width - wide - 2), y - 5, str(value), face))
    return finish("chart", canvas, [read("what is the title?", heading), *_ask(names, values, labels)])
