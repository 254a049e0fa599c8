r"""Text and pages to the tensors of Qwen2-VL: characters for tokens, one visual token for each 8x8-pixel cell.

    "image 1: <image>\\nread image 1.\\n"  ->  image 1: <vision_start> <image_pad> x RC <vision_end> \\n read ...

Patches come in the order of transformers' `Qwen2VLImageProcessor`: the patches that are merged into one token are
neighbours, and a still image is repeated to fill the temporal patch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from PIL.Image import Image

SPECIAL = ("<|pad|>", "<|end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
PAD, END, VISION_START, VISION_END, IMAGE, VIDEO = range(len(SPECIAL))
CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
VOCAB_SIZE = 104  # 102 are used; no linear of the model has 104 rows or columns
PLACEHOLDER = "<image>"
PATCH, MERGE, TEMPORAL = 4, 2, 2


class CharTokenizer:
    """One token per character, after six special tokens: the newline and printable ASCII, or those of another sample."""

    pad_token_id, eos_token_id = PAD, END

    def __init__(self, characters: str = CHARACTERS, vocab_size: int = VOCAB_SIZE) -> None:
        self.characters, self.vocab_size = characters, vocab_size
        self.index = {character: len(SPECIAL) + i for i, character in enumerate(characters)}

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, without special tokens."""
        try:
            return [self.index[c] for c in text]
        except KeyError:
            odd = sorted({c for c in text if c not in self.index})
            held = "printable ASCII" if self.characters == CHARACTERS else f"the sample's {len(self.characters)}"
            raise ValueError(f"characters outside {held} cannot be encoded: {odd}") from None

    def decode(self, ids: Sequence[int] | torch.Tensor, skip_special_tokens: bool = True) -> str:
        """Text of token ids; ids beyond the characters decode to U+FFFD."""
        pieces = []
        for i in map(int, ids):
            if i < len(SPECIAL):
                pieces.append("" if skip_special_tokens else SPECIAL[i])
            else:
                i -= len(SPECIAL)
                pieces.append(self.characters[i] if i < len(self.characters) else "\ufffd")
        return "".join(pieces)


class DigitsProcessor:
    """Callable like a Hugging Face processor: `processor(text, images)` gives one batch-1 dict of tensors.

    Args:
        tokenizer: Characters to ids; the digits samples' own by default.
        patch: A patch's side in pixels.
    """

    def __init__(self, tokenizer: CharTokenizer | None = None, patch: int = PATCH) -> None:
        self.tokenizer, self.patch = tokenizer or CharTokenizer(), patch

    def __call__(
        self, text: str, images: Sequence[np.ndarray | Image] = (), answer: str | None = None, **_: Any
    ) -> dict[str, torch.Tensor]:
        """Encode text with one `<image>` per image.

        Args:
            text: The prompt, with as many `<image>` placeholders as there are images.
            images: RGB pages as PIL images or uint8 arrays [H, W, 3]; sides are multiples of two patches (8 pixels).
            answer: Where given, it follows the prompt and is closed by the end token.
        """
        patches, grids = zip(*map(self.patches, images), strict=True) if len(images) else ((), ())
        ids = self.encode(text, [(h // MERGE, w // MERGE) for _t, h, w in grids])
        if answer is not None:
            ids += [*self.tokenizer.encode(answer), END]
        input_ids = torch.tensor([ids])
        batch = {
            "input_ids": input_ids,
            "attention_mask": torch.ones_like(input_ids),
            "mm_token_type_ids": (input_ids == IMAGE).long(),
        }
        if len(images):
            batch["pixel_values"] = torch.from_numpy(np.concatenate(patches))
            batch["image_grid_thw"] = torch.tensor(grids)
        return batch

    def encode(self, text: str, grids: Sequence[tuple[int, int]]) -> list[int]:
        """Token ids of a prompt whose images have these grids (rows, columns) of visual tokens."""
        pieces = text.split(PLACEHOLDER)
        if len(pieces) != len(grids) + 1:
            raise ValueError(f"the text has {len(pieces) - 1} {PLACEHOLDER} placeholders for {len(grids)} images")
        ids = self.tokenizer.encode(pieces[0])
        for piece, (rows, columns) in zip(pieces[1:], grids, strict=True):
            ids += [VISION_START, *[IMAGE] * (rows * columns), VISION_END, *self.tokenizer.encode(piece)]
        return ids

    def patches(self, image: np.ndarray | Image) -> tuple[np.ndarray, tuple[int, int, int]]:
        """Flattened patches [h*w, 3*2*patch*patch] in -1..1 and the grid (1, h, w)."""
        pixels, patch = np.asarray(image), self.patch
        cell = patch * MERGE
        if pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.dtype != np.uint8:
            raise ValueError(f"an image must be RGB uint8 [H, W, 3], got {pixels.dtype} {list(pixels.shape)}")
        if pixels.shape[0] % cell or pixels.shape[1] % cell or 0 in pixels.shape:
            raise ValueError(f"an image's sides must be multiples of {cell} pixels, got {list(pixels.shape[:2])}")
        h, w = pixels.shape[0] // patch, pixels.shape[1] // patch
        x = pixels.astype(np.float32) / 127.5 - 1
        x = x.reshape(h // MERGE, MERGE, patch, w // MERGE, MERGE, patch, 3).transpose(0, 3, 1, 4, 6, 2, 5)
        x = np.repeat(x[:, :, :, :, :, None], TEMPORAL, axis=5)
        return x.reshape(h * w, -1), (1, h, w)

    def collate(self, batch: Sequence[dict[str, torch.Tensor]], multiple_of: int = 1) -> dict[str, torch.Tensor]:
        """Batch-1 dicts to one batch, padded on the left to a length that `multiple_of` divides."""
        longest = max(b["input_ids"].shape[1] for b in batch)
        length = -(-longest // multiple_of) * multiple_of
        out = {}
        for key, fill in (("input_ids", PAD), ("attention_mask", 0), ("mm_token_type_ids", 0)):
            out[key] = torch.cat([torch.nn.functional.pad(b[key], (length - b[key].shape[1], 0), value=fill) for b in batch])
        for key in ("pixel_values", "image_grid_thw"):
            if parts := [b[key] for b in batch if key in b]:
                out[key] = torch.cat(parts)
        return out

    def decode(self, ids: Sequence[int] | torch.Tensor, skip_special_tokens: bool = True) -> str:
        """Text of one row of token ids."""
        return self.tokenizer.decode(ids, skip_special_tokens)

    def batch_decode(self, ids: Sequence[Sequence[int]] | torch.Tensor, skip_special_tokens: bool = True) -> list[str]:
        """Text of each row of token ids."""
        return [self.decode(row, skip_special_tokens) for row in ids]
