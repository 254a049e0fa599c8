"""Families whose images are encoded: for a decoder that looks at them, or through queries."""

from __future__ import annotations

from typing import Any

import torch
import transformers as T
from torch import Tensor

from tests.families.parts import (
    END,
    IMAGE,
    PATCH,
    START,
    VIDEO,
    VOCAB,
    Case,
    built,
    config,
    family,
    noise,
    prompt,
    siglip,
    text,
    tower,
    with_images,
)

BEGUN = torch.tensor([[0, 30, 44, 51, 77]])  # what the decoder has said
BETWEEN = ((START,), (END,))
OPT = dict(num_attention_heads=4, max_position_embeddings=256, pad_token_id=1, bos_token_id=2, eos_token_id=2)
T5 = dict(vocab_size=VOCAB, d_model=64, d_kv=16, d_ff=172, num_layers=2, num_decoder_layers=2, num_heads=4)


def patches(grids: list[tuple[int, int]], channels: int, length: int) -> tuple[Tensor, Tensor]:
    """Rows of row, column and ``channels`` numbers, padded with zeros; and which are patches."""
    rows, mask = noise(len(grids), length, channels + 2), torch.zeros(len(grids), length)
    for i, (high, wide) in enumerate(grids):
        rows[i, : high * wide, :2] = torch.cartesian_prod(torch.arange(high), torch.arange(wide)) + 1.0
        rows[i, high * wide :] = 0
        mask[i, : high * wide] = 1
    return rows, mask


@family
def florence2() -> Case:
    heads, inner = dict(encoder_attention_heads=4, decoder_attention_heads=4), dict(encoder_ffn_dim=148, decoder_ffn_dim=148)
    tokens = dict(pad_token_id=1, bos_token_id=0, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=None)
    layers = dict(encoder_layers=2, decoder_layers=2, max_position_embeddings=128)
    seen = dict(
        **dict(depths=[1, 1, 2], patch_size=[7, 3, 3], patch_stride=[4, 2, 2], patch_padding=[3, 1, 1]),
        **dict(patch_prenorm=[False, True, True], embed_dim=[32, 48, 64], num_heads=[2, 3, 4], num_groups=[2, 3, 4]),
        **dict(window_size=3, mlp_ratio=4.0, projection_dim=64, max_temporal_embeddings=10, max_position_embeddings=10),
    )
    decoder = config("bart", vocab_size=VOCAB, d_model=64, **heads, **inner, **layers, **tokens)
    settings = T.Florence2Config(text_config=decoder, vision_config=seen, image_token_id=IMAGE)
    return built(settings), {**with_images([17, 17], 64), "decoder_input_ids": BEGUN + 2}


KOSMOS = dict(vocab_size=VOCAB, max_position_embeddings=256, embed_dim=64, layers=2, ffn_dim=172, attention_heads=4)


def kosmos_prompt() -> dict[str, Any]:
    batch = prompt([6], around=BETWEEN, words=(4, 9))
    return {**batch, "image_embeds_position_mask": batch["input_ids"] == IMAGE}


@family
def kosmos_2() -> Case:
    seen = tower(hidden_size=48, image_size=32, patch_size=PATCH)
    settings = T.Kosmos2Config(text_config=dict(KOSMOS), vision_config=seen, latent_query_num=6)
    return built(settings), {**kosmos_prompt(), "pixel_values": noise(1, 3, 32, 32)}


@family
def kosmos_2_5() -> Case:
    seen = tower(hidden_size=48, patch_embed_hidden_size=192, head_dim=12, max_num_patches=32)
    settings = T.Kosmos2_5Config(text_config=dict(KOSMOS), vision_config=seen, latent_query_num=6)
    return built(settings), {**kosmos_prompt(), "flattened_patches": patches([(4, 5)], 192, 24)[0]}


