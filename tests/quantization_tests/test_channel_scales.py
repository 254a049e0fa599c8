"""AWQ in ``quantize_``: the factors that explicit inputs give, an unchanged function, and the same on the backend's way."""

import copy
import functools
from typing import Any

import pytest
import torch
from float64 import relative_error
from models import tiny_qwen2_vl
from torch import Tensor, nn
from torchao.quantization.granularity import PerGroup

import mmqc
from mmqc import recipes
from mmqc.config import ChannelScales, QuantConfig, Rewrites, Scheme, WeightSpec
from mmqc.nn.linear import QuantLinear
from mmqc.quantization import channel_scales

ROUNDING = 1e-4  # float32, some dozen layers deep: other factors round other weights, and some code falls on the other side


@torch.no_grad()
def logits(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    return model(**batch).logits


def loud(model: nn.Module) -> nn.Module:
    """Some channels of every normed stream and gated product are large, as in trained models."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name and name.endswith("weight"):
                p[::7] *= 3
            if name.endswith("up_proj.weight"):
                p[::9] *= 3
    return model


def batches() -> list[dict[str, Tensor]]:
    return [tiny_qwen2_vl(grids=g)[1] for g in (((1, 4, 6), (1, 8, 4)), ((1, 4, 4),))]


@functools.cache
def scaled() -> tuple[nn.Module, nn.Module, mmqc.QuantReport]:
    """(before, after, report) of AWQ's factors with 8-bit rounding."""
    model = loud(tiny_qwen2_vl()[0])
    before = copy.deepcopy(model)
    config = recipes.awq(8, 32, solver="rtn")
    return before, model, mmqc.quantize_(model, config, batches(), progress=False)


def test_quantize__awq_scales_both_towers_and_the_projector() -> None:
    _, after, report = scaled()
    (record,) = [r for r in report.passes if r.name == "fold_channel_scale" and (r.sites or r.misses)]
    written = "\n".join(record.sites)
    for place in ("visual.blocks.1.norm2.weight", "merger.ln_q.weight", "layers.1.input_layernorm.weight", "up_proj.weight"):
        assert place in written
    assert {m.reason for m in record.misses} >= {"gelu makes its input"}
    assert report.rewrite_error < ROUNDING
    rows = {layer.fqn: layer.transforms for layer in report.layers}
    assert rows["model.language_model.layers.0.mlp.up_proj"] == ("channel scale in", "channel scale out")
    assert isinstance(after.get_submodule("model.visual.merger.mlp.0"), QuantLinear)


def test_quantize__awq_computes_the_same_function_but_for_rounding() -> None:
    before, after, _ = scaled()
    _, other = tiny_qwen2_vl(grids=((1, 6, 4), (1, 8, 8)))
    plain = copy.deepcopy(before)
    mmqc.quantize_(plain, recipes.rtn(8, group_size=32), batches(), progress=False)
    expected = logits(before, other)
    assert relative_error(logits(after, other), expected) < relative_error(logits(plain, other), expected)


def test_quantize__awq_factors_are_those_of_the_inputs_themselves() -> None:
    before, after, report = scaled()
    name = "model.language_model.layers.1.post_attention_layernorm"
    mlp, seen = before.get_submodule("model.language_model.layers.1.mlp"), []
    handle = mlp.register_forward_pre_hook(lambda m, args: seen.append(args[0].detach().reshape(-1, 96).double()))
    for batch in batches():
        logits(before, batch)
    handle.remove()
    x, errors, factors = torch.cat(seen), [], []
    for i in range(20):
        s = x.abs().mean(0) ** (i / 20)
        factors.append(s / (s.max() * s.min()).sqrt())
        error = 0.0
        for linear in (mlp.gate_proj, mlp.up_proj):
            w = linear.weight.detach().double()
            groups = (w * factors[-1]).unflatten(1, (-1, 32))
            step = groups.abs().amax(-1, keepdim=True) / 127
            values = ((groups / step).round() * step).flatten(1) / factors[-1]
            error += float((x @ (values - w).T).square().sum())
        errors.append(error)
    best = min(range(20), key=errors.__getitem__)
    (site,) = [s for r in report.passes for s in r.sites if s.startswith(name)]
    assert f"alpha {best / 20:g}," in site
    assert best
    ratio = before.get_submodule(name).weight.double() / after.get_submodule(name).weight.double()
    assert relative_error(ratio, factors[best]) < ROUNDING


BLOCK = "model.language_model.layers.1"
READERS = {
    "input_layernorm": ("self_attn", ("q_proj", "k_proj", "v_proj")),
    "post_attention_layernorm": ("mlp", ("gate_proj", "up_proj")),
}


def rounded(w: Tensor, s: Tensor, bits: int, group: int) -> Tensor:
    """Q(W diag(s)) diag(1/s), symmetric, in groups."""
    groups, top = (w * s).unflatten(1, (-1, group)), 2 ** (bits - 1) - 1
    step = groups.abs().amax(-1, keepdim=True) / top
    return ((groups / step).round() * step).flatten(1) / s


@torch.no_grad()
def block_errors(before: nn.Module, norm: str, weights: dict[str, float], bits: int, group: int) -> list[float]:
    """For every exponent the error of what attention or MLP of ``BLOCK`` return, from whole forwards of the model."""
    place, names = READERS[norm]
    model = copy.deepcopy(before)
    module = model.get_submodule(f"{BLOCK}.{place}")
    seen: list[Tensor] = []
    module.register_forward_hook(lambda m, args, out: seen.append((out if isinstance(out, Tensor) else out[0]).detach()))
    source = model.get_submodule(f"{BLOCK}.{norm}")
    x: list[Tensor] = []
    handle = source.register_forward_hook(lambda m, args, out: x.append(out.detach().reshape(-1, out.shape[-1])))
    visual = [(b["mm_token_type_ids"] > 0).reshape(-1) for b in batches()]
    for batch in batches():
        logits(model, batch)
    handle.remove()
    rows = torch.cat([torch.where(v, weights["visual"], weights["text"]) for v in visual]).double()
    mean = (rows[:, None] * torch.cat(x).double().abs()).sum(0) / rows.sum()
    wanted = [y.reshape(-1, y.shape[-1]).double() for y in seen]
    plain = {n: module.get_submodule(n).weight.detach().clone() for n in names}
    errors = []
    for i in range(20):
        s = mean ** (i / 20)
        s = (s / (s.max() * s.min()).sqrt()).float()
        for n in names:
            module.get_submodule(n).weight.copy_(rounded(plain[n], s, bits, group))
        seen.clear()
        for batch in batches():
            logits(model, batch)
        error = torch.cat([(y.reshape(w.shape).double() - w).square().sum(1) for y, w in zip(seen, wanted, strict=True)])
        errors.append(float((rows * error).sum()))
    return errors


@pytest.mark.slow
@pytest.mark.parametrize("visual", [1.0, 1e-3], ids=["equal", "text"])
def test_quantize__awq_by_block_is_whole_forwards_choice(visual: float) -> None:
    weights = {"visual": visual, "text": 1.0}
    before, _, _ = scaled()
    model = copy.deepcopy(before)
    config = recipes.awq(3, 32, solver="rtn", loss="block")
    report = mmqc.quantize_(model, config, batches(), progress=False, modality_weights=weights)
    written = [s for p in report.passes if p.name == "fold_channel_scale" for s in p.sites]
    for norm, (place, _) in READERS.items():
        errors = block_errors(before, norm, weights, 3, 32)
        best = min(range(20), key=errors.__getitem__)
        (site,) = [s for s in written if s.startswith(f"{BLOCK}.{norm}")]
        assert f"alpha {best / 20:g}, output error x {errors[best] / errors[0]:.3f} of {BLOCK}.{place}" in site
        assert best
    (alone,) = [s for s in written if "layers.1.mlp.down_proj" in s.partition(" -> ")[2]]
    assert " of " not in alone  # a linear behind no norm is judged by its own output
    assert any(f"of model.visual.blocks.{i}.attn" in s for i in (0, 1) for s in written)  # a fused qkv by its attention


@pytest.mark.slow
def test_quantize__awq_without_blocks_chooses_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    before, _, _ = scaled()
    found = []
    for streamed in (True, False):
        if not streamed:
            monkeypatch.setattr(channel_scales._Search, "by_blocks", lambda *args: None)
        report = mmqc.quantize_(copy.deepcopy(before), recipes.awq(3, 32, loss="block"), batches(), progress=False)
        found.append({s for p in report.passes if p.name == "fold_channel_scale" for s in p.sites})
    assert found[0] == found[1]


def test_quantize__rounds_of_little_memory_choose_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    before, _, report = scaled()
    monkeypatch.setattr(channel_scales, "MOMENT_BYTES", 1)
    again = copy.deepcopy(before)
    twice = mmqc.quantize_(again, recipes.awq(8, 32, solver="rtn"), batches(), progress=False)
    sites = [[s for p in r.passes if p.name == "fold_channel_scale" for s in p.sites] for r in (report, twice)]
    assert sites[0] == sites[1]


@pytest.mark.slow
@pytest.mark.usefixtures("without_inductor")
def test_self_quantize__follows_the_factors_of_the_report() -> None:
    before, after, report = scaled()
    config = QuantConfig.from_dict(report.config.to_dict())
    batch = batches()[0]
    compiled = torch.compile(copy.deepcopy(before), backend="mmqc", options={"config": config})
    expected = logits(after, batch)
    actual = logits(compiled, batch)
    assert relative_error(actual, expected) < ROUNDING < relative_error(logits(before, batch), expected)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(recipes.awq(2, 32, solver="gptq"), marks=pytest.mark.slow),
        recipes.awq(3, 40, symmetric=False, duo=True, shared_heads="skip"),
        pytest.param(recipes.gptq(4, 32, act_order=False, static_groups=False, symmetric=False), marks=pytest.mark.slow),
    ],
    ids=["awq + gptq", "asymmetric", "dynamic gptq"],
)
def test_recipes__run_and_beat_rounding(config: QuantConfig, tmp_path: Any) -> None:
    before, _, _ = scaled()
    spec = config.schemes["language"].weight
    scheme = Scheme(WeightSpec(spec.bits, PerGroup(spec.group_size), symmetric=spec.symmetric))
    plain, model = copy.deepcopy(before), copy.deepcopy(before)
    mmqc.quantize_(plain, QuantConfig(scheme, scheme, scheme), batches(), progress=False)
    report = mmqc.quantize_(model, config, batches(), progress=False)
    batch = batches()[0]
    expected = logits(before, batch)
    assert relative_error(logits(model, batch), expected) < relative_error(logits(plain, batch), expected)
    if spec.group_size == 40:
        assert "the last group has 16 of 40 input channels" in {layer.note for layer in report.layers}
        model.save_pretrained(tmp_path)
        again = type(model).from_pretrained(tmp_path)
        assert torch.equal(logits(again, batch), logits(model, batch))


