import copy
import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from blocks import IMAGE, MODELS
from float64 import EXACT, output_of, relative_error, to_float64
from models import text_with_images, tiny_qwen2_vl
from torch import Tensor, nn

import mmqc
from mmqc import ConfigError, recipes
from mmqc.calibrate import CalibrationError
from mmqc.config import ActivationSpec, QuantConfig, Rewrites, Scheme, WeightSpec
from mmqc.graph.record import RecordError
from mmqc.modality import attached
from mmqc.modules import HadamardLinear, QuantLinear, RMSNorm

SMALL = 0.08  # relative error of the logits: 1 % for each rounding of weights and inputs, some dozen of them in a row


class Small(nn.Module):
    """The hand-written two-tower model with a transformers model's way to be called."""

    def __init__(self) -> None:
        super().__init__()
        self.model, _ = MODELS["vlm"]()
        self.config = SimpleNamespace(image_token_id=IMAGE)
        self.fail_on: int | None = None

    def forward(self, input_ids: Tensor, pixel_values: Tensor, use_cache: bool = True) -> Tensor:
        if self.fail_on is not None and bool((input_ids == self.fail_on).any()):
            raise RuntimeError("this batch is broken")
        return self.model(input_ids, pixel_values)


def batches(n: int = 3) -> list[dict[str, Tensor]]:
    _, batch = MODELS["vlm"]()
    g = torch.Generator().manual_seed(5)
    more = [{**batch, "pixel_values": torch.randn(2, 3, 16, 16, generator=g)} for _ in range(n - 1)]
    return [batch, *more]


def quantize(model: nn.Module, config: QuantConfig, calibration: Any = None, **more: Any) -> mmqc.QuantReport:
    return mmqc.quantize_(model, config, batches() if calibration is None else calibration, progress=False, **more)


@torch.no_grad()
def logits(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    out = model(**batch)
    return out if isinstance(out, Tensor) else out.logits


def traces(model: nn.Module) -> dict[str, Any]:
    """All that a failed call must leave as it was."""
    return {
        "tensors": {k: v.clone() for k, v in model.state_dict().items()},
        "identity": {k: id(p) for k, p in model.named_parameters(remove_duplicate=False)},
        "modules": {k: (type(m), id(m), m.training) for k, m in model.named_modules()},
        "hooks": {k: (len(m._forward_pre_hooks), len(m._forward_hooks)) for k, m in model.named_modules()},
        "config": dict(vars(model.config)),
    }


def check_unchanged(model: nn.Module, before: dict[str, Any]) -> None:
    after = traces(model)
    assert all(torch.equal(after["tensors"][k].nan_to_num(), v.nan_to_num()) for k, v in before["tensors"].items())
    for part in ("identity", "modules", "hooks", "config"):
        assert after[part] == before[part], part


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
    norms = [
        m for m in after.modules() if "norm" in type(m).__name__.lower() and getattr(m, "weight", None) is not None
    ]
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
        "raise_ops", "fold_norm_scale", "fold_norm_mean", "fuse_rotation", "insert_hadamard", "assign_scheme",
        "suppress_magnitude", "quantize_weights", "quantize_activations",
    ]  # fmt: skip
    assert [str(r) for r in report.refused] == [
        "lm_head (node linear_24): assign_scheme: kept in floating point (lm_head)"
    ]
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


@pytest.mark.parametrize("name", ["rtn", "rtn_w4", "mquant", "mquant_gptq", "mse_clip", "rotate"])
def test_quantize__every_recipe_runs(name: str) -> None:
    config = {
        "rtn": recipes.rtn(8, 8),
        "rtn_w4": recipes.rtn(4, group_size=8),
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
    assert error < {"rtn_w4": 0.3, "rotate": 1e-5}.get(name, SMALL)


def test_quantize__weights_only_without_calibration() -> None:
    model = Small()
    report = mmqc.quantize_(model, recipes.rtn(8), progress=False)
    kinds = {n: type(m) for n, m in model.named_modules() if isinstance(m, nn.Linear | QuantLinear)}
    assert len(report.layers) == len(kinds)  # no get_output_embeddings: the head is a linear like the others
    assert set(kinds.values()) == {QuantLinear}
    assert all(m.input_scale is None for m in model.modules() if isinstance(m, QuantLinear))


def test_quantize__weights_only_keeps_the_head_of_transformers_models() -> None:
    model, _ = tiny_qwen2_vl()
    report = mmqc.quantize_(model, recipes.rtn(4, group_size=8), progress=False)
    assert [r.fqn for r in report.refused] == ["lm_head"]
    assert type(model.lm_head) is nn.Linear
    assert len(report.layers) == 24


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


# --- errors: a clear message, and nothing changed ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "calibration", "error", "message"),
    [
        (recipes.rtn(8, 8), [], CalibrationError, "calibration is empty, but this config needs data"),
        (recipes.rotate(), [], CalibrationError, "rewrites need one batch"),
        (recipes.mquant(8), "text", CalibrationError, "no calibration batch has an image"),
        (recipes.rtn(8, 8), "nan", CalibrationError, "calibration batch 1: pixel_values holds NaN"),
        (recipes.rtn(8, 8).replace(keep=("nothing",)), None, ConfigError, "keep pattern 'nothing' matches no linear"),
        ("mquant", None, ConfigError, "config is a str; pass a mmqc.QuantConfig"),
        ({"language": None}, None, ConfigError, "config is a dict"),
    ],
)
def test_quantize__errors(config: Any, calibration: Any, error: type[Exception], message: str) -> None:
    model = Small().train()
    given = batches()
    if calibration == "text":
        given = [{**b, "input_ids": b["input_ids"].clamp(max=IMAGE - 1)} for b in given]
    elif calibration == "nan":
        given[1] = {**given[1], "pixel_values": given[1]["pixel_values"] * torch.nan}
    elif calibration is not None:
        given = calibration
    before = traces(model)
    with pytest.raises(error, match=message):
        mmqc.quantize_(model, config, given, progress=False)
    check_unchanged(model, before)


