"""A group's queries as rows of one head: the same numbers, and nothing is repeated."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import tiny_qwen2_vl
from tolerance import assert_close
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import StaticCache

from mmqc.compiler.record import collect_records

pytestmark = pytest.mark.usefixtures("without_inductor")


class Grouped(nn.Module):
    """Attention as transformers writes it where there is a mask."""

    def __init__(self, group: int, indexed: bool = True) -> None:
        super().__init__()
        self.group, self.indexed = group, indexed

    def repeat(self, x: Tensor) -> Tensor:
        b, h, s, d = x.shape
        wide = x[:, :, None, :, :] if self.indexed else x.unsqueeze(2)
        return wide.expand(b, h, self.group, s, d).reshape(b, h * self.group, s, d)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(q, self.repeat(k), self.repeat(v), attn_mask=mask, scale=0.3)


def compiled(module: Grouped, *args: Tensor | None) -> tuple[Tensor, int, list[str]]:
    torch._dynamo.reset()
    with collect_records() as records:
        y = torch.compile(module, backend="mmqc", fullgraph=True, dynamic=False)(*args)
    (record,) = (p for p in records[0].passes if p.name == "fold_query_groups")
    return y, len(record.sites), [str(m) for m in record.misses]


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.sampled_from([2, 4, 7]), st.integers(1, 9), st.booleans(), st.booleans())
def test_fold_query_groups__is_exact(batch: int, heads: int, group: int, length: int, masked: bool, indexed: bool) -> None:
    q = torch.randn(batch, heads * group, 1, 8, dtype=torch.float64)
    k, v = (torch.randn(batch, heads, length, 8, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(batch, 1, 1, length) < 0.7 if masked else None
    if mask is not None:
        mask[..., 0] = True
    y, sites, _ = compiled(Grouped(group, indexed), q, k, v, mask)
    assert sites == 1
    assert_close(y, Grouped(group)(q, k, v, mask))


def test_fold_query_groups__refuses_a_mask_per_head() -> None:
    q, k, v = torch.randn(1, 4, 1, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    y, sites, misses = compiled(Grouped(2), q, k, v, torch.zeros(1, 4, 1, 5))
    assert sites == 0
    assert "not one for all heads" in misses[0]
    assert_close(y, Grouped(2)(q, k, v, None))


def test_fold_query_groups__leaves_a_prompt_alone() -> None:
    q, k, v = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    torch._dynamo.reset()
    with collect_records() as records:
        torch.compile(Grouped(2), backend="mmqc", fullgraph=True)(q, k, v, torch.zeros(1, 1, 3, 5))
    assert records[0].passes == []


@torch.no_grad()
def test_fold_query_groups__finds_every_layer_of_a_decode_step() -> None:
    model, _ = tiny_qwen2_vl()
    model = model.double().eval()
    text = model.config.get_text_config()
    step = {"input_ids": torch.tensor([[7]]), "position_ids": torch.full((3, 1, 1), 3)}

    def run(call: nn.Module) -> Tensor:
        cache = StaticCache(text, max_cache_len=16)
        model(input_ids=torch.tensor([[3, 4, 5]]), past_key_values=cache)
        return call(**step, past_key_values=cache).logits

    expected = run(model)
    with collect_records() as records:
        got = run(torch.compile(model, backend="mmqc"))
    assert sum(len(p.sites) for r in records for p in r.passes if p.name == "fold_query_groups") == text.num_hidden_layers
    assert_close(got, expected)
