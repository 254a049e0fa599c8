"""The shapes of ``benchmarks.end_to_end.many_gpus``: Qwen2-VL with random weights, and what it is asked.

8b      Qwen2-VL-7B, as in quantize_speed.py; 28 layers of 3,584 / 18,944
72b     Qwen2-VL-72B: 80 layers of 8,192 / 29,568, of which as many as ``layers`` says
tiny    for CPUs
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers

LAYERS = {"8b": 28, "72b": 80, "tiny": 2}
SIDES = {"8b": 60, "72b": 60, "tiny": 4}  # patches of the image: 840 pixels
TEXTS: dict[str, dict[str, int]] = {
    "8b": {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4},
    "72b": {"hidden_size": 8192, "intermediate_size": 29568, "num_attention_heads": 64, "num_key_value_heads": 8},
    "tiny": {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2},
}


def config_of(shape: str, layers: int) -> Any:
    """The model's config with so many decoder layers."""
    tiny = shape == "tiny"
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3] if tiny else [16, 24, 24], "rope_theta": 1e6}
    text = {"vocab_size": 152064, "num_hidden_layers": layers, "rope_parameters": rope, **TEXTS[shape]}
    tower = {"depth": 2, "embed_dim": 80, "num_heads": 2} if tiny else {"depth": 32, "embed_dim": 1280, "num_heads": 16}
    vision = {"hidden_size": text["hidden_size"], "mlp_ratio": 4, "patch_size": 14, **tower}
    return transformers.Qwen2VLConfig(text_config=text, vision_config=vision)


def build(shape: str, layers: int, device: str) -> Any:
    """The same weights in every process on the same kind of device."""
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    with torch.device(device):
        return transformers.AutoModelForImageTextToText.from_config(config_of(shape, layers), dtype=dtype).eval()


def repeat_layers(model: Any, layers: int) -> None:
    """Copies of the last decoder layer, with memory of their own, until there are so many."""
    text, known = model.model.language_model, model.config.get_text_config()
    while len(text.layers) < layers:
        layer = copy.deepcopy(text.layers[-1])
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = len(text.layers)
        text.layers.append(layer)
    known.num_hidden_layers = layers
    if getattr(known, "layer_types", None):
        known.layer_types = [known.layer_types[0]] * layers


def image_prompt(model: Any, shape: str) -> dict[str, torch.Tensor]:
    """One image of 840 x 840 pixels, then 17 tokens of text."""
    return one_image(model, SIDES[shape], SIDES[shape], 17)


def one_image(model: Any, down: int, across: int, text: int) -> dict[str, torch.Tensor]:
    """An image of so many patches, then so many tokens of text."""
    image, vision = model.config.image_token_id, model.config.vision_config
    ids = torch.cat((torch.full((down * across // 4,), image), torch.arange(1000, 1000 + text)))[None]
    g = torch.Generator().manual_seed(1)
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(down * across, width, generator=g).to(model.dtype),
        "image_grid_thw": torch.tensor([[1, down, across]]),
        "mm_token_type_ids": (ids == image).long(),
    }
    return {name: value.to(model.device) for name, value in batch.items()}


def text_prompts(model: Any, shape: str, rows: int) -> dict[str, torch.Tensor]:
    """As many tokens as ``image_prompt`` has, of text alone."""
    tokens = SIDES[shape] ** 2 // 4 + 17
    ids = torch.randint(1000, 100_000, (rows, tokens), generator=torch.Generator().manual_seed(2)).to(model.device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def fingerprint(tensors: dict[str, torch.Tensor]) -> str:
    """64 bits of every bit of every tensor, made where the tensors are."""
    total = 0
    for number, (_, tensor) in enumerate(sorted(tensors.items())):
        raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
        for start in range(0, raw.numel(), 1 << 24):
            part = raw[start : start + (1 << 24)].to(torch.int64)
            place = torch.arange(start, start + part.numel(), device=part.device) * 2 + 1
            total += int(((part + 1) * place * (place ^ 0x5DEECE66D)).sum()) * (2 * number + 1)
    return f"{total % 2**64:016x}"
