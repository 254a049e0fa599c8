import copy
import functools
from typing import Any

import pytest
import torch
from float64 import EXACT, output_of, relative_error, to_float64
from models import tiny_qwen2_vl
from small_vlm import Small, batches, logits, quantize
from torch import Tensor, nn

import mmqc
from mmqc import recipes
from mmqc.config import ActivationSpec, QuantConfig, Rewrites, Scheme, WeightSpec
from mmqc.nn.linear import HadamardLinear, QuantLinear, RMSNorm
from mmqc.nn.modality import attached

SMALL = 0.08  # relative error of the logits: 1 % for each rounding of weights and inputs, some dozen of them in a row


# --- exact rewrites ---------------------------------------------------------------------------------------------------


@functools.cache
def rotated() -> tuple[nn.Module, nn.Module, dict[str, Any], mmqc.QuantReport]:
    """(before, after, batch, report) of rotate() on a tiny Qwen2-VL in float64."""
    model, batch = to_float64(*tiny_qwen2_vl())
    before = copy.deepcopy(model)
    report = mmqc.quantize_(model, recipes.rotate(), [batch], progress=False)
    return before, model, batch, report


def test_quantize__rotate_is_exact() -> None:
    before, after, batch, _ = rotated()
    assert relative_error(output_of(after, batch), output_of(before, batch)) < EXACT


def test_quantize__rotate_is_exact_on_another_batch() -> None:
    before, after, _, _ = rotated()
    _, other = to_float64(*tiny_qwen2_vl(grids=((1, 6, 4), (1, 4, 4), (2, 4, 4))))
    assert relative_error(output_of(after, other), output_of(before, other)) < EXACT


def test_quantize__rotate_reaches_both_streams() -> None:
    before, after, _, report = rotated()
    words = {fqn: axes for r in report.passes if r.name == "fuse_rotation" for fqn in r.sites for axes in [fqn]}
    assert any(site.startswith("space of 96: 6 writers, 11 readers, 5 norms") for site in words)
    assert any(site.startswith("space of 64: 5 writers, 5 readers, 5 norms") for site in words)
    old, new = before.state_dict(), after.state_dict()
    changed = [k for k in old if k in new and k.endswith("weight") and torch.equal(old[k], new[k])]
    assert changed == []
    norms = [m for m in after.modules() if "norm" in type(m).__name__.lower() and getattr(m, "weight", None) is not None]
    assert len(norms) == 10
    assert all(m.weight.eq(1).all() for m in norms)
    assert sum(isinstance(m, RMSNorm) for m in norms) == 5
    assert sum(isinstance(m, HadamardLinear) for m in after.modules()) == 5
    assert not any(isinstance(m, nn.LayerNorm) for m in after.modules())


def test_quantize__tied_head_is_untied_and_reported() -> None:
    before, after, _, _ = rotated()
    assert before.lm_head.weight is before.get_input_embeddings().weight
    assert after.lm_head.weight is not after.get_input_embeddings().weight
    record = after.config.quantization_config.record
    assert {"lm_head.weight", "model.language_model.embed_tokens.weight"} & set(record["untied"])
    assert after.config.quantization_config.untied


