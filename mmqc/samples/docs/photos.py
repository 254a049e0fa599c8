"""Photographs (scikit-learn's two) with a caption; what they show, and what is written."""

from __future__ import annotations

from functools import cache
from random import Random

import numpy as np

from mmqc.samples.docs.canvas import Canvas
from mmqc.samples.docs.glyphs import SANS, SERIF
from mmqc.samples.docs.page import Fact, Page, fill_line, finish, know, pick_font, read
from mmqc.samples.docs.words import LANGUAGES
from mmqc.samples.handwriting import ScansMissingError

SHOWN = {"china.jpg": "a temple", "flower.jpg": "a flower"}


@cache
def _photographs() -> dict[str, np.ndarray]:
    """Name -> uint8 [H, W, 3], halved."""
    try:
        from sklearn.datasets import load_sample_image
    except ImportError as error:
        raise ScansMissingError("the samples' photographs come with scikit-learn: pip install 'mmqc[demo]'") from error
    found = {}
    for name in SHOWN:
        image = load_sample_image(name)
        h, w = image.shape[0] // 2 * 2, image.shape[1] // 2 * 2
        found[name] = image[:h, :w].reshape(h // 2, 2, w // 2, 2, 3).mean((1, 3)).astype(np.uint8)
    return found


def photo(rnd: Random, height: int, width: int) -> Page:
    """A part of a photograph, mirrored half of the time, with a caption on a strip below it or above."""
    name = rnd.choice(tuple(SHOWN))
    whole = _photographs()[name]
    strip = 26
    h = min(height - strip, whole.shape[0])
    w = min(width, whole.shape[1])
    y, x = rnd.randrange(whole.shape[0] - h + 1), rnd.randrange(whole.shape[1] - w + 1)
    part = whole[y : y + h, x : x + w]
    if rnd.random() < 0.5:
        part = part[:, ::-1]
    canvas = Canvas(height, width)
    above = rnd.random() < 0.5
    top = strip if above else height - strip - h
    canvas.paint()[top : top + h, :w] = part
    language = rnd.choice(LANGUAGES)
    face = pick_font(rnd, "x", (12, 13, 14, 16), (*SANS, *SERIF))
    caption = canvas.text(4, 18 if above else height - 8, fill_line(rnd, language, face, width - 10, 40) or "x", face)
    facts: list[Fact] = [know("what does the photograph show?", SHOWN[name]), read("read the caption.", caption)]
    return finish("photo", canvas, facts)
