"""A page while it is drawn: rectangles, text and where each character came to stand."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from mmqc.samples.docs.glyphs import Font

Color = tuple[int, int, int]


@dataclass(frozen=True)
class Run:
    """Characters drawn together: `text`, and the index of each in `Canvas.characters`."""

    text: str
    first: int
    left: int
    right: int

    def part(self, start: int, end: int) -> range:
        """Where the characters [start, end) of the text are in `Canvas.characters`."""
        return range(self.first + start, self.first + end)

    @property
    def span(self) -> range:
        """Where all of them are."""
        return self.part(0, len(self.text))


@dataclass
class Canvas:
    """RGB background uint8 [H, W, 3] or one colour, coverage of the ink uint8 [H, W], and what was written."""

    height: int
    width: int
    paper: Color = (255, 255, 255)
    ink: Color = (0, 0, 0)
    background: np.ndarray | None = None
    coverage: np.ndarray = field(init=False)
    characters: list[str] = field(default_factory=list)
    xs: list[int] = field(default_factory=list)  # centre of each character
    ys: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.coverage = np.zeros((self.height, self.width), np.uint8)

    def text(self, x: int, baseline: int, text: str, font: Font) -> Run:
        """Write from x on; what would leave the page is an error of the caller.

        Raises:
            ValueError: a glyph lies outside of the page.
        """
        first, start, middle = len(self.characters), x, baseline - font.size * 3 // 8
        for character in text:
            bitmap, left, top, advance = font.glyphs[character]
            if bitmap is not None:
                h, w = bitmap.shape
                sub = self.coverage[baseline + top : baseline + top + h, x + left : x + left + w]
                if sub.shape != bitmap.shape:
                    raise ValueError(f"{text!r} at {start}, {baseline} leaves a page of {self.width}x{self.height}")
                np.maximum(sub, bitmap, out=sub)
            self.characters.append(character)
            self.xs.append(x + advance // 2)
            self.ys.append(middle)
            x += advance
        return Run(text, first, start, x)

    def stamp(self, x: int, y: int, coverage: np.ndarray, character: str) -> None:
        """Put a glyph of one's own (handwriting), its top left corner at (x, y)."""
        h, w = coverage.shape
        sub = self.coverage[y : y + h, x : x + w]
        np.maximum(sub, coverage, out=sub)
        self.characters.append(character)
        self.xs.append(x + w // 2)
        self.ys.append(y + h // 2)

    def rule(self, left: int, top: int, right: int, bottom: int, strength: int = 255) -> None:
        """A filled rectangle of ink, [left, right) x [top, bottom)."""
        sub = self.coverage[max(top, 0) : bottom, max(left, 0) : right]
        np.maximum(sub, strength, out=sub)

    def fill(self, left: int, top: int, right: int, bottom: int, color: Color) -> None:
        """A filled rectangle of another colour, under the ink."""
        self.paint()[max(top, 0) : bottom, max(left, 0) : right] = color

    def paint(self) -> np.ndarray:
        """The background to draw on, [H, W, 3]."""
        if self.background is None:
            self.background = np.empty((self.height, self.width, 3), np.uint8)
            self.background[:] = self.paper
        return self.background

    def image(self) -> np.ndarray:
        """The page, RGB uint8 [H, W, 3]."""
        if self.background is None:
            share = np.arange(256, dtype=np.int32)[:, None]
            paper, ink = np.array(self.paper), np.array(self.ink)
            table = ((255 - share) * paper + share * ink + 127) // 255
            return table.astype(np.uint8)[self.coverage]
        share = self.coverage[:, :, None].astype(np.uint16)
        mixed = (255 - share) * self.background + share * np.array(self.ink, np.uint16)
        return ((mixed + 127) // 255).astype(np.uint8)
