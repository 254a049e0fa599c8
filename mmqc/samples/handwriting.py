"""scikit-learn's bundled handwritten digits: 1,797 scans of 8x8 pixels, split once into three disjoint parts.

| part        | scans | used for                                                  |
|-------------|-------|-----------------------------------------------------------|
| train       | 1,297 | `examples/digits_vqa/train_digits_vqa.py`                            |
| calibration |   100 | `Sample.calibration`, `Sample.prompts`                    |
| test        |   400 | `Sample.evaluate`; seen by neither training nor calibration |
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from mmqc.errors import MmqcError

SPLITS = {"train": 1297, "calibration": 100, "test": 400}
_SPLIT_SEED = 2024
CELL = 8


@dataclass(frozen=True)
class Handwriting:
    """Scans of one split: `scans` [N, 8, 8] in 0..1, their `labels` [N] and their `index` in the data set."""

    scans: np.ndarray
    labels: np.ndarray
    index: np.ndarray


class ScansMissingError(MmqcError, ImportError):
    """What the samples' questions are drawn from is not installed: says what to install."""


@cache
def load_split(name: str) -> Handwriting:
    """One of the disjoint parts "train", "calibration" and "test".

    Raises:
        ScansMissingError: scikit-learn, which ships the scans, is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ScansMissingError("the samples' handwriting comes with scikit-learn: pip install 'mmqc[demo]'") from error

    if name not in SPLITS:
        raise ValueError(f"no split named {name!r}; the splits are {', '.join(SPLITS)}")
    digits = load_digits()
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(digits.target))
    start = 0
    for split, size in SPLITS.items():
        if split == name:
            index = order[start : start + size]
            return Handwriting((digits.images[index] / 16).astype(np.float32), digits.target[index], index)
        start += size
    raise AssertionError(name)


# Light inks on dark paper, as RGB. Red and green belong to the ink alone; the frame is drawn in blue.
INKS = np.array([[1, 1, 1], [1, 0.85, 0.6], [0.75, 1, 0.8], [0.8, 0.9, 1], [1, 0.75, 0.85], [0.9, 1, 0.55]], np.float32)
FRAME_BLUE = 0.6


def draw_page(scans: np.ndarray, ink: np.ndarray) -> np.ndarray:
    """A page of digits: [R, C, 8, 8] in 0..1 to an RGB image [8R, 8C, 3] of uint8.

    A thin blue frame marks the page's edge. The vision tower has relative positions only (2D RoPE), so without an edge
    that it can see no patch could tell which row and column it lies in.
    """
    rows, columns = scans.shape[:2]
    gray = scans.transpose(0, 2, 1, 3).reshape(rows * CELL, columns * CELL)
    page = gray[:, :, None] * ink
    blue = page[:, :, 2]
    for edge in (blue[0], blue[-1], blue[:, 0], blue[:, -1]):
        np.maximum(edge, FRAME_BLUE, out=edge)
    return np.round(page * 255).astype(np.uint8)
