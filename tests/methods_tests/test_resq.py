"""ResQ from end to end on small models: exact without quantization, the graph equals the modules, saved and loaded."""

import copy

import pytest
import torch
from blocks import MODELS
from error_bound import error_bound
from float64 import EXACT, output_of, passed, recorded, relative_error, replayed, spaces_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import tiny_qwen2_vl
from often import often
from random_models import VOCAB, Network, networks
from small_vlm import Small, batches, logits, quantize
from tiny_families import FAMILIES

import mmqc
import mmqc.calibration.calibrate
from mmqc.checkpoint.module_spec import build_module, module_spec
from mmqc.config import ConfigError, QuantConfig
from mmqc.kv.rounding import KVRounder
from mmqc.nn.mixed_linear import MixedLinear
from mmqc.passes.fuse_rotation import FuseRotation, place
from mmqc.pipeline import exact_passes
from mmqc.recipes import outlier_rotation, per_token, quarot, quik, resq, rotate, smoothquant
from mmqc.solvers.principal_basis import principal_basis, random_orthogonal

IDS = {"input_ids": torch.arange(12).reshape(2, 6) % VOCAB}


def random_bases(prog, seed: int) -> dict[str, torch.Tensor]:
    """A basis for every space that may have one, from random moments."""
    g, given = torch.Generator().manual_seed(seed), {}
    for space in spaces_of(prog):
        if space.inside and space.touches and not space.pins and not space.mean_pins and space.width > 1:
            x = torch.randn(9, space.width, generator=g, dtype=torch.float64)
            given[place(space)] = principal_basis(x.T @ x, 1, seed)
    return given


@settings(max_examples=10, derandomize=True, suppress_health_check=list(HealthCheck))
@given(networks(), st.integers(0, 3))
def test_given_bases__random_network_computes_the_same(network: Network, seed: int) -> None:
    prog = recorded(network, IDS)
    expected = output_of(network, IDS)
    passed(prog, exact_passes(rotate()))
    given = random_bases(prog, seed)
    passed(prog, [FuseRotation(given=given)])
    assert relative_error(replayed(prog), expected) < EXACT


@pytest.mark.parametrize("case", sorted(MODELS))
def test_given_bases__every_case_exact_and_once(case: str) -> None:
    model, batch = MODELS[case]()
    prog = recorded(model, batch)
    expected = replayed(prog)
    passed(prog, exact_passes(rotate()))
    given = random_bases(prog, 0)
    passed(prog, [FuseRotation(given=given)])
    assert len(prog.records[-1].sites) + len(prog.records[-1].misses) == len(given)
    assert relative_error(replayed(prog), expected) < EXACT
    passed(prog, [FuseRotation(given=given)])
    assert prog.records[-1].sites == []


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_given_bases__every_family_exact(family: str) -> None:
    model, batch = FAMILIES[family]()
    prog = recorded(model, batch)
    expected = replayed(prog)
    passed(prog, exact_passes(rotate()))
    passed(prog, [FuseRotation(given=random_bases(prog, 0))])
    assert prog.records[-1].sites
    assert relative_error(replayed(prog), expected) < EXACT


@pytest.mark.slow
def test_error_bound__holds_on_the_samples_activations() -> None:
    """Theorem 4.2, with a basis of other questions: the principal subspace has the lower bound, and the lower error."""
    sample = mmqc.samples.load("digits-vqa")
    names = [n for n, m in sample.model.named_modules() if n.endswith(("q_proj", "gate_proj", "attn.qkv", "mlp.fc1"))]
    rows: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    for name in names:
        keep = lambda m, a, name=name: rows[name].append(a[0].detach().double().reshape(-1, a[0].shape[-1]))  # noqa: E731
        sample.model.get_submodule(name).register_forward_pre_hook(keep)
    with torch.no_grad():
        for batch in sample.calibration(6):
            sample.model(**batch)
    assert len(names) == 16
    for name, seen in rows.items():
        known, x = torch.cat(seen[:3]), torch.cat(seen[3:])
        n, high = x.shape[1], x.shape[1] // 8
        parts, found = torch.tensor([n - high, high]), {}
        for which, u in (("principal", principal_basis(known.T @ known, high)), ("random", random_orthogonal(n, 0))):
            z = x @ u
            q, s, o = torch.ops.mmqc.quantize_per_token(z, None, parts.tolist(), [4, 8])
            error = z - q * s.repeat_interleave(parts, -1) - o.repeat_interleave(parts, -1)
            actual, energy, top = (float(t.norm(dim=1).mean()) for t in (error, z, z[:, n - high :]))
            found[which] = actual, error_bound(energy, top, n, high, 4, 8)
        assert all(actual <= bound for actual, bound in found.values()), name
        assert found["principal"][0] < found["random"][0], name
        assert found["principal"][1] < found["random"][1], name