def test_quantize__none_is_no_calibration() -> None:
    model = Small()
    with pytest.raises(CalibrationError, match="calibration is None"):
        mmqc.quantize_(model, recipes.rtn(8, 8), progress=False)


def test_quantize__unknown_keep_pattern_without_calibration() -> None:
    model = Small()
    before = traces(model)
    with pytest.raises(ConfigError, match="keep pattern 'nothing' matches no linear"):
        mmqc.quantize_(model, recipes.rtn(8).replace(keep=("nothing",)), progress=False)
    check_unchanged(model, before)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_quantize__bad_weight(value: float) -> None:
    model = Small()
    with torch.no_grad():
        model.model.merger.mlp.up.weight[3, 4] = value
    before = traces(model)
    with pytest.raises(ValueError, match=r"model.merger.mlp.up.weight holds NaN or infinite values"):
        quantize(model, recipes.rtn(8, 8))
    check_unchanged(model, before)


def test_quantize__quantized_already() -> None:
    model = Small()
    quantize(model, recipes.rtn(8, 8))
    before = traces(model)
    with pytest.raises(ValueError, match="quantized already"):
        quantize(model, recipes.rtn(8, 8))
    check_unchanged(model, before)


def test_quantize__resume_dir_is_refused() -> None:
    with pytest.raises(ConfigError, match="resume_dir is not supported"):
        quantize(Small(), recipes.rtn(8, 8), resume_dir="x")


@pytest.mark.parametrize("config", [recipes.rtn(8, 8), recipes.mquant(4), recipes.rotate()])
def test_quantize__failing_batch_rolls_everything_back(config: QuantConfig) -> None:
    model = Small()
    given = batches()
    given[2] = {**given[2], "input_ids": given[2]["input_ids"].clone()}
    given[2]["input_ids"][0, 0] = IMAGE - 2
    model.fail_on = IMAGE - 2
    clean = [{**b, "input_ids": b["input_ids"].where(b["input_ids"] != IMAGE - 2, 1)} for b in given[:2]]
    before = traces(model)
    if config == recipes.rotate():  # reads its first batch only
        clean = clean[:0]
    with pytest.raises(RuntimeError, match="this batch is broken"):
        quantize(model, config, [*clean, given[2]])
    check_unchanged(model, before)


def test_quantize__failing_solver_rolls_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from mmqc.passes import quantize_weights

    calls = []
    solve = quantize_weights.solve

    def third_fails(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return solve(*args, **kwargs)

    monkeypatch.setattr(quantize_weights, "solve", third_fails)
    model = Small()
    before = traces(model)
    with pytest.raises(KeyboardInterrupt):
        quantize(model, recipes.mquant(8, solver="rtn"))
    check_unchanged(model, before)


def test_quantize__tensor_from_nowhere_names_the_module() -> None:
    model = Small()
    hidden = [torch.ones(16)]
    model.model.merger.mlp.up.register_forward_hook(lambda m, a, y: y * hidden[0][0] + torch.from_numpy(y.numpy() * 0))
    before = traces(model)
    with pytest.raises(RecordError, match="from nowhere"):
        quantize(model, recipes.rtn(8, 8))
    check_unchanged(model, before)


def test_quantize__text_batch_of_the_real_model() -> None:
    model, _ = tiny_qwen2_vl()
    text = {k: v for k, v in text_with_images([]).items()}
    with pytest.raises(CalibrationError, match="no calibration batch has an image"):
        mmqc.quantize_(model, recipes.mquant(8), [text], progress=False)
    report = mmqc.quantize_(model, recipes.mquant(8, solver="rtn", msq=False, rotate=False), [text], progress=False)
    assert {layer.tower for layer in report.layers} == {"language"}
