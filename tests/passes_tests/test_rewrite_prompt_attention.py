"""A prompt's causal attention as the call for packed sequences: the same numbers at any length, and what is left alone."""

from typing import Any

import pytest
import torch
from tolerance import assert_close
from torch import Tensor, nn
from torch.nn import functional as F

from mmqc.compiler import run_time
from mmqc.compiler.record import collect_records
from mmqc.kernels.attention import variable_length
from mmqc.passes import rewrite_prompt_attention

pytestmark = pytest.mark.usefixtures("without_inductor")


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrite_prompt_attention, "has_kernel", lambda q: q.dim() == 4)


class Layers(nn.Module):
    """Attentions one after the other, with these arguments; the first ``skip`` tokens are no queries."""

    def __init__(self, layers: int = 3, kv_heads: int = 4, skip: int = 0, **more: Any) -> None:
        super().__init__()
        self.layers, self.kv_heads, self.skip, self.more = layers, kv_heads, skip, {"is_causal": True, **more}

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = x.split((4, self.kv_heads, self.kv_heads), 1)
        q = q[:, :, self.skip :]
        for _ in range(self.layers):
            q = q + F.scaled_dot_product_attention(q, k, v, **self.more)
        return q


def tokens(length: int, kv_heads: int = 4, batch: int = 1) -> Tensor:
    return torch.randn(batch, 4 + 2 * kv_heads, length, 8, dtype=torch.float64)


def compiled(module: nn.Module, x: Tensor, *, any_length: bool = False) -> tuple[Any, Tensor, Any]:
    torch._dynamo.reset()
    if any_length:
        torch._dynamo.mark_dynamic(x, 2)
    with collect_records() as records, torch.no_grad():
        run = torch.compile(module, backend="mmqc", fullgraph=True)
        y = run(x)
    return run, y, next((p for p in records[0].passes if p.name == "rewrite_prompt_attention"), None)


@pytest.mark.parametrize(("kv_heads", "scale"), [(4, None), (2, 0.3), (1, None)])
def test_rewrite_prompt_attention__is_exact_at_any_length_by_one_program(kv_heads: int, scale: float | None) -> None:
    module, x = Layers(kv_heads=kv_heads, scale=scale, enable_gqa=True), tokens(7, kv_heads)
    run, y, record = compiled(module, x, any_length=True)
    assert len(record.sites) == 3
    assert_close(y, module(x))
    with torch._dynamo.config.patch(error_on_recompile=True), torch.no_grad():
        for length in (12, 3, 31):
            x = tokens(length, kv_heads)
            assert_close(run(x), module(x))


def test_rewrite_prompt_attention__makes_the_ends_once_in_front_of_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.fx.Graph] = []
    rewritten = run_time.rewrite_at_run_time

    def watched(*args: Any, **more: Any) -> Any:
        found = rewritten(*args, **more)
        seen.append(found.gm.graph)
        return found

    monkeypatch.setattr("mmqc.backend.rewrite_at_run_time", watched)
    compiled(Layers(), tokens(7), any_length=True)
    names = [str(n.target) for n in seen[0].nodes if n.op != "placeholder"]
    assert sum("arange" in name for name in names) == 1
    assert "arange" in names[0]
    assert all("example_value" in n.meta for n in seen[0].nodes if n.op != "output")  # regions are cut by them
    calls = [n for n in seen[0].nodes if "mmqc_front" in str(n.target)]
    assert len(calls) == 3
    assert all(n.args[3] is n.args[4] is calls[0].args[3] for n in calls)  # the kernel knows by it: keys end where queries do


@pytest.mark.parametrize(
    ("batch", "more", "why"), [(2, {}, "several sequences"), (1, {"skip": 2}, "not as many"), (1, {"dropout_p": 0.5}, "drops")]
)
def test_rewrite_prompt_attention__leaves_others(batch: int, more: dict[str, Any], why: str) -> None:
    *_, record = compiled(Layers(1, **more), tokens(7, batch=batch))
    assert not record.sites
    assert [why in str(miss) for miss in record.misses] == [True]


@pytest.mark.parametrize("more", [{"is_causal": False}, {"is_causal": False, "attn_mask": torch.ones(7, 7, dtype=torch.bool)}])
def test_rewrite_prompt_attention__does_not_look_at_what_is_not_causal(more: dict[str, Any]) -> None:
    *_, record = compiled(Layers(1, **more), tokens(7))
    assert record is None


def test_rewrite_prompt_attention__leaves_what_wants_gradients() -> None:
    torch._dynamo.reset()
    with collect_records() as records:
        y = torch.compile(Layers(1), backend="mmqc", fullgraph=True)(tokens(7).requires_grad_())
    assert y.requires_grad
    record = next(p for p in records[0].passes if p.name == "rewrite_prompt_attention")
    assert "gradients" in str(record.misses[0])


def test_has_kernel__is_not_on_a_cpu() -> None:
    assert not variable_length.has_kernel(torch.empty(1, 2, 3, 64, dtype=torch.bfloat16))
