"""A drawn page and what can be asked about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from random import Random

import numpy as np

from mmqc.samples.docs import glyphs
from mmqc.samples.docs.canvas import Canvas, Color, Run

LONGEST = 60  # characters of an answer


@dataclass(frozen=True)
class Fact:
    """A question and its answer; `where`: for each of the answer's characters the index of the one to be read, or -1."""

    question: str
    answer: str
    where: tuple[int, ...]


@dataclass(frozen=True)
class Page:
    """A page with its facts. `characters`, `xs`, `ys`: what is written on it and where its centre is, in pixels."""

    kind: str
    image: np.ndarray
    facts: list[Fact]
    characters: list[str]
    xs: list[int]
    ys: list[int]


def read(question: str, run: Run, start: int = 0, end: int | None = None) -> Fact:
    """The answer is a part of what was written."""
    end = len(run.text) if end is None else end
    return Fact(question, run.text[start:end], tuple(run.part(start, end)))


def read_all(question: str, runs: Iterable[Run], between: str = " ") -> Fact:
    """The answer is all of these, one after the other."""
    answer, where = "", []
    for run in runs:
        if answer:
            answer += between
            where += [-1] * len(between)
        answer += run.text
        where += run.span
    return Fact(question, answer, tuple(where))


def know(question: str, answer: str) -> Fact:
    """The answer stands nowhere on the page."""
    return Fact(question, answer, (-1,) * len(answer))


def finish(kind: str, canvas: Canvas, facts: list[Fact]) -> Page:
    """The page as it is now."""
    facts = [fact for fact in facts if 0 < len(fact.answer) <= LONGEST]
    return Page(kind, canvas.image(), facts, canvas.characters, canvas.xs, canvas.ys)


def colors(rnd: Random) -> tuple[Color, Color]:
    """Paper and ink, mostly dark on light, one in eight the other way round."""
    light = tuple(rnd.randint(205, 255) for _ in range(3)) if rnd.random() < 0.5 else (255, 255, 255)
    dark = tuple(rnd.randint(0, 90) for _ in range(3)) if rnd.random() < 0.5 else (0, 0, 0)
    return (dark, light) if rnd.random() < 0.125 else (light, dark)  # pyright: ignore[reportReturnType]


def pick_font(rnd: Random, text: str, sizes: Iterable[int] = glyphs.SIZES, names: Iterable[str] = glyphs.FONTS) -> glyphs.Font:
    """A face that holds every character of the text."""
    names, sizes = tuple(names), tuple(sizes)
    for _ in range(8):
        font = glyphs.font(rnd.choice(names), rnd.choice(sizes))
        if font.holds(text):
            return font
    return glyphs.font(rnd.choice(glyphs.SANS), rnd.choice(sizes))


def fill_line(rnd: Random, language: str, font: glyphs.Font, width: int, most: int = LONGEST) -> str:
    """Running text as wide as the line allows, of at most `most` characters."""
    from mmqc.samples.docs.words import token

    text, used, space = "", 0, font.glyphs[" "][3]
    misses = 0
    while misses < 2:
        new = token(rnd, language)
        wide = (used + space if text else 0) + (font.width(new) if font.holds(new) else width + 1)
        if wide > width or len(text) + len(new) + bool(text) > most:
            misses += 1
            continue
        text, used = f"{text} {new}" if text else new, wide
    return text
