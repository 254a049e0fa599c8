"""Prompts with images of any sizes for the tiny Qwen2-VL, one or a batch of them."""

import random

import torch
from models import MERGE, PATCH, text_with_images
from torch import Tensor, nn


def batch_of(*grids: tuple[int, int, int]) -> dict[str, Tensor]:
    grid = torch.tensor(grids)
    pixels = torch.randn(int(grid.prod(-1).sum()), 3 * 2 * PATCH * PATCH, generator=torch.Generator().manual_seed(1))
    text = text_with_images([int(g.prod()) // MERGE**2 for g in grid])
    return {**text, "pixel_values": pixels, "image_grid_thw": grid}


def drawn(draw: random.Random, prompts: int) -> dict[str, Tensor]:
    """One to three images of any sizes for each prompt, padded on the left."""
    sides = lambda: (1, 2 * draw.randint(1, 5), 2 * draw.randint(1, 5))  # noqa: E731
    parts = [batch_of(*[sides() for _ in range(draw.randint(1, 3))]) for _ in range(prompts)]
    length = max(p["input_ids"].shape[1] for p in parts)
    padded = lambda t: nn.functional.pad(t, (length - t.shape[1], 0))  # noqa: E731
    images = ("pixel_values", "image_grid_thw")
    return {n: torch.cat([p[n] if n in images else padded(p[n]) for p in parts]) for n in parts[0]}


def padded_images(*patches: tuple[int, int], merge: int = 1) -> dict[str, Tensor]:
    """Images of so many rows and columns of patches as Pixtral takes them: a batch as large as the largest, and their sizes."""
    text = text_with_images([h * w // merge**2 for h, w in patches])
    sizes = torch.tensor(patches) * PATCH
    pixels = torch.randn(len(patches), 3, *sizes.amax(0).tolist(), generator=torch.Generator().manual_seed(1))
    return {"input_ids": text["input_ids"], "attention_mask": text["attention_mask"], "pixel_values": pixels, "image_sizes": sizes}
