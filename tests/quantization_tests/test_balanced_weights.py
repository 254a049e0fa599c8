import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_vlm import IMAGE, Small

from mmqc.quantization.balanced_weights import balanced_weights


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 4)), min_size=1, max_size=4))
def test_balanced_weights__text_counts_as_much_all_in_all(batches: list[tuple[int, int, int]]) -> None:
    """Of each batch: visual tokens, others, and hidden ones of either kind in front."""
    made = []
    for visual, text, hidden in batches:
        ids = torch.tensor([[IMAGE, 1] * hidden + [IMAGE] * visual + [1] * text])
        made.append({"input_ids": ids, "attention_mask": torch.ones_like(ids).index_fill(1, torch.arange(2 * hidden), 0)})
    visual, text = (sum(b[i] for b in batches) for i in (0, 1))
    if not visual or not text:
        absent = "visual" if not visual else "text"
        assert balanced_weights(Small(), made) == f"no batch of calibration has a {absent} token"
        return
    weights = balanced_weights(Small(), made)
    assert isinstance(weights, dict)
    mantissa, _ = math.frexp(weights["text"])
    assert mantissa == 0.5  # a power of two
    assert weights["text"] >= 1
    assert visual < text or abs(math.log2(weights["text"] * text / visual)) <= 0.5


@pytest.mark.parametrize(
    ("batch", "ids", "message"),
    [
        ({"inputs_embeds": torch.zeros(1, 2, 4)}, IMAGE, "batch 0 has no input_ids"),
        ({"input_ids": torch.ones(1, 2)}, None, "the config of Small names no image or video token"),
    ],
)
def test_balanced_weights__says_what_it_cannot_count(batch: dict[str, Any], ids: int | None, message: str) -> None:
    model = Small()
    model.config.image_token_id = ids
    said = balanced_weights(model, [batch])
    assert isinstance(said, str)
    assert message in said
