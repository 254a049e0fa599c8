"""Families whose towers take whole images and whose decoder takes what they make of them in place of tokens."""

from __future__ import annotations

from typing import Any

import torch
import transformers as T
from torch import Tensor

from tests.families.parts import (
    AUDIO,
    END,
    IMAGE,
    PATCH,
    START,
    VIDEO,
    VOCAB,
    Batch,
    Case,
    built,
    clip,
    family,
    feature_lengths,
    noise,
    of_type,
    positions,
    prompt,
    siglip,
    text,
    tower,
    with_images,
)

BETWEEN = ((START,), (END,))
SLIDING = dict(sliding_window=16, layer_types=["sliding_attention", "full_attention"])
GEMMA = dict(head_dim=20, query_pre_attn_scalar=20, **SLIDING)
CROPS = [[32, 64], [64, 32], [64, 64]]  # sizes that an image may be cut into crops of 32 x 32 from
LATENT = dict(num_key_value_heads=4, kv_lora_rank=16, q_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16)
EXPERTS = dict(moe_intermediate_size=44, n_routed_experts=4, num_experts_per_tok=2, first_k_dense_replace=1)
SAM = dict(output_channels=32, image_size=64, patch_size=4, window_size=6, global_attn_indexes=[1], mlp_dim=148)
QFORMER = dict(num_hidden_layers=1, intermediate_size=108, cross_attention_frequency=1, max_position_embeddings=64)


def crops() -> Batch:
    """Two images of five crops, and their sizes before."""
    return dict(pixel_values=noise(2, 5, 3, 32, 32), image_sizes=torch.tensor([[30, 60], [60, 50]]))


def two_sizes() -> Batch:
    return dict(pixel_values=noise(2, 3, 32, 48), image_sizes=torch.tensor([[32, 48], [32, 32]]))


def with_a_video(images: list[int], video: int) -> Batch:
    """Images, then a video of so many tokens."""
    batch = prompt([*images, video])
    ids = batch["input_ids"]
    ids[0, (ids[0] == IMAGE).nonzero().flatten()[sum(images) :]] = VIDEO
    return batch


def half_masked() -> Tensor:
    """Two images, the second with a padded edge."""
    mask = torch.ones(1, 2, 32, 32, dtype=torch.bool)
    mask[0, 1, 24:] = False
    return mask


@family
def aya_vision() -> Case:
    decoder = text("cohere2", logit_scale=0.25, **SLIDING)
    settings = T.AyaVisionConfig(
        vision_config=siglip(), text_config=decoder, image_token_index=IMAGE, alignment_intermediate_size=148
    )
    return built(settings), with_images([4, 4])


@family
def vipllava() -> Case:
    layers = dict(vision_feature_layers=[-2, -3, 1], image_seq_length=16)
    settings = T.VipLlavaConfig(vision_config=clip(), text_config=text("llama"), image_token_index=IMAGE, **layers)
    return built(settings), with_images([16, 16])


@family
def video_llava() -> Case:
    tokens = dict(image_token_index=IMAGE, video_token_index=VIDEO, image_seq_length=16, video_seq_length=51)
    settings = T.VideoLlavaConfig(vision_config=clip(), text_config=text("llama", num_key_value_heads=4), **tokens)
    seen = dict(pixel_values_images=noise(2, 3, 32, 32), pixel_values_videos=noise(1, 2, 3, 32, 32, seed=9))
    return built(settings), {**with_a_video([16, 16], 34), **seen}


@family
def llava_next_video() -> Case:
    tokens = dict(image_token_index=IMAGE, video_token_index=VIDEO, image_grid_pinpoints=CROPS)
    model = built(T.LlavaNextVideoConfig(vision_config=clip(), text_config=text("llama"), **tokens))
    lengths = feature_lengths(model, **crops(), vision_feature_layer=-2, vision_feature_select_strategy="default")
    return model, {**with_a_video(lengths, 2 * 4), **crops(), "pixel_values_videos": noise(1, 2, 3, 32, 32, seed=9)}


