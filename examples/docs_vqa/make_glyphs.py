"""Rasterize the fonts that matplotlib ships into the sample's glyphs: `python -m examples.docs_vqa.make_glyphs`.

Pages are drawn from these bitmaps, so that they are the same, pixel by pixel, whatever FreeType a machine has.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np
import torch
from matplotlib.ft2font import FT2Font
from PIL import Image, ImageDraw, ImageFont
from safetensors.torch import save_file

import mmqc
from mmqc.samples.docs import alphabet, glyphs, place

# Computer Modern's text fonts have their own encoding outside of these.
PLAIN = set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789.,:;-/()!?+=' ")


def rasterize(font: ImageFont.FreeTypeFont, character: str) -> tuple[np.ndarray, int, int, int]:
    """Coverage [h, w], its left and top (from the baseline, downwards), and the advance, in pixels."""
    left, top, right, bottom = font.getbbox(character, anchor="ls")
    advance = round(font.getlength(character))
    if right <= left or bottom <= top:
        return np.zeros((0, 0), np.uint8), 0, 0, advance
    image = Image.new("L", (right - left, bottom - top))
    ImageDraw.Draw(image).text((-left, -top), character, fill=255, font=font, anchor="ls")
    return np.asarray(image), left, top, advance


def main() -> None:
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    table = np.zeros((len(glyphs.FONTS), len(glyphs.SIZES), len(alphabet.CHARACTERS), 6), np.int32)
    pieces, offset = [], 0
    for f, name in enumerate(glyphs.FONTS):
        held = FT2Font(str(folder / f"{name}.ttf")).get_charmap()
        for s, size in enumerate(glyphs.SIZES):
            font = ImageFont.truetype(str(folder / f"{name}.ttf"), size, layout_engine=ImageFont.Layout.BASIC)
            for c, character in enumerate(alphabet.CHARACTERS):
                if ord(character) not in held or character == "\n" or (name.startswith("cm") and character not in PLAIN):
                    continue
                bitmap, left, top, advance = rasterize(font, character)
                table[f, s, c] = offset, *bitmap.shape, left, top, advance
                pieces.append(bitmap.ravel())
                offset += bitmap.size
    path = Path(mmqc.samples.__file__ or "").parent / place.NAME / glyphs.FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"table": torch.from_numpy(table), "coverage": torch.from_numpy(np.concatenate(pieces))}, path)
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
