"""One new token's attention as the op that reads what its mask shows: the same numbers, and what is left alone."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerance import assert_close
from torch import Tensor, nn
from torch.nn import functional as F

from mmqc import pipeline
from mmqc.compiler.record import collect_records
from mmqc.passes.split_attention import SplitAttention

pytestmark = pytest.mark.usefixtures("without_inductor")


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "SplitAttention", lambda: SplitAttention(("cpu",)))


class Attention(nn.Module):
    """With these arguments."""

    def __init__(self, **more: Any) -> None:
        super().__init__()
        self.more = more

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **self.more)


def compiled(module: nn.Module, *args: Tensor | None, dynamic: bool | None = False) -> tuple[Tensor, int, list[str]]:
    torch._dynamo.reset()
    with collect_records() as records, torch.no_grad():
        y = torch.compile(module, backend="mmqc", fullgraph=True, dynamic=dynamic)(*args)
    record = next(p for p in records[0].passes if p.name == "split_attention")
    return y, len(record.sites), [str(m) for m in record.misses]


def operands(batch: int = 2, heads: int = 2, length: int = 7, rows: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(batch, heads, rows, 8, dtype=torch.float64)
    return q, *(torch.randn(batch, heads, length, 8, dtype=torch.float64) for _ in range(2))


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 9), st.booleans(), st.sampled_from([None, 0.3]))
def test_split_attention__is_exact(batch: int, heads: int, length: int, masked: bool, scale: float | None) -> None:
    q, k, v = operands(batch, heads, length)
    mask = torch.rand(batch, 1, 1, length) < 0.7 if masked else None
    if mask is not None:
        mask[..., 0] = True
    module = Attention(scale=scale)
    y, sites, _ = compiled(module, q, k, v, mask)
    assert sites == 1
    assert_close(y, module(q, k, v, mask))


def test_split_attention__takes_the_heads_of_a_group() -> None:
    """What fold_query_groups leaves."""

    class Grouped(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
            k, v = (x[:, :, None, :, :].expand(2, 2, 3, 7, 8).reshape(2, 6, 7, 8) for x in (k, v))
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    q, (_, k, v) = torch.randn(2, 6, 1, 8, dtype=torch.float64), operands()
    mask = torch.ones(1, 1, 1, 7, dtype=torch.bool)
    y, sites, _ = compiled(Grouped(), q, k, v, mask)
    assert sites == 1
    assert_close(y, Grouped()(q, k, v, mask))


def test_split_attention__each_tensor_may_have_a_symbol_of_its_own() -> None:
    """Caches that grew are of sizes that Dynamo does not know to be equal."""

    class Cached(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k[:, :, 1:], v[:, :, : k.shape[2] - 1], attn_mask=mask)

    for module in (Attention(), Cached()):
        q, k, v = operands()
        mask = torch.ones(2, 1, 1, 7 if isinstance(module, Attention) else 6, dtype=torch.bool)
        for tensor, dim in ((q, 0), (k, 0), (k, 2), (v, 0), (v, 2), (mask, 0), (mask, 3)):
            torch._dynamo.mark_dynamic(tensor, dim)
        y, sites, misses = compiled(module, q, k, v, mask, dynamic=None)
        assert sites == 1, misses
        assert_close(y, module(q, k, v, mask))


@pytest.mark.parametrize(
    ("more", "mask", "why"),
    [
        ({"is_causal": True}, None, "causal"),
        ({}, torch.zeros(2, 1, 1, 7, dtype=torch.float64), "numbers"),
        ({}, torch.ones(2, 2, 1, 7, dtype=torch.bool), "not one for all rows"),
    ],
)
def test_split_attention__leaves_other_attentions_alone(more: dict[str, Any], mask: Tensor | None, why: str) -> None:
    q, k, v = operands()
    y, sites, misses = compiled(Attention(**more), q, k, v, mask)
    assert sites == 0
    assert why in misses[0]
    assert_close(y, Attention(**more)(q, k, v, mask))


def test_split_attention__leaves_what_wants_gradients() -> None:
    q, k, v = operands()
    torch._dynamo.reset()
    with collect_records() as records:
        torch.compile(Attention(), backend="mmqc", fullgraph=True)(q.requires_grad_(), k, v, None).sum().backward()
    record = next(p for p in records[0].passes if p.name == "split_attention")
    assert not record.sites
    assert q.grad is not None


def test_split_attention__is_for_cuda() -> None:
    assert SplitAttention().devices == ("cuda",)