@family
def granite4_vision() -> Case:
    decoder = text("granite4_vision_text", num_hidden_layers=6, embedding_multiplier=3.0, logits_scaling=2.0)
    decoder |= dict(residual_multiplier=0.5, attention_multiplier=0.2)
    model = built(
        T.Granite4VisionConfig(
            vision_config=siglip(patch_size=4, num_hidden_layers=3),
            text_config=decoder,
            qformer_config=text("blip_2_qformer", **QFORMER, encoder_hidden_size=64, use_qformer_text_input=False),
            image_token_index=IMAGE,
            vision_feature_select_strategy="full",
            image_grid_pinpoints=CROPS,
            downsample_rate="2/4",
            deepstack_layer_map=[[-2, 0], [1, 1]],
            spatial_target_layers=[2, 3, 4, 5],
        )
    )
    with torch.no_grad():
        features: Any = model.model.get_image_features(**crops())
    return model, {**prompt([len(x) for x in features.deepstack_features[0][1]]), **crops()}


def pixtral() -> dict[str, Any]:
    return tower("pixtral", intermediate_size=172, image_size=64, patch_size=PATCH, rope_parameters=dict(rope_theta=10000.0))


@family
def lighton_ocr() -> Case:
    decoder = text("qwen3", head_dim=32, tie_word_embeddings=True)
    settings = T.LightOnOcrConfig(vision_config=pixtral(), text_config=decoder, image_token_id=IMAGE)
    return built(settings), {**prompt([6, 4]), **two_sizes()}


@family
def mistral4() -> Case:
    """Mistral 3 with the decoder of Mistral Small 4."""
    decoder = text("mistral4", **LATENT, **EXPERTS)
    tokens = dict(image_token_index=IMAGE, tie_word_embeddings=False)
    settings = T.Mistral3Config(vision_config=pixtral(), text_config=decoder, **tokens)
    return built(settings), {**prompt([6, 4]), **two_sizes()}


@family
def ovis2() -> Case:
    seen = tower(image_size=48, patch_size=PATCH, vocab_size=101, hidden_stride=2, num_visual_indicator_tokens=5)
    settings = T.Ovis2Config(
        vision_config=seen,
        text_config=text("qwen2", tie_word_embeddings=True),
        image_token_id=IMAGE,
        visual_indicator_token_ids=[505, 506, 507, 508, 509],
        vocab_size=VOCAB,
        hidden_size=64,
    )
    return built(settings), with_images([9, 9], 48, around=((505, 506), (507,)))


@family
def idefics2() -> Case:
    latents = dict(resampler_n_latents=6, resampler_depth=2, resampler_n_heads=4, resampler_head_dim=16, num_key_value_heads=2)
    settings = T.Idefics2Config(
        vision_config=tower(image_size=32, patch_size=4),
        perceiver_config=dict(hidden_size=64, **latents),
        text_config=text("mistral", sliding_window=None),
        image_token_id=IMAGE,
    )
    batch = prompt([6, 6], around=((START,), (START,)))
    return built(settings), {**batch, "pixel_values": noise(1, 2, 3, 32, 32), "pixel_attention_mask": half_masked()}


@family
def deepseek_vl_hybrid() -> Case:
    settings = T.DeepseekVLHybridConfig(
        text_config=text("llama", num_key_value_heads=4),
        vision_config=siglip(),
        high_res_vision_config=dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, **SAM),
        image_token_id=IMAGE,
        tie_word_embeddings=False,
    )
    return built(settings), {**with_images([16, 16]), "high_res_pixel_values": noise(2, 3, 64, 64, seed=8)}


@family
def deepseek_ocr2() -> Case:
    seen = dict(
        sam_config=dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, **SAM, downsample_channels=[48, 64]),
        encoder_config=text(vocab_size=8),
    )
    decoder = text(num_key_value_heads=4, **EXPERTS, n_shared_experts=2, mlp_layer_types=["dense", "sparse"])
    settings = T.DeepseekOcr2Config(vision_config=seen, text_config=decoder, image_token_id=IMAGE)
    return built(settings), with_images([145, 145], 64)


