"""Running text: one line, a paragraph, a whole page of numbered items."""

from __future__ import annotations

from random import Random

from mmqc.samples.docs.canvas import Canvas, Run
from mmqc.samples.docs.glyphs import FONTS, MONO, SANS, SERIF, Font, font
from mmqc.samples.docs.page import Fact, Page, colors, fill_line, finish, read, read_all
from mmqc.samples.docs.words import LANGUAGES, word

ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth")


def _font(rnd: Random, language: str, sizes: tuple[int, ...]) -> Font:
    return font(rnd.choice(FONTS if language == "en" else (*SANS, *MONO, *SERIF)), rnd.choice(sizes))


def _language(rnd: Random) -> str:
    return "en" if rnd.random() < 0.3 else rnd.choice(LANGUAGES)


def line(rnd: Random, height: int, width: int) -> Page:
    """One line, as scene text and forms have it; where there is room, two or three."""
    paper, ink = colors(rnd)
    canvas = Canvas(height, width, paper, ink)
    language = _language(rnd)
    face = _font(rnd, language, (12, 13, 14, 16, 18, 20))
    pitch = face.size * 3 // 2
    count = rnd.randint(1, max(1, (height - 4) // pitch))
    top = rnd.randint(0, height - count * pitch)
    left = rnd.randint(4, 4 + width // 8)
    runs = []
    for i in range(count):
        text = fill_line(rnd, language, face, width - left - 6, LONG := 56 // count)
        assert len(text) <= LONG
        if text:
            runs.append(canvas.text(left, top + i * pitch + face.size + face.size // 8, text, face))
    facts = [read_all("read the image.", runs)] if runs else []
    return finish("line", canvas, facts + [f for run in runs for f in _after(rnd, run)])


def _after(rnd: Random, run: Run) -> list[Fact]:
    """What follows a word of this line, as far as three words on."""
    words = run.text.split(" ")
    if len(words) < 3:
        return []
    at = rnd.randrange(len(words) - 1)
    start = sum(len(w) + 1 for w in words[: at + 1])
    end = start + len(" ".join(words[at + 1 : at + 4]))
    return [read(f'what follows "{words[at]}"?', run, start, end)]


def _unique(facts: list[Fact], text: str) -> list[Fact]:
    """Those whose quoted words stand once in the text."""
    return [f for f in facts if text.count(f.question.split('"')[1]) == 1]


def text(rnd: Random, height: int, width: int) -> Page:
    """A paragraph of up to six lines, sometimes under a heading."""
    paper, ink = colors(rnd)
    canvas = Canvas(height, width, paper, ink)
    language = _language(rnd)
    face = _font(rnd, language, (12, 13, 14, 16, 18))
    pitch = face.size * rnd.choice((5, 6, 7)) // 4 + 1
    left = rnd.randint(4, 12)
    room = (height - 8) // pitch
    count = min(room, rnd.randint(2, 6))
    y = rnd.randint(4, max(4, height - count * pitch - 4)) + face.size
    runs = []
    for _ in range(count):
        written = fill_line(rnd, language, face, width - left - 6, 56)
        if written:
            runs.append(canvas.text(left, y, written, face))
        y += pitch
    whole = "\n".join(run.text for run in runs)
    facts = [read(f"read the {ORDINALS[i]} line.", run) for i, run in enumerate(runs)]
    facts += _unique([f for run in runs for f in _after(rnd, run)], whole)
    return finish("text", canvas, facts)


def page(rnd: Random, height: int, width: int) -> Page:
    """A page of many lines in one or two columns; each item has its number or its heading in front."""
    paper, ink = colors(rnd)
    canvas = Canvas(height, width, paper, ink)
    face = font(rnd.choice((*SANS, *MONO, *SERIF)), rnd.choice((12, 13, 14, 16)))
    pitch = face.size * rnd.choice((5, 6, 7)) // 4 + 2
    columns = 2 if width >= 400 and face.size <= 14 and rnd.random() < 0.4 else 1
    wide = (width - 12) // columns
    runs, facts, item = [], [], rnd.choice((1, 1, 1, rnd.randint(1, 80)))
    numbered = rnd.random() < 0.6
    for column in range(columns):
        left, y = 8 + column * wide, rnd.randint(6, 24) + face.size
        language = _language(rnd)
        while y + pitch // 2 < height:
            label = f"{item}. " if numbered else f"{word(rnd, language)} {word(rnd, language)}: "
            right = wide - 12 - face.width(label)
            body = fill_line(rnd, language, face, min(right, wide * rnd.randint(4, 8) // 8), 56) if right > 40 else ""
            if body:
                run = canvas.text(left, y, label + body, face)
                runs.append(run)
                ask = f"read item {item}." if numbered else f'read "{label[:-2]}".'
                facts.append(read(ask, run, len(label)))
            item += 1
            y += pitch if rnd.random() < 0.85 else 2 * pitch
    whole = "\n".join(run.text for run in runs)
    if not numbered:
        facts = _unique(facts, whole)
    facts += _unique([f for run in runs if rnd.random() < 0.3 for f in _after(rnd, run)], whole)
    return finish("page", canvas, facts)