@pytest.mark.slow
def test_recipes__learned_scales_where_inputs_have_outliers_alone() -> None:
    """In the second layer one channel between ``up_proj`` and ``down_proj`` is a hundred times larger than the others."""
    model = tiny_qwen2_vl()[0]
    with torch.no_grad():
        model.get_parameter("model.language_model.layers.1.mlp.up_proj.weight")[5] *= 100
    calibration, reports = batches(), {}
    for at_most in (0.5, None):
        quantized = copy.deepcopy(model)
        reports[at_most] = mmqc.quantize_(quantized, recipes.learned(2, 8, steps=2, at_most=at_most), calibration, progress=False)
    (record,) = [r for r in reports[0.5].passes if r.name == "fold_channel_scale" and (r.sites or r.misses)]
    readers = {site.partition(" -> ")[2].partition(":")[0] for site in record.sites}
    assert "model.language_model.layers.1.mlp.down_proj.weight" in readers
    assert all("layers.1.mlp" in name for name in readers)
    left = {miss.fqn for miss in record.misses if miss.reason.startswith("no scale: the best one leaves output error x 0.")}
    assert "model.language_model.layers.0.mlp.down_proj.weight" in left
    assert "fold_channel_scale" not in {r.name for r in reports[None].passes}


def test_recipes__awq_and_gptq() -> None:
    config = recipes.awq()
    assert config.rewrites == Rewrites(scales=ChannelScales())
    assert str(config.language) == "W4A16-g128"
    assert config.needs_calibration
    assert recipes.awq(8, None, solver="rtn").needs_calibration
    assert not recipes.awq(8, None, solver="rtn").replace(statistics={}).needs_calibration
    weight = recipes.gptq(3, act_order=False, damping=0.1).vision.weight
    assert weight == WeightSpec(3, solver="gptq", act_order=False, damping=0.1)