@family
def pp_chart2table() -> Case:
    seen = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, **SAM)
    decoder = text("qwen2", num_key_value_heads=4)
    model = built(of_type(dict(model_type="pp_chart2table", vision_config=seen, text_config=decoder, image_token_index=IMAGE)))
    pixels = noise(2, 3, 64, 64)
    return model, {**prompt(feature_lengths(model, pixel_values=pixels)), "pixel_values": pixels}


@family
def shieldgemma2() -> Case:
    settings = T.ShieldGemma2Config(
        vision_config=siglip(patch_size=4),
        text_config=text("gemma3_text", **GEMMA),
        mm_tokens_per_image=16,
        image_token_index=IMAGE,
        boi_token_index=START,
        eoi_token_index=END,
    )
    return built(settings), with_images([16, 16], around=BETWEEN, types="token_type_ids")


@family
def janus() -> Case:
    seen = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=PATCH, projection_dim=64)
    drawn = dict(base_channels=32, channel_multiplier=[1, 1], num_res_blocks=1, latent_channels=32, image_token_embed_dim=64)
    settings = T.JanusConfig(
        text_config=text("llama", num_key_value_heads=4),
        vision_config=dict(**seen, num_image_tokens=16),
        vq_config=dict(embed_dim=8, num_embeddings=40, projection_dim=64, **drawn),
        image_token_id=IMAGE,
    )
    return built(settings), with_images([16, 16])


@family
def pi0() -> Case:
    """PaliGemma's cache, and another decoder that makes a robot's next moves of noise."""
    decoder = text("gemma", head_dim=32, num_key_value_heads=1)
    sees = dict(vision_config=siglip(), text_config=decoder, image_token_index=IMAGE, projection_dim=64, hidden_size=64)
    settings = T.PI0Config(
        vlm_config=dict(model_type="paligemma", **sees),
        dit_config={**decoder, "hidden_size": 48, "intermediate_size": 108},
        **dict(chunk_size=5, max_state_dim=8, max_action_dim=8),
    )
    seen = dict(pixel_values=noise(1, 2, 3, 32, 32), pixel_attention_mask=torch.ones(1, 2, dtype=torch.bool))
    moves = dict(state=noise(1, 8, seed=3), noise=noise(1, 5, 8, seed=4), timestep=torch.tensor([0.5]))
    return built(settings), {**prompt([16, 16]), **seen, **moves}


@family
def gemma4_unified() -> Case:
    layers = dict(num_hidden_layers=3, layer_types=["sliding_attention", "sliding_attention", "full_attention"], sliding_window=16)
    heads = dict(head_dim=16, global_head_dim=32, num_global_key_value_heads=1, attention_k_eq_v=True)
    settings = T.Gemma4UnifiedConfig(
        text_config=text(**layers, **heads, final_logit_softcapping=30.0),
        vision_config=dict(patch_size=4, pooling_kernel_size=2, mm_embed_dim=80, mm_posemb_size=16, output_proj_dims=80),
        audio_config=dict(audio_embed_dim=40),
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        audio_token_id=AUDIO,
        boi_token_id=START,
        eoi_token_id=END,
        boa_token_id=506,
        eoa_token_index=507,
    )
    batch = prompt([12, 8], around=BETWEEN, types="mm_token_type_ids")
    places = torch.tensor([positions(3, 4, 12), positions(4, 2, 12)])
    return built(settings), {**batch, "pixel_values": noise(2, 12, 192).sigmoid(), "image_position_ids": places}


