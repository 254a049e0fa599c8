"""NaN and infinity in activations: by token they come out by themselves, through static scales where that is asked for."""

import copy
from typing import Any

import pytest
import torch
from quantized_vlm import quantized_vlm
from small_vlm import logits
from torch import Tensor, nn

import mmqc
from mmqc import recipes
from mmqc.cli import evaluation
from mmqc.ops import nonfinite
from mmqc.ops.nonfinite import propagate_nonfinite

DAMAGED = [False, False, True, False, False, True, False, False]


class Net(nn.Module):
    """Three linears."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(nn.functional.gelu(self.b(torch.relu(self.a(x)))))


def example(config: Any) -> tuple[nn.Module, nn.Module, mmqc.QuantReport, Tensor, Tensor]:
    """A float model, the same quantized, the report, and a batch without and with damaged rows."""
    torch.manual_seed(0)
    model, x = Net().eval(), torch.randn(8, 32)
    quantized = copy.deepcopy(model)
    report = mmqc.quantize_(quantized, config.replace(keep=()), [{"x": x}], progress=False)
    bad = x.clone()
    bad[2, 3], bad[5, 1] = float("nan"), float("inf")
    return model, quantized, report, x, bad


def rows(y: Tensor) -> list[bool]:
    """Which rows of a result are not finite."""
    return (~y.isfinite()).any(-1).tolist()


@torch.no_grad()
@pytest.mark.parametrize("float8", [False, True])
@pytest.mark.parametrize("how", ["eager", "compiled", "by itself"])
def test_static_scales__damaged_rows_come_out_as_nan(how: str, float8: bool, without_inductor: None) -> None:
    config = recipes.rtn(8, 8)
    model, quantized, report, x, bad = example(config.with_float8() if float8 else config)
    options: Any = {"config": report.config} if how == "by itself" else None
    source = model if how == "by itself" else quantized
    call = quantized if how == "eager" else torch.compile(source, backend="mmqc", options=options)
    plain = call(x)
    for _ in range(2):
        with propagate_nonfinite():
            assert rows(call(bad)) == DAMAGED
            torch.testing.assert_close(call(x), plain, rtol=0, atol=0)
        assert rows(call(bad)) != DAMAGED, "at no cost, so not without being asked"
        torch.testing.assert_close(call(x), plain, rtol=0, atol=0)


@torch.no_grad()
def test_static_scales__through_inductor() -> None:
    _, quantized, _, x, bad = example(recipes.rtn(8, 8))
    compiled = torch.compile(quantized, backend="mmqc")
    with propagate_nonfinite():
        assert rows(compiled(bad)) == DAMAGED
        torch.testing.assert_close(compiled(x), quantized(x), rtol=0, atol=0)


@torch.no_grad()
@pytest.mark.parametrize("compiled", [False, True])
def test_scales_by_token__need_no_switch(compiled: bool) -> None:
    torch.manual_seed(0)
    codes, scale = torch.randint(-8, 8, (24, 32), dtype=torch.int8), torch.rand(24, 2)
    parts = [codes[:, :20].contiguous(), codes[:, 20:].contiguous()]
    sums = torch.stack([p.sum(1, dtype=torch.int32) for p in parts], 1)

    def linear(x: Tensor) -> Tensor:
        x_q, s, o = torch.ops.mmqc.quantize_per_token(x, None, [20, 12], [4, 8])
        return torch.ops.mmqc.mixed_matmul(x_q, s, o, parts, scale, sums, None, [20, 12], [8, 8], x.dtype)

    bad = torch.randn(8, 32)
    bad[2, 3], bad[5, 31] = float("nan"), -float("inf")
    assert rows((torch.compile(linear, backend="mmqc") if compiled else linear)(bad)) == DAMAGED


@pytest.mark.slow
@torch.no_grad()
def test_vlm__compiled_with_all_fusions(without_inductor: None) -> None:
    model, batch = quantized_vlm(8, depth=1)
    pixels = batch["pixel_values"].clone()
    pixels[0, 0] = float("nan")
    compiled = torch.compile(model, backend="mmqc")
    with propagate_nonfinite():
        for call in (model, compiled):
            assert logits(call, {**batch, "pixel_values": pixels}).isnan().any()
            assert logits(call, batch).isfinite().all()


def test_evaluation__asks_for_it() -> None:
    seen = []

    class Model(nn.Module):
        def forward(self, **inputs: Any) -> Any:
            seen.append(nonfinite.propagating)
            raise KeyboardInterrupt

    class Tokenizer:
        def encode(self, text: str) -> list[int]:
            return [1, 2, 3]

    model = Model()
    model.p = nn.Parameter(torch.zeros(1))
    with pytest.raises(KeyboardInterrupt):
        evaluation.text_nll(model, Tokenizer(), "")
    assert seen == [True]
    assert nonfinite.propagating is False


def test_explain__names_the_linears(without_inductor: None) -> None:
    _, quantized, _, x, bad = example(recipes.rtn(8, 8))
    assert mmqc.explain(quantized, {"x": x}).nonfinite == []
    explained = mmqc.explain(quantized, {"x": bad})
    assert explained.nonfinite == ["a", "b", "c"]
    assert "NaN or infinity meets static scales" in str(explained)


@pytest.mark.parametrize("by", ["channel", "token", "tensor"])
def test_packed_cache__nan_and_infinity_are_in_the_range(by: str) -> None:
    x = torch.randn(1, 2, 16, 8)
    x[0, 0, 3, 5], x[0, 1, 7, 2] = float("nan"), float("inf")
    order, count = torch.arange(16)[None], torch.tensor([16])
    _, scale, offset = torch.ops.mmqc.kv_pack(x, order, count, 4, by, 1.0, False)
    lost = ~(scale + offset).isfinite()
    assert lost.any(0).any(-1).any(-1).all()
    assert lost.all() if by == "tensor" else not lost.all()
