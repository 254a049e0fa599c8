"""Families whose towers take patches in rows and the grids that they come from, as Qwen2-VL's does."""

from __future__ import annotations

from typing import Any

import torch
import transformers as T

from tests.families.parts import (
    AUDIO,
    END,
    IMAGE,
    PATCH,
    START,
    VIDEO,
    Case,
    built,
    family,
    prompt,
    text,
    tower,
    with_grids,
)

FRAME = 3 * PATCH**2  # numbers of a patch
QWEN = dict(image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END)
GLM = dict(
    **dict(image_token_id=IMAGE, image_start_token_id=START, image_end_token_id=END),
    **dict(video_token_id=VIDEO, video_start_token_id=505, video_end_token_id=506),
)
ROPE_16 = dict(rope_type="default", rope_theta=1e6, mrope_section=[2, 3, 3])  # for heads of 16
ROPE_32 = dict(rope_type="default", rope_theta=5e6, mrope_section=[6, 5, 5], mrope_interleaved=True)
SOME = dict(rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25, mrope_section=[2, 1, 1], mrope_interleaved=True)
QWEN3_TOWER = dict(depth=2, hidden_size=64, intermediate_size=172, num_heads=4, patch_size=PATCH, num_position_embeddings=64)
DEEP = dict(**QWEN3_TOWER, deepstack_visual_indexes=[0, 1])
WINDOWS = dict(depth=2, intermediate_size=148, num_heads=4, patch_size=PATCH, window_size=32, fullatt_block_indexes=[1])
WIDE = dict(hidden_size=96, intermediate_size=296, num_attention_heads=6)  # decoders of another width than their tower
EXPERTS = dict(moe_intermediate_size=44, num_experts_per_tok=2)
HEARS = dict(num_mel_bins=16, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=108, d_model=64, max_source_positions=64)
HEARD = dict(audio_start_token_id=506, audio_end_token_id=507, user_token_id=508)


def as_images(batch: dict[str, Any]) -> dict[str, Any]:
    """The rows as images of a patch."""
    return {**batch, "pixel_values": batch["pixel_values"].reshape(-1, 3, PATCH, PATCH)}


@family
def paddleocr_vl() -> Case:
    settings = T.PaddleOCRVLConfig(
        vision_config=tower(image_size=64, patch_size=PATCH),
        text_config=text(**WIDE, head_dim=16, rope_parameters=ROPE_16),
        tie_word_embeddings=False,
        **QWEN,
    )
    return built(settings), as_images(with_grids(FRAME))