def instruct_blip_video(decoder: Any) -> Case:
    queries = dict(vocab_size=VOCAB, hidden_size=48, num_hidden_layers=2, num_attention_heads=3, intermediate_size=108)
    settings = T.InstructBlipVideoConfig(
        vision_config=tower(intermediate_size=148, image_size=32, patch_size=PATCH),
        qformer_config=dict(**queries, cross_attention_frequency=2, max_position_embeddings=64),
        text_config=decoder,
        num_query_tokens=5,
        video_token_index=VIDEO,
    )
    asked = torch.randint(10, 400, (1, 7), generator=torch.Generator().manual_seed(5))
    batch = prompt([10], image=VIDEO, words=(0, 9)) | dict(qformer_input_ids=asked, qformer_attention_mask=torch.ones_like(asked))
    return built(settings, T.InstructBlipVideoForConditionalGeneration), {**batch, "pixel_values": noise(1, 2, 3, 32, 32)}


@family
def instructblipvideo() -> Case:
    return instruct_blip_video(config("llama", **text(num_key_value_heads=4)))


@family
def instructblipvideo_t5() -> Case:
    tokens = dict(pad_token_id=0, eos_token_id=1, decoder_start_token_id=0)
    decoder = config("t5", **T5, **tokens, feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    model, batch = instruct_blip_video(decoder)
    return model, {**batch, "decoder_input_ids": BEGUN}


@family
def blip_2() -> Case:
    decoder = config("opt", vocab_size=VOCAB, hidden_size=64, word_embed_proj_dim=64, ffn_dim=172, num_hidden_layers=2, **OPT)
    queries = dict(vocab_size=VOCAB, hidden_size=48, num_hidden_layers=2, num_attention_heads=3, intermediate_size=108)
    settings = T.Blip2Config(
        vision_config=tower(intermediate_size=148, image_size=32, patch_size=PATCH),
        qformer_config=dict(**queries, cross_attention_frequency=2),
        text_config=decoder,
        num_query_tokens=5,
        image_token_index=IMAGE,
    )
    return built(settings), with_images([5], words=(0, 9))


@family
def blip() -> Case:
    seen = tower(intermediate_size=148, image_size=32, patch_size=PATCH)
    said = text(num_key_value_heads=4, encoder_hidden_size=64, projection_dim=32, sep_token_id=3)
    settings = T.BlipConfig(vision_config=seen, text_config=said, projection_dim=32, image_text_hidden_size=32)
    return built(settings), {**prompt([], words=(9,)), "pixel_values": noise(1, 3, 32, 32)}


@family
def pp_formulanet() -> Case:
    layers = dict(encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, decoder_ffn_dim=172)
    tokens = dict(vocab_size=VOCAB, max_position_embeddings=128, forced_eos_token_id=None, decoder_start_token_id=0)
    sam = dict(hidden_size=64, output_channels=32, num_hidden_layers=2, num_attention_heads=4, image_size=64, patch_size=4)
    convs = dict(post_conv_in_channels=32, post_conv_mid_channels=48, post_conv_out_channels=64, decoder_hidden_size=64)
    settings = config(
        "pp_formulanet",
        text_config=dict(d_model=64, **layers, **tokens),
        vision_config=dict(**sam, window_size=6, global_attn_indexes=[1], mlp_dim=148, **convs),
    )
    return built(settings, start=0), dict(pixel_values=noise(2, 3, 64, 64), decoder_input_ids=BEGUN.repeat(2, 1))


@family
def mllama() -> Case:
    """A decoder that looks at tiles in some of its layers."""
    seen = dict(hidden_size=64, num_hidden_layers=2, num_global_layers=1, attention_heads=4, intermediate_size=148)
    tiles = dict(max_num_tiles=4, intermediate_layers_indices=[0], vision_output_dim=128, image_size=32, patch_size=PATCH)
    decoder = text(num_hidden_layers=3, cross_attention_layers=[1], rope_parameters=dict(rope_type="default", rope_theta=1e4))
    settings = T.MllamaConfig(vision_config=dict(**seen, **tiles), text_config=decoder, image_token_index=VOCAB)
    batch = prompt([1], image=VOCAB)
    tile_mask = torch.tensor([[[1, 1, 0, 0]]])
    looks = batch["input_ids"].new_ones(1, batch["input_ids"].shape[1], 1, 4) * tile_mask
    looks[:, :7] = 0  # before the image
    images = dict(pixel_values=noise(1, 1, 4, 3, 32, 32), aspect_ratio_ids=torch.tensor([[2]]), aspect_ratio_mask=tile_mask)
    return built(settings), {**batch, **images, "cross_attention_mask": looks}


@family
def evolla() -> Case:
    """A protein in an image's place."""
    protein = dict(vocab_size=40, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=108)
    resampler = dict(resampler_depth=1, resampler_dim_head=16, resampler_heads=4, resampler_num_latents=6, aligner_num_add_layers=1)
    settings = T.EvollaConfig(protein_encoder_config=dict(**protein, max_position_embeddings=64), **text(), **resampler)
    chain = torch.randint(5, 40, (1, 13), generator=torch.Generator().manual_seed(5))
    seen = dict(protein_input_ids=chain, protein_attention_mask=torch.ones_like(chain))
    return built(settings, T.EvollaForProteinText2Text), {**prompt([], words=(11,)), **seen}


@family
def pix2struct() -> Case:
    heads = dict(hidden_size=64, d_kv=16, d_ff=172)
    settings = T.Pix2StructConfig(
        text_config=dict(
            **dict(vocab_size=VOCAB, num_layers=2, num_heads=4, **heads),
            **dict(relative_attention_num_buckets=8, relative_attention_max_distance=32),
        ),
        vision_config=dict(num_hidden_layers=2, num_attention_heads=4, patch_embed_hidden_size=192, seq_len=32, **heads),
    )
    rows, mask = patches([(4, 6), (4, 4)], 192, 24)
    return built(settings, start=0), dict(flattened_patches=rows, attention_mask=mask, decoder_input_ids=BEGUN.repeat(2, 1))


@family
def udop() -> Case:
    settings = T.UdopConfig(**T5, max_2d_position_embeddings=64, image_size=32, patch_size=PATCH, decoder_start_token_id=0)
    corner = 0.6 * torch.rand(1, 11, 2, generator=torch.Generator().manual_seed(7))
    seen = dict(bbox=torch.cat([corner, corner + 0.3], -1), pixel_values=noise(1, 3, 32, 32))
    return built(settings, start=0), {**prompt([], words=(11,)), **seen, "decoder_input_ids": BEGUN}


@family
def t5gemma2() -> Case:
    decoder = text(head_dim=20, query_pre_attn_scalar=20, sliding_window=16, layer_types=["sliding_attention", "full_attention"])
    tokens = dict(mm_tokens_per_image=16, image_token_index=IMAGE, boi_token_index=START, eoi_token_index=END)
    encoder = dict(text_config=decoder, vision_config=siglip(patch_size=4), **tokens)
    settings = T.T5Gemma2Config(encoder=encoder, decoder=dict(decoder), image_token_index=IMAGE)
    return built(settings, start=0), {**with_images([16, 16], around=BETWEEN), "decoder_input_ids": BEGUN}


def seen_and_read(encoder: Any, decoder: Any) -> Case:
    """One of transformers' pairs of an image's encoder and a language model."""
    settings = T.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    settings.decoder_start_token_id = settings.pad_token_id = 0
    model = built(settings, T.VisionEncoderDecoderModel, start=0)
    return model, dict(pixel_values=noise(2, 3, 32, 32), decoder_input_ids=BEGUN.repeat(2, 1))


@family
def vision_encoder_decoder_gpt2() -> Case:
    decoder = config("gpt2", vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2)
    return seen_and_read(config("vit", **tower(intermediate_size=148, image_size=32, patch_size=PATCH)), decoder)


@family
def vision_encoder_decoder_trocr() -> Case:
    layers = dict(decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=172, max_position_embeddings=64)
    decoder = config("trocr", vocab_size=VOCAB, d_model=64, **layers, cross_attention_hidden_size=48, pad_token_id=1)
    return seen_and_read(config("deit", **tower(hidden_size=48, image_size=32, patch_size=PATCH)), decoder)


@family
def vision_encoder_decoder_donut() -> Case:
    windows = dict(embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4)
    layers = dict(decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=108, max_position_embeddings=64)
    decoder = config(
        "mbart", vocab_size=VOCAB, d_model=32, **layers, scale_embedding=True, add_final_layer_norm=True, pad_token_id=1
    )
    return seen_and_read(config("donut-swin", image_size=32, patch_size=2, **windows), decoder)