def test_recipes__table_3_of_the_paper() -> None:
    """W/A/KV, and what is in 8 bits beside them."""
    for w, a, kv in ((4, 4, 4), (4, 8, 4), (3, 8, 3), (2, 8, 8), (3, 3, 3)):
        for recipe in (resq, outlier_rotation):
            config = recipe(w, kv_bits=kv, activation_bits=a)
            scheme, rounding = config.language, config.kv_rounding
            assert scheme is not None
            assert (scheme.weight.bits, scheme.dynamic.bits, rounding.bits) == (w, a, kv)
            assert (scheme.dynamic.high_bits, rounding.high_bits, scheme.dynamic.high_fraction) == (8, 8, 1 / 8)
            assert QuantConfig.from_dict(config.to_dict()) == config
    with pytest.raises(ConfigError, match="lowest_fraction"):
        resq(high_fraction=0.0, lowest_fraction=1 / 8)


def everywhere(config: QuantConfig) -> QuantConfig:
    """The language model's scheme in the vision tower and the projector too."""
    return config.replace(vision=config.language, projector=config.language)


def test_resq__has_more_bits_for_the_vision_tower_or_leaves_it_alone() -> None:
    for recipe in (resq, outlier_rotation):
        config = recipe(4)
        assert config.vision is not None
        assert config.vision == config.projector == recipe(8).language
        assert recipe(4, vision_bits=4).vision == config.language
        bare = recipe(4, vision_bits=None)
        assert bare.vision is bare.projector is None
        assert bare.language == config.language
    model = Small().eval()
    quantize(model, resq(kv_bits=None, solver="rtn"))
    linears = {n: m.weight_bits for n, m in model.named_modules() if isinstance(m, MixedLinear)}
    assert {("vision" in n or "merger" in n, bits) for n, bits in linears.items()} == {(True, 8), (False, 4)}


RECIPES = {
    "resq": everywhere(resq(kv_bits=None)),
    "resq-rtn": everywhere(resq(kv_bits=None, solver="rtn")),
    "quik": quik(),
    "quarot": quarot(),
    "smooth": smoothquant(),
    "rtn": per_token(solver="rtn"),
    "2/8": everywhere(resq(2, kv_bits=None, activation_bits=8)),
    "no U_B, U_D": everywhere(resq(kv_bits=None, heads=False, hadamard=False)),
    "3/8": everywhere(resq(3, kv_bits=None, activation_bits=8)),
    "4/8": everywhere(resq(4, kv_bits=None, activation_bits=8)),
    "3/3": everywhere(resq(3, kv_bits=None)),
    "outlier + rotation": everywhere(outlier_rotation(kv_bits=None)),
    "three levels": everywhere(resq(kv_bits=None, lowest_fraction=1 / 4)),
    "rank 1/4": everywhere(resq(kv_bits=None, high_fraction=1 / 4)),
}


@pytest.mark.parametrize("name", often(RECIPES, "resq", "quik", "smooth", "2/8"))
def test_quantize__every_recipe(name: str) -> None:
    model = Small().eval()
    expected = logits(model, batches()[0])
    report = quantize(model, RECIPES[name])
    linears = [m for m in model.modules() if isinstance(m, MixedLinear)]
    assert linears
    assert report.rewrite_error < 1e-5
    assert relative_error(logits(model, batches()[0]), expected) < 1.5
    parts = 1 if name in ("quarot", "smooth", "rtn") else 3 if name == "three levels" else 2
    assert max(len(m.widths) for m in linears) == parts
    if name == "three levels":
        assert {tuple(m.activation) for m in linears} == {(2, 4, 8), (4,)}
    if name == "rank 1/4":
        assert all(3 * m.widths[1] == m.widths[0] for m in linears if len(m.widths) == 2)
    assert {m.weight_bits for m in linears} == {RECIPES[name].language.weight.bits}
    assert QuantConfig.from_dict(RECIPES[name].to_dict()) == RECIPES[name]


def test_quantize__the_solver_sees_the_first_batches_and_bases_all(monkeypatch: pytest.MonkeyPatch) -> None:
    real, rows = mmqc.calibration.calibrate.add_second_moment, []
    monkeypatch.setattr(mmqc.calibration.calibrate, "add_second_moment", lambda h, x, *a: (rows.append(len(x)), real(h, x, *a))[1])
    seen = {}
    for some in (None, 1):
        model, count = Small().eval(), []
        model.register_forward_pre_hook(lambda *a, count=count: count.append(1))
        rows.clear()
        report = quantize(model, resq(kv_bits=None, solver_batches=some))
        seen[some] = sum(rows), len(count), report.rewrite_error
    assert seen[1][0] * 3 == seen[None][0]
    assert seen[1][1] >= 3
    assert seen[1][2] < 1e-5
    with pytest.raises(ConfigError, match="solver_batches"):
        resq(solver_batches=0)