@family
def hunyuan_vl() -> Case:
    rope = dict(rope_type="dynamic", rope_theta=1e4, alpha=1000.0, factor=1.0, mrope_section=[2, 2, 2, 2])
    settings = T.HunYuanVLConfig(
        vision_config=tower(patch_size=PATCH, max_image_size=64, out_hidden_size=96),
        text_config=text(**WIDE, head_dim=16, rope_parameters=rope),
        image_token_id=IMAGE,
        im_start_id=START,
        im_end_id=END,
        im_newline_id=505,
    )
    batch = with_grids(FRAME)
    lengths = [t * (h // 2) * (w // 2 + 1) + 2 for t, h, w in batch["image_grid_thw"].tolist()]  # a token ends each row
    return built(settings), {**batch, **prompt(lengths, around=((START,), (END,)), types="mm_token_type_ids")}


@family
def exaone4_5() -> Case:
    decoder = text("exaone4", **WIDE, sliding_window=16, layer_types=["sliding_attention", "full_attention"])
    seen = dict(**WINDOWS, hidden_size=64, num_key_value_heads=2, out_hidden_size=96)
    settings = T.Exaone4_5_Config(vision_config=seen, text_config=decoder, image_token_id=IMAGE, video_token_id=VIDEO)
    return built(settings), with_grids(2 * FRAME, types="")


@family
def kimi_k25() -> Case:
    latent = dict(kv_lora_rank=16, q_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16)
    experts = dict(**EXPERTS, n_shared_experts=1, n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=1)
    settings = T.Kimi_K25Config(
        vision_config=tower(patch_size=PATCH, pos_emb_height=6, pos_emb_width=6, pos_emb_time=2),
        text_config=text("deepseek_v3", num_key_value_heads=4, **latent, **experts),
        projection_hidden_size=64,
        tie_word_embeddings=False,
        **QWEN,
    )
    return built(settings), as_images(with_grids(FRAME, types=""))


@family
def minimax_m3_vl() -> Case:
    decoder = text(
        **dict(intermediate_size=44, dense_intermediate_size=172, shared_intermediate_size=36, num_hidden_layers=3),
        **dict(head_dim=20, rotary_dim=8, num_experts_per_tok=2, num_local_experts=4),
        rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.4),
        mlp_layer_types=["dense", "sparse", "sparse"],
        layer_types=["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        **dict(index_n_heads=2, index_head_dim=16, index_block_size=4, index_topk_blocks=5),
    )
    settings = T.MiniMaxM3VLConfig(
        vision_config=tower(image_size=64, patch_size=PATCH),
        text_config=decoder,
        image_token_index=IMAGE,
        video_token_index=VIDEO,
        projector_hidden_size=80,
    )
    return built(settings), with_grids(2 * FRAME, types="")


@family
def glm5_next() -> Case:
    decoder = text(
        **dict(num_hidden_layers=3, num_key_value_heads=4, n_shared_experts=1, n_routed_experts=4, **EXPERTS, hc_mult=2),
        **dict(kv_lora_rank=16, q_lora_rank=24, v_head_dim=16, qk_nope_head_dim=16, linear_head_dim=16, linear_num_heads=4),
        **dict(index_topk=16, index_head_dim=16, index_n_heads=2, index_kpool=4, indexer_types=["full", "full", "shared"]),
        mlp_layer_types=["dense", "sparse", "sparse"],
        layer_types=["linear_attention", "deepseek_sparse_attention", "deepseek_sparse_attention"],
    )
    seen = dict(depth=2, hidden_size=64, num_heads=4, image_size=64, patch_size=PATCH, intermediate_size=108)
    settings = T.Glm5NextConfig(
        vision_config={**seen, "out_hidden_size": 64, "projection_intermediate_size": 100}, text_config=decoder, **GLM
    )
    return built(settings), with_grids(2 * FRAME)


@family
def glmga() -> Case:
    seen = dict(depth=2, hidden_size=64, num_heads=4, image_size=64, patch_size=PATCH, out_hidden_size=96, intermediate_size=148)
    rope = dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5, mrope_section=[2, 3, 3])
    decoder = text("glm4v_text", **{**WIDE, "num_attention_heads": 3}, rope_parameters=rope)
    settings = T.GlmgaConfig(
        vision_config=dict(seen, model_type="glm4v_vision"), text_config={**decoder, "num_key_value_heads": 1}, **GLM
    )
    return built(settings), with_grids(2 * FRAME)


@family
def qwen2_5_omni_thinker() -> Case:
    settings = T.Qwen2_5OmniThinkerConfig(
        vision_config=dict(**WINDOWS, hidden_size=80, out_hidden_size=96),
        audio_config=dict(**HEARS, n_window=16, output_dim=96),
        text_config=text(**WIDE, rope_parameters=ROPE_16, tie_word_embeddings=False),
        image_token_index=IMAGE,
        video_token_index=VIDEO,
        audio_token_index=AUDIO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=False,
        **HEARD,
    )
    return built(settings), with_grids(2 * FRAME, types="")


def qwen3_omni(window: int) -> Any:
    """The thinker, whose audio tower looks at 2 ``window`` frames at a time, and attends to 4."""
    settings = T.Qwen3OmniMoeThinkerConfig(
        vision_config=dict(**DEEP, out_hidden_size=96),
        audio_config=dict(**HEARS, n_window=window, output_dim=96, n_window_infer=4 * window, downsample_hidden_size=16),
        text_config=text(hidden_size=96, head_dim=32, rope_parameters=ROPE_32, **EXPERTS, num_experts=6, decoder_sparse_step=1),
        audio_token_id=AUDIO,
        tie_word_embeddings=False,
        **QWEN,
        **HEARD,
    )
    return built(settings)


@family
def qwen3_omni_moe_thinker() -> Case:
    return qwen3_omni(8), with_grids(2 * FRAME, types="")


@family
def qwen3_vl() -> Case:
    decoder = text(hidden_size=96, intermediate_size=296, head_dim=32, rope_parameters=ROPE_32)
    settings = T.Qwen3VLConfig(
        text_config=decoder, vision_config=dict(**DEEP, out_hidden_size=96), tie_word_embeddings=True, **QWEN
    )
    return built(settings), with_grids(2 * FRAME)


@family
def cosmos3_omni() -> Case:
    decoder = text(hidden_size=96, intermediate_size=296, head_dim=32, rope_parameters=ROPE_32)
    settings = T.Cosmos3OmniConfig(
        vision_config=dict(**DEEP, out_hidden_size=96), text_config=decoder, tie_word_embeddings=False, **QWEN
    )
    return built(settings), with_grids(2 * FRAME)


@family
def cosmos3_edge() -> Case:
    settings = T.Cosmos3EdgeConfig(
        vision_config=tower(patch_size=PATCH, num_patches=16),
        text_config=text(head_dim=16, rope_parameters=ROPE_16),
        projector_hidden_size=148,
        tie_word_embeddings=False,
        **QWEN,
    )
    return built(settings), with_grids(FRAME)


@family
def cohere_compass() -> Case:
    rope = dict(rope_type="default", rope_theta=1e4, mrope_section=[6, 5, 5])
    decoder = text(
        **dict(num_attention_heads=2, num_key_value_heads=1, logit_scale=0.25, sliding_window=16),
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters=dict(sliding_attention=rope, full_attention=None),
    )
    settings = T.CohereCompassConfig(
        vision_config=dict(**DEEP, out_hidden_size=64), text_config=decoder, tie_word_embeddings=True, **QWEN
    )
    return built(settings), with_grids(2 * FRAME)


@family
def video_llama_3() -> Case:
    seen, tokens = tower(patch_size=PATCH), dict(image_token_id=IMAGE, video_token_id=VIDEO)
    settings = T.VideoLlama3Config(text_config=text("qwen2"), vision_config=seen, **tokens)
    return built(settings), {**with_grids(FRAME, types=""), "image_merge_sizes": torch.tensor([2, 2])}


@family
def qwen4_exp() -> Case:
    decoder = text(
        num_hidden_layers=3,
        head_dim=32,
        layer_types=["linear_attention", "linear_attention", "qwen_sparse_attention"],
        rope_parameters=SOME,
        **dict(linear_conv_kernel_dim=4, linear_key_head_dim=16, linear_value_head_dim=16),
        **dict(linear_num_key_heads=2, linear_num_value_heads=4),
        **EXPERTS,
        **dict(shared_expert_intermediate_size=36, num_experts=4, hc_count=4, hc_lowrank=16),
        **dict(ple_layer_ids=[2], ple_embed_dim=64, ngram_size=3, heads_per_ngram=2, split_ngram_parts=2),
        **dict(ngram_vocab_size_base=200, make_ngram_vocab_size_divisible_by=8),
        **dict(indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=16, indexer_compress_ratio=4),
    )
    seen = dict(**QWEN3_TOWER, out_hidden_size=64)
    settings = T.Qwen4ExpConfig(vision_config=seen, text_config=decoder, tie_word_embeddings=False, **QWEN)
    return built(settings), with_grids(2 * FRAME)


@family
def muse_glimmer() -> Case:
    decoder = text(
        **dict(num_hidden_layers=3, head_dim=16, sliding_window=16, output_multiplier=2.0),
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    )
    seen = tower(
        **dict(intermediate_size=148, num_hidden_layers=3, patch_size=PATCH),
        **dict(pos_emb_height=4, pos_emb_width=4, max_position_embeddings=16),
        layer_types=["window_attention", "window_attention", "full_attention"],
    )
    settings = T.MuseGlimmerConfig(
        vision_config=seen,
        text_config=decoder,
        out_hidden_size=256,
        projector_hidden_size=80,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
    )
    return built(settings), with_grids(2 * FRAME, types="")
