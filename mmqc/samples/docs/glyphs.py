"""The glyphs that pages are drawn with: bitmaps of matplotlib's fonts, made by `examples/docs_vqa/make_glyphs.py`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from mmqc.samples.docs import place
from mmqc.samples.docs.alphabet import CHARACTERS

SANS = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique")
MONO = ("DejaVuSansMono", "DejaVuSansMono-Bold")
SERIF = ("DejaVuSerif", "DejaVuSerif-Bold", "STIXGeneral", "STIXGeneralItalic", "STIXGeneralBol")
LATIN = ("cmr10", "cmss10", "cmtt10")  # English alone
FONTS = (*SANS, *MONO, *SERIF, *LATIN)
SIZES = (12, 13, 14, 16, 18, 20)  # of the em square, in pixels
FILE = "glyphs.safetensors"


@dataclass(frozen=True)
class Font:
    """One face at one size. `glyphs`: character -> (coverage uint8 [h, w] or None, left, top, advance in pixels)."""

    name: str
    size: int
    glyphs: dict[str, tuple[np.ndarray | None, int, int, int]]

    def width(self, text: str) -> int:
        """Width of a text in pixels.

        Raises:
            KeyError: the face has no such character.
        """
        return sum(self.glyphs[c][3] for c in text)

    def holds(self, text: str) -> bool:
        """Whether every character of the text can be drawn."""
        return all(c in self.glyphs for c in text)


@cache
def _tensors() -> tuple[np.ndarray, np.ndarray]:
    from safetensors.numpy import load_file

    held = load_file(place.folder(FILE) / FILE)
    return held["table"], held["coverage"]


@cache
def font(name: str, size: int) -> Font:
    """The face of that name (`FONTS`) at that size (`SIZES`)."""
    table, coverage = _tensors()
    found: dict[str, tuple[np.ndarray | None, int, int, int]] = {}
    rows = table[FONTS.index(name), SIZES.index(size)].tolist()
    for character, (offset, height, width, left, top, advance) in zip(CHARACTERS, rows, strict=True):
        if advance:
            bitmap = coverage[offset : offset + height * width].reshape(height, width) if height * width else None
            found[character] = bitmap, left, top, advance
    return Font(name, size, found)
