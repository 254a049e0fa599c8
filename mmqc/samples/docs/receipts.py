"""Receipts: a shop's name, a date, what was bought and what it came to."""

from __future__ import annotations

from random import Random

from mmqc.samples.docs.canvas import Canvas, Run
from mmqc.samples.docs.glyphs import MONO, SANS, SERIF, Font, font
from mmqc.samples.docs.page import Fact, Page, finish, read
from mmqc.samples.docs.words import LANGUAGES, word

TOTALS = {
    "en": ("TOTAL", "CASH", "CHANGE"),
    "de": ("SUMME", "BAR", "RÜCKGELD"),
    "fr": ("TOTAL", "ESPÈCES", "RENDU"),
    "es": ("TOTAL", "EFECTIVO", "CAMBIO"),
    "pl": ("RAZEM", "GOTÓWKA", "RESZTA"),
    "el": ("ΣΥΝΟΛΟ", "ΜΕΤΡΗΤΑ", "ΡΕΣΤΑ"),
    "ru": ("ИТОГО", "НАЛИЧНЫЕ", "СДАЧА"),
}


def _money(cents: int, comma: bool) -> str:
    return f"{cents // 100}{',' if comma else '.'}{cents % 100:02d}"


def _right(canvas: Canvas, right: int, y: int, text: str, face: Font) -> Run:
    return canvas.text(right - face.width(text), y, text, face)


def _item(rnd: Random, language: str, face: Font, room: int, taken: set[str]) -> str | None:
    for _ in range(6):
        name = word(rnd, language)
        if rnd.random() < 0.4:
            name += " " + word(rnd, language)
        name = name.upper() if rnd.random() < 0.2 and "ß" not in name else name
        if face.holds(name) and name.lower() not in taken and face.width(name) <= room:
            taken.add(name.lower())
            return name
    return None


def receipt(rnd: Random, height: int, width: int) -> Page:
    """A receipt as long as the page allows, of at least one item."""
    language = rnd.choice(LANGUAGES)
    comma = language != "en"
    shade = rnd.randint(225, 255)
    canvas = Canvas(height, width, (shade, shade, shade - rnd.randint(0, 12)), (rnd.randint(0, 70),) * 3)
    face = font(rnd.choice((*MONO, *MONO, *SANS, *SERIF)), rnd.choice((12, 13, 14, 16) if width >= 160 else (12, 13)))
    pitch = face.size * rnd.choice((5, 6)) // 4 + 1
    left, right = 6, width - 8
    facts: list[Fact] = []
    y = rnd.randint(2, 10) + face.size
    shop = _item(rnd, language, face, right - left, set())
    if shop:
        start = (width - face.width(shop)) // 2
        facts.append(read("what is the shop?", canvas.text(start, y, shop, face)))
        y += pitch
    date = f"{rnd.randint(1, 28):02d}.{rnd.randint(1, 12):02d}.{rnd.randint(2001, 2030)}"
    if face.width(date) <= right - left and height - y > 5 * pitch:
        facts.append(read("what is the date?", canvas.text(left, y, date, face)))
        y += pitch
    y += pitch // 3
    total, taken, dots = 0, set(), rnd.random() < 0.2
    count = min(rnd.randint(2, 16), max(1, (height - 6 - y) // pitch - 2))
    for _ in range(count):
        cents = rnd.randrange(5, 10 ** rnd.randint(2, 4))
        price = _money(cents, comma)
        name = _item(rnd, language, face, right - left - face.width(price) - 10, taken)
        if name is None or y > height - 4:
            continue
        written = canvas.text(left, y, name, face)
        paid = _right(canvas, right, y, price, face)
        if dots:
            for x in range(written.right + 4, paid.left - 4, 4):
                canvas.rule(x, y - 1, x + 1, y)
        total += cents
        facts += [read(f"what does {name} cost?", paid), read(f"what costs {price}?", written)]
        y += pitch
    canvas.rule(left, y - pitch * 2 // 3, right, y - pitch * 2 // 3 + 1)
    y += pitch // 3
    labels = TOTALS[language]
    given = -(-total // 500) * 500
    for label, cents, ask in zip(labels, (total, given, given - total), ("total", "cash", "change"), strict=True):
        if y > height - 4 or not face.holds(label) or face.width(label + _money(cents, comma)) > right - left - 6:
            break
        canvas.text(left, y, label, face)
        facts.append(read(f"what is the {ask}?", _right(canvas, right, y, _money(cents, comma), face)))
        y += pitch
    return finish("receipt", canvas, _asked_once(facts))


def _asked_once(facts: list[Fact]) -> list[Fact]:
    asked = [fact.question for fact in facts]
    return [fact for fact in facts if asked.count(fact.question) == 1]