@pytest.mark.slow
def test_quantize__keys_are_seen_with_the_streams() -> None:
    """One walk over the batches for all bases finds the high subspace of the keys that a walk of its own finds."""
    found, calls = [], []
    for config in (resq(solver="rtn"), resq(solver="rtn").replace(rewrites=rotate().rewrites)):
        model, inputs = tiny_qwen2_vl()
        count: list[int] = []
        model.register_forward_pre_hook(lambda *a, count=count: count.append(1))
        mmqc.quantize_(model, config, [inputs], progress=False)
        high = [m.basis[:, m.widths[0] :].double() for m in rounders(model)]
        found.append([u @ u.T for u in high])
        calls.append(len(count))
    assert len(found[0]) == 2
    for one, two in zip(*found, strict=True):
        assert 1 <= float(one.trace()) < len(one)
        assert float((one - two).norm()) < 1e-3
    assert calls[0] == calls[1]


@pytest.mark.slow
def test_quantize__more_bits_lose_less() -> None:
    expected = logits(Small().eval(), batches()[0])
    errors = []
    for bits, high in ((3, 4), (4, 8), (8, 8)):
        model = Small().eval()
        quantize(model, resq(bits, high, kv_bits=None, solver="rtn"))
        errors.append(relative_error(logits(model, batches()[0]), expected))
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 0.05


def test_quantize__without_data_is_refused() -> None:
    """Not taken for weight-only: activations want the graph, bases and outliers the data."""
    for config in (per_token(solver="rtn"), quik(solver="rtn"), resq(kv_bits=None, solver="rtn")):
        with pytest.raises(mmqc.calibration.calibrate.CalibrationError, match="this config needs data"):
            mmqc.quantize_(Small().eval(), config, progress=False)


@pytest.mark.slow
def test_quantize__backend_repeats_what_needs_no_data() -> None:
    model, untouched = Small().eval(), Small().eval()
    report = quantize(model, quarot(solver="rtn"))
    batch = batches()[0]
    torch._dynamo.reset()
    compiled = torch.compile(untouched, backend="mmqc", options={"config": report.config})
    assert relative_error(logits(compiled, batch), logits(model, batch)) < 1e-4
    with pytest.raises(Exception, match="this config needs calibration"):
        torch.compile(Small().eval(), backend="mmqc", options={"config": report.config.replace(rewrites=resq().rewrites)})(**batch)


def test_quantize__in_int8_is_the_same_model_in_more_memory() -> None:
    found = []
    for packed in (True, False):
        model = Small().eval()
        report = quantize(model, everywhere(resq(kv_bits=None, solver="rtn", packed=packed)))
        found.append((logits(model, batches()[0]), report, model))
    assert torch.equal(found[0][0], found[1][0])
    assert all(("weights in int8" in str(layer.scheme)) == bool(i) for i, f in enumerate(found) for layer in f[1].layers)
    assert found[0][1].size_after < found[1][1].size_after
    linears = [m for m in found[1][2].modules() if isinstance(m, MixedLinear)]
    assert {w.dtype for m in linears for w in m.qweights} == {torch.int8}
    assert all("at W4A4" in repr(m) for m in linears)
    assert build_module(module_spec(linears[0])).qweight.dtype == torch.int8


def test_mixed_linear__state_dict_spec_and_weight() -> None:
    model = Small().eval()
    quantize(model, quik())
    module = next(m for m in model.modules() if isinstance(m, MixedLinear) and m.order is not None)
    again = build_module(module_spec(module)).to_empty(device="cpu")
    again.load_state_dict(module.state_dict())
    x = torch.randn(3, module.in_features)
    assert torch.equal(again(x), module(x))
    assert torch.equal(copy.deepcopy(module)(x), module(x))
    dense = torch.nn.functional.linear(x, module.weight, module.bias)
    assert relative_error(module(x), dense) < 0.2
    assert "W4A4" in repr(module)
    assert module.half().weight_scale.dtype == torch.float32


def test_resq__saved_and_loaded(tmp_path) -> None:
    model, inputs = tiny_qwen2_vl()
    mmqc.quantize_(model, resq(solver="rtn"), [inputs], progress=False)
    expected = logits(model, inputs)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert torch.equal(logits(loaded, inputs), expected)
    assert sum(isinstance(m, MixedLinear) for m in loaded.modules()) > 10


def rounders(model: torch.nn.Module) -> list[KVRounder]:
    return [m for m in model.modules() if isinstance(m, KVRounder)]


def test_config__refuses() -> None:
    with pytest.raises(ConfigError, match=r"Rewrites\.rotate"):
        QuantConfig.from_dict({"rewrites": {"bases": {}}})
    with pytest.raises(ConfigError, match="high_fraction"):
        resq(high_fraction=0.7)
    with pytest.raises(ConfigError, match=r"Scheme\.dynamic"):
        QuantConfig.from_dict({"language": {"weight": {"symmetric": False}, "dynamic": {}}})
    with pytest.raises(ConfigError, match="smooth"):
        smoothquant(alpha=1.5)
    assert resq().needs_calibration
    assert str(resq().language) == "W4A4 + 0.125 at 8"