@family
def diffusion_gemma() -> Case:
    heads = dict(head_dim=16, global_head_dim=32, use_bidirectional_attention="vision")
    experts = dict(num_experts=4, top_k_experts=2, moe_intermediate_size=44)
    seen = tower(intermediate_size=148, num_key_value_heads=4, head_dim=16, patch_size=4, pooling_kernel_size=3)
    settings = T.DiffusionGemmaConfig(
        vision_config={**seen, "position_embedding_size": 32},
        text_config=text(**heads, **experts, **SLIDING),
        boi_token_id=START,
        eoi_token_id=END,
        image_token_id=IMAGE,
        canvas_length=12,
    )
    g = torch.Generator().manual_seed(6)
    batch = prompt([4, 2], around=BETWEEN, types="mm_token_type_ids")
    seen = dict(
        pixel_values=noise(2, 36, 48).sigmoid(), image_position_ids=torch.tensor([positions(6, 6, 36), positions(3, 6, 36)])
    )
    canvas = dict(decoder_input_ids=torch.randint(10, 400, (1, 12), generator=g), self_conditioning_logits=3 * noise(1, 12, VOCAB))
    return built(settings), {**batch, **seen, **canvas}


@family
def step3p7() -> Case:
    kinds = dict(
        layer_types=["full_attention", "sliding_attention", "full_attention"], mlp_layer_types=["dense", "sparse", "sparse"]
    )
    experts = dict(moe_intermediate_size=44, n_routed_experts=4, num_experts_per_tok=2, share_expert_dim=36)
    decoder = text(
        **dict(num_hidden_layers=3, num_sliding_attention_heads=6, head_dim=20, sliding_window=16, moe_router_scaling_factor=1.5),
        **dict(swiglu_limits=[0.0, 0.0, 7.0], swiglu_limits_shared=[0.0, 0.0, 16.0]),
        **dict(rope_theta=[1e6, 1e4, 1e6], partial_rotary_factors=[0.4, 1.0, 0.4]),
        **kinds,
        **experts,
    )
    seen = tower(image_size=64, patch_size=PATCH, mlp_ratio=1.7, max_position_embeddings=64)
    settings = T.Step3p7Config(vision_config=seen, text_config=decoder, image_token_id=IMAGE)
    batch = with_images([4 + 1, 4], 64, around=BETWEEN)  # the first with a crop of 32 pixels, which is one token
    return built(settings), {**batch, "pixel_values_local": noise(1, 3, 32, 32, seed=7), "num_local_patches": [1, 0]}


@family
def lfm2_vl() -> Case:
    decoder = text("lfm2", num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"], block_auto_adjust_ff_dim=False)
    settings = T.Lfm2VlConfig(
        vision_config=tower(patch_size=PATCH, num_patches=16, vision_use_head=False),
        text_config=decoder,
        image_token_id=IMAGE,
        projector_hidden_size=96,
        downsample_factor=2,
    )
    shapes = torch.tensor([[4, 6], [4, 4]])
    mask = (torch.arange(24) < shapes.prod(-1, keepdim=True)).long()
    seen = dict(pixel_values=noise(2, 24, 3 * PATCH**2), pixel_attention_mask=mask, spatial_shapes=shapes)
    return built(settings), {**prompt([6, 4]), **seen}


@family
def inkling() -> Case:
    decoder = text(
        num_hidden_layers=3,
        head_dim=16,
        **dict(
            swa_num_attention_heads=4, swa_num_key_value_heads=4, swa_head_dim=16, sliding_window_size=16, d_rel=8, rel_extent=32
        ),
        layer_types=["hybrid_sliding", "hybrid_sliding", "hybrid"],
        mlp_layer_types=["dense", "sparse", "sparse"],
        **dict(moe_intermediate_size=44, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=2, route_scale=2.0),
        logits_mup_width_multiplier=2.0,
    )
    settings = T.InklingConfig(
        vision_config=dict(patch_size=4, hidden_size=64, num_hidden_layers=3, num_attention_heads=4),
        audio_config=dict(n_mel_bins=8, mel_vocab_size=16),
        text_config=decoder,
        image_token_id=IMAGE,
        audio_token_id=AUDIO,
        image_bos_token_id=START,
        audio_bos_token_id=506,
    )
    return built(settings), {**prompt([6, 4], around=((START,), ())), "pixel_values": noise(10, 2, 4, 4, 3)}
