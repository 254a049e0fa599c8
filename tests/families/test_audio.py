"""Sounds beside images: of any length in one graph.  Inductor is left out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from float64 import relative_error
from torch import Tensor, nn
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe

from mmqc.backend import collect_records
from tests.families.grids import FRAME, HEARD, HEARS, qwen2_5_omni_thinker, qwen3_omni
from tests.families.parts import AUDIO, Batch, with_grids

SAME = 1e-5  # float32; the same sums in another order
WINDOW = 50  # half of what the tower looks at, as in the published model: its lengths are computed for it


def qwen3() -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    return qwen3_omni(WINDOW), partial(modeling_qwen3_omni_moe._get_feat_extract_output_lengths, n_window=WINDOW)


def qwen2_5() -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    model, _ = qwen2_5_omni_thinker()
    tower = next(m for name, m in model.named_modules() if name.endswith("audio_tower"))  # of the thinker or of what is in it
    return model, lambda lengths: tower._get_feat_extract_output_lengths(lengths)[1]


def heard(lengths: list[int], tokens: list[int]) -> Batch:
    """Two images, some words, and sounds of so many frames and tokens."""
    batch = with_grids(2 * FRAME, types="")
    around = (HEARD["audio_start_token_id"], HEARD["audio_end_token_id"])
    sounds = [token for n in tokens for token in (5, around[0], *[AUDIO] * n, around[1])]
    ids = torch.cat([batch["input_ids"][:1], torch.tensor([sounds])], dim=1)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    features = torch.randn(len(lengths), HEARS["num_mel_bins"], max(lengths)) * mask[:, None]
    images = {name: value for name, value in batch.items() if name in ("pixel_values", "image_grid_thw")}
    ears = {"input_features": features, "feature_attention_mask": mask}
    return images | ears | {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize("build", [qwen3, qwen2_5])
@torch.no_grad()
def test_audio__of_any_length_is_one_graph(build: Callable[[], tuple[nn.Module, Callable[[Tensor], Tensor]]]) -> None:
    """Its lengths are a sum over a mask, what the tower sees was cut and padded, and positions follow from both."""
    model, tokens_of = build()
    compiled = torch.compile(model, backend="mmqc")
    with collect_records() as records:
        for lengths in ([90, 61], [90, 61], [120, 233], [77, 40]):
            batch = heard(lengths, tokens_of(torch.tensor(lengths)).tolist())
            eager = model(**batch, use_cache=False).logits
            assert relative_error(compiled(**batch, use_cache=False).logits, eager) < SAME
    assert len(records) == 1
