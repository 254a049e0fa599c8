"""The shipped checkpoint: transformers' own Qwen2-VL, 7 million parameters, stored in bfloat16.

The dimensions are small but keep what later methods need: head_dim 64, grouped queries (4 to 2), a gated MLP of
3 * 256, M-RoPE in three sections, LayerNorm in the vision tower, RMSNorm in the decoder, tied embeddings.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmqc.samples import processor as ids

if TYPE_CHECKING:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

FOLDER = Path(__file__).parent / "digits_vqa"
BYTES = "weights.safetensors"


def new_config() -> Qwen2VLConfig:
    """The configuration that the training script starts from."""
    return qwen2_vl(ids, width=256, inner=768, vision_depth=4, depth=4, positions=1024)


def qwen2_vl(ids: Any, *, width: int, inner: int, vision_depth: int, depth: int, positions: int) -> Qwen2VLConfig:
    """A small Qwen2-VL's configuration.

    Args:
        ids: the module that has the special tokens, the size of the vocabulary and the sizes of a patch.
        width: of both towers, in heads of 64.
        inner: of the decoder's MLP.
        vision_depth: layers of the vision tower.
        depth: layers of the decoder.
        positions: that a sequence may have.
    """
    from transformers import Qwen2VLConfig

    return Qwen2VLConfig(
        vision_config=dict(
            depth=vision_depth,
            embed_dim=width,
            hidden_size=width,
            num_heads=width // 64,
            mlp_ratio=3,
            patch_size=ids.PATCH,
            spatial_merge_size=ids.MERGE,
            temporal_patch_size=ids.TEMPORAL,
        ),
        text_config=dict(
            vocab_size=ids.VOCAB_SIZE,
            hidden_size=width,
            intermediate_size=inner,
            num_hidden_layers=depth,
            num_attention_heads=width // 64,
            num_key_value_heads=2,
            max_position_embeddings=positions,
            rms_norm_eps=1e-6,
            rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[8, 12, 12]),
            bos_token_id=None,
            eos_token_id=ids.END,
            pad_token_id=ids.PAD,
            tie_word_embeddings=True,
        ),
        image_token_id=ids.IMAGE,
        video_token_id=ids.VIDEO,
        vision_start_token_id=ids.VISION_START,
        vision_end_token_id=ids.VISION_END,
        tie_word_embeddings=True,
        eos_token_id=ids.END,
        pad_token_id=ids.PAD,
    )


def new_model(config: Qwen2VLConfig | None = None) -> Qwen2VLForConditionalGeneration:
    """An untrained model in float32."""
    from transformers import GenerationConfig, Qwen2VLForConditionalGeneration

    model = Qwen2VLForConditionalGeneration(config or new_config()).eval()
    model.generation_config = GenerationConfig(
        eos_token_id=ids.END, pad_token_id=ids.PAD, do_sample=False
    )  # the same in all samples
    return model


def save(model: Qwen2VLForConditionalGeneration, folder: Path = FOLDER) -> None:
    """Write the model's weights in bfloat16, byte by byte, with its configurations.

    A weight [...] is uint8 [2, ...]: its upper bytes (sign and exponent, of which few occur) in one piece, the lower in another.
    That compresses in a wheel, where the two in turn do not.
    """
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    weights = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    halves = {name: w.detach().cpu().to(torch.bfloat16).contiguous().view(torch.uint8) for name, w in weights.items()}
    shapes = {name: weights[name].shape for name in halves}
    save_file({n: torch.stack((h[..., 1::2], h[..., ::2])).reshape(2, *shapes[n]) for n, h in halves.items()}, folder / BYTES)
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)


def load(folder: Path = FOLDER) -> Qwen2VLForConditionalGeneration:
    """The stored model in float32, ready for inference."""
    import torch
    from safetensors.torch import load_file
    from transformers import GenerationConfig, Qwen2VLConfig, Qwen2VLForConditionalGeneration

    weights = {}
    for name, (upper, lower) in load_file(folder / BYTES).items():
        weights[name] = torch.stack((lower, upper), -1).view(torch.bfloat16).squeeze(-1)
    model = Qwen2VLForConditionalGeneration.from_pretrained(
        None, config=Qwen2VLConfig.from_pretrained(folder), state_dict=weights, dtype=torch.float32
    )
    model.generation_config = GenerationConfig.from_pretrained(folder)
    model.config.name_or_path = model.name_or_path = str(folder)
    return model.eval()
