"""Two-layer models of several transformers families with random weights: ``FAMILIES[name]()`` gives (model, batch)."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import transformers
from models import randomise, text_with_images, tiny_qwen2_vl
from torch import nn

Case = tuple[nn.Module, dict[str, Any]]
VOCAB, IMAGE = 512, 500
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 108,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION = {"hidden_size": 64, "intermediate_size": 108, "num_hidden_layers": 2, "num_attention_heads": 4}


def _config(kind: str, **more: Any) -> Any:
    return transformers.AutoConfig.for_model(kind, **more)


def _model(config: Any, auto: Any = transformers.AutoModelForImageTextToText) -> nn.Module:
    torch.manual_seed(0)
    return randomise(auto.from_config(config).float().eval())


def _text(kind: str, **more: Any) -> Case:
    ids = torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))
    model = _model(_config(kind, **{**TEXT, **more}), transformers.AutoModelForCausalLM)
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _images(tokens: int, size: int) -> dict[str, Any]:
    batch = text_with_images([tokens, tokens])
    del batch["mm_token_type_ids"]
    return {**batch, "pixel_values": torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))}


def _llava() -> Case:
    vision = _config("clip_vision_model", **VISION, projection_dim=32, image_size=32, patch_size=8)
    text = _config("llama", **TEXT)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE, image_seq_length=16)
    return _model(config), _images(16, 32)


def _internvl() -> Case:
    vision = {**VISION, "image_size": (48, 48), "patch_size": (8, 8), "attention_bias": True, "norm_type": "layer_norm"}
    text = _config("qwen2", **TEXT).to_dict()
    config = transformers.InternVLConfig(
        vision_config=vision, text_config=text, image_token_id=IMAGE, image_seq_length=9, downsample_ratio=0.5
    )
    return _model(config), _images(9, 48)


GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
_BUILDERS: dict[str, Callable[[], Case]] = {
    "qwen2_vl": tiny_qwen2_vl,
    "llava": _llava,
    "internvl": _internvl,
    "gemma3_text": lambda: _text("gemma3_text", **GEMMA),
    "olmo2": lambda: _text("olmo2"),
    "mixtral": lambda: _text("mixtral", num_local_experts=4, num_experts_per_tok=2),
    "gpt_neox": lambda: _text("gpt_neox"),
}


def _copied(build: Callable[[], Case]) -> Callable[[], Case]:
    """Builds once and gives each caller a copy, so that no test sees what another did to the model."""
    once = functools.cache(build)
    return lambda: copy.deepcopy(once())


FAMILIES = {name: _copied(build) for name, build in _BUILDERS.items()}