def test_quantize__fold_of_two_norms_into_one_linear() -> None:
    class Two(nn.Module):
        """One linear reads an RMSNorm and, beside it, a LayerNorm with bias: its weight and bias change in turns."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Embedding(20, 8), nn.Embedding(20, 8)
            self.rms, self.layer, self.head = nn.RMSNorm(8, eps=1e-6), nn.LayerNorm(8), nn.Linear(16, 8)
            for p in (*self.rms.parameters(), *self.layer.parameters()):
                nn.init.uniform_(p, 0.5, 1.5)

        def forward(self, input_ids: Tensor, use_cache: bool = True) -> Tensor:
            return self.head(torch.cat((self.rms(self.a(input_ids)), self.layer(self.b(input_ids))), -1))

    torch.manual_seed(0)
    model, batch = to_float64(Two(), {"input_ids": torch.arange(10)[None]})
    before = output_of(model, batch)
    mmqc.quantize_(model, QuantConfig(rewrites=Rewrites(fold_norms=True)), [batch], progress=False)
    assert model.head.bias.abs().max() > 0
    assert relative_error(output_of(model, batch), before) < EXACT


def test_quantize__module_in_two_places_is_swapped_in_both() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.up, self.down = nn.Embedding(20, 8), nn.Linear(8, 16), nn.Linear(16, 8)
            self.norm, self.same_down = nn.LayerNorm(8), self.down
            self.same_norm = self.norm

        def forward(self, input_ids: Tensor, use_cache: bool = True) -> Tensor:
            x = self.embed(input_ids)
            x = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
            return x + self.same_down(nn.functional.gelu(self.up(self.same_norm(x))))

    torch.manual_seed(0)
    model, batch = to_float64(Twice(), {"input_ids": torch.arange(10)[None]})
    before = output_of(model, batch)
    mmqc.quantize_(model, recipes.rotate(), [batch], progress=False)
    assert isinstance(model.down, HadamardLinear)
    assert model.same_down is model.down
    assert model.same_norm is model.norm
    assert relative_error(output_of(model, batch), before) < EXACT


# --- quantizing -------------------------------------------------------------------------------------------------------


@functools.cache
def tiny() -> tuple[nn.Module, nn.Module, dict[str, Any], mmqc.QuantReport]:
    """(before, after, batch, report) of mquant(8) with rounding on a tiny Qwen2-VL."""
    model, batch = tiny_qwen2_vl()
    before = copy.deepcopy(model)
    _, other = tiny_qwen2_vl(grids=((1, 8, 8),))
    report = mmqc.quantize_(model, recipes.mquant(8, solver="rtn"), [batch, other], progress=False)
    return before, model, batch, report


def test_quantize__logits_stay_close() -> None:
    before, after, batch, _ = tiny()
    assert relative_error(logits(after, batch), logits(before, batch)) < SMALL


def test_quantize__msq_scales_by_tower() -> None:
    _, after, _, report = tiny()
    counts: dict[str, set[int]] = {}
    for layer in report.layers:
        linear = after.get_submodule(layer.fqn)
        counts.setdefault(layer.tower, set()).add(linear.input_scale.numel())
        assert (linear.modality is not None) == (layer.tower == "language")
    assert counts == {"vision": {1}, "projector": {1}, "language": {2}}
    assert attached(after) is not None


def test_quantize__report_fields() -> None:
    _, after, _, report = tiny()
    quantized = {n for n, m in after.named_modules() if isinstance(m, QuantLinear)}
    assert {layer.fqn for layer in report.layers} == quantized
    assert {len(t) for t in report.by_tower().values()} == {2, 8, 14}
    assert report.size_after < report.size_before
    assert report.seconds > 0
    assert [r.name for r in report.passes] == [
        "raise_ops",
        "raise_linear",
        "fold_layer_scale",
        "fold_norm_mean",
        "fold_norm_scale",
        "fuse_rotation",
        "fold_signs",
        "insert_hadamard",
        "assign_scheme",
        "suppress_magnitude",
        "quantize_weights",
        "quantize_activations",
    ]
    assert [str(r) for r in report.refused] == ["lm_head (node linear_24): assign_scheme: kept in floating point (lm_head)"]
    for layer in report.layers:
        assert layer.scheme == "W8A8"
        assert layer.worst_sqnr > 20
        assert set(layer.sqnr) == ({"text", "visual"} if layer.tower == "language" else {"visual"})
        assert set(layer.ranges) == set(layer.sqnr)
        assert all(low <= high for low, high in layer.ranges.values())
        assert all(0 <= share < 0.01 for share in layer.saturated.values())
        assert 0 < layer.weight_error < 2**-6
    linears = report.config.statistics["linears"]
    assert {fqn.removesuffix(".weight") for fqn in linears} == quantized
    assert QuantConfig.from_dict(report.config.to_dict()) == report.config


def test_quantize__scale_is_the_range_of_the_linears_own_input() -> None:
    _, after, _, report = tiny()
    layer = next(x for x in report.layers if x.tower == "language" and x.role == "in")
    text, visual = after.get_submodule(layer.fqn).input_scale.tolist()
    for scale, modality in ((text, "text"), (visual, "visual")):
        low, high = layer.ranges[modality]
        assert scale == pytest.approx(max(-low / 128, high / 127), rel=torch.finfo(torch.float32).eps)


def test_quantize__twice_is_the_same() -> None:
    states = []
    for _ in range(2):
        model = Small()
        quantize(model, recipes.mquant(4))
        states.append(model.state_dict())
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(a, b) for a, b in zip(*(s.values() for s in states), strict=True))


@pytest.mark.parametrize("name", ["rtn", "rtn_w4", "rtn_w3", "rtn_w2", "mquant", "mquant_gptq", "mse_clip", "rotate"])
def test_quantize__every_recipe_runs(name: str) -> None:
    config = {
        "rtn": recipes.rtn(8, 8),
        "rtn_w4": recipes.rtn(4, group_size=8),
        "rtn_w3": recipes.rtn(3, group_size=8),
        "rtn_w2": recipes.rtn(2, group_size=8),
        "mquant": recipes.mquant(8, solver="rtn"),
        "mquant_gptq": recipes.mquant(8),
        "mse_clip": recipes.mquant(8, solver="mse_clip", rotate=False),
        "rotate": recipes.rotate(),
    }[name]
    model = Small()
    before = logits(model, batches()[0])
    report = quantize(model, config)
    assert bool(report.layers) == (name != "rotate")
    error = relative_error(logits(model, batches()[0]), before)
    assert error < {"rtn_w4": 0.4, "rtn_w3": 0.6, "rtn_w2": 1.2, "rotate": 1e-5}.get(name, SMALL)


@pytest.mark.parametrize("calibrated", [False, True])
def test_quantize__the_head_has_bits_of_its_own(calibrated: bool) -> None:
    model, batch = tiny_qwen2_vl()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())  # untied: an embedding would read it too
    config = recipes.rtn(4, head_bits=8)
    report = mmqc.quantize_(model, config, [batch] if calibrated else None, progress=False)
    assert isinstance(model.lm_head, QuantLinear)
    assert (model.lm_head.weight_bits, model.lm_head.activation_bits) == (8, None)
    assert {r.scheme for r in report.layers if r.fqn != "lm_head"} == {"W4A16"}
    assert mmqc.QuantConfig.from_dict(config.to_dict()) == config


def test_quantize__filter_fn() -> None:
    model = Small()
    seen = []

    def only_attention(module: nn.Module, fqn: str) -> bool:
        seen.append((type(module), fqn))
        return ".0.body." in fqn

    report = quantize(model, recipes.rtn(8, 8), filter_fn=only_attention)
    assert {t for t, _ in seen} == {nn.Linear}
    assert {x.fqn for x in report.layers} == {n for n, m in model.named_modules() if isinstance(m, QuantLinear)}
    assert {x.fqn for x in report.layers} == {f for _, f in seen if ".0.body." in f}


def test_quantize__keep() -> None:
    model = Small()
    report = quantize(model, recipes.rtn(8, 8).replace(keep=("*.vision.*", "down")))
    kept = {r.fqn: r.reason for r in report.refused}
    assert kept["model.vision.blocks.0.body.qkv"] == "assign_scheme: kept in floating point (*.vision.*)"
    assert kept["model.merger.mlp.down"] == "assign_scheme: kept in floating point (down)"
    assert isinstance(model.model.text.head, QuantLinear)
    assert not any(".vision." in x.fqn or x.fqn.endswith("down") for x in report.layers)


def test_quantize__keep_is_checked_where_nothing_is_quantized() -> None:
    quantize(Small(), recipes.rotate().replace(keep=("*.vision.*",)))
    with pytest.raises(mmqc.ConfigError, match="matches no linear"):
        quantize(Small(), recipes.rotate().replace(keep=("*.nowhere.*",)))


def test_quantize__percentile_cuts_what_minmax_keeps() -> None:
    spec = ActivationSpec(observer="percentile", percentile=0.99)
    scheme = Scheme(WeightSpec(8), spec)
    names = "model.text.blocks.0.body.q", "model.merger.mlp.up"
    seen: dict[str, list[Tensor]] = {name: [] for name in names}
    probe = Small()
    for name in names:
        probe.get_submodule(name).register_forward_pre_hook(lambda m, a, name=name: seen[name].append(a[0].flatten()))
    for batch in batches():
        probe(**batch)
    scales = {}
    for observer, config in (("percentile", QuantConfig(scheme, scheme, scheme)), ("minmax", recipes.rtn(8, 8))):
        model = Small()
        quantize(model, config)
        scales[observer] = {name: model.get_submodule(name).input_scale.item() for name in names}
    for name in names:
        x = torch.cat(seen[name]).abs()
        assert scales["minmax"][name] > scales["percentile"][name]
        assert scales["percentile"][name] * 128 == pytest.approx(x.quantile(0.99).item(), rel=0.03)
