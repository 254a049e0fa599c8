"""Experts of mixtures: found whatever their module looks like, quantized per expert, saved, loaded and compiled."""

import copy
import dataclasses
import json
import re

import pytest
import torch
from mixtures import (
    EXPERTS,
    FORMS,
    INNER,
    Mixture,
    Normalised,
    Routed,
    Scaled,
    by_hand,
    experts_of,
    logits,
    mixture,
    quantized,
    tokens,
)
from models import randomise
from often import often
from rounding import nearest
from tiny_families import FAMILIES
from tolerance import assert_close
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

import mmqc
from mmqc.checkpoint.module_spec import build_module, module_spec
from mmqc.config import ActivationSpec
from mmqc.experts.call import ExpertCall, Rows
from mmqc.experts.find import find_experts
from mmqc.experts.modules import QuantExperts, QuantStack
from mmqc.experts.statistics import ENOUGH_ROWS, StackStatistics
from mmqc.graph.record import record
from mmqc.ops.pack import pack
from mmqc.solvers import solve

W8 = mmqc.recipes.rtn(8)


# --- finding ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_find_experts__reads_the_module_as_it_computes(form):
    model, batch = mixture(form), tokens()
    layers, refused = find_experts(model, record(model, batch), batch)
    assert not refused
    assert {layer.call.form for layer in layers} == {form if form in ("batched", "sorted") else "routed"}
    assert [len(layer.stacks) for layer in layers] == {"separate": [3], "sorted": [1, 1]}.get(form, [2])


@pytest.mark.parametrize(
    ("experts", "reason"),
    [
        (Normalised(), "softmax between its stacks is not known to act on every row alike"),
        (Scaled(), "its module has another parameter, per_expert"),
        (Routed(scaled=1.5), r"differs from what it gives by 3\.3e-01 of its size"),
    ],
)
def test_find_experts__refuses_what_it_cannot_read(experts, reason):
    model = randomise(Mixture(experts)).double()
    before = copy.deepcopy(model.state_dict())
    _, report = quantized(model, W8)
    assert not experts_of(model)
    assert torch.equal(model.experts.up, before["experts.up"])
    found = [r.reason for r in report.refused if r.fqn == "experts.up"]
    assert len(found) == 1
    assert re.search(reason, found[0])


# --- what is stored ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bits", [4, 8])
def test_experts__weight_only_is_rounding_to_nearest(form, bits):
    """Every expert's codes by the textbook formula, and the output that of a float model with the rounded weights."""
    model, batch = mixture(form), tokens()
    rounded = copy.deepcopy(model)
    transposed = form in ("interleaved", "batched", "sorted")
    for name, p in rounded.experts.named_parameters():
        if p.dim() == 3 and "bias" not in name:
            w = p.data.mT if transposed else p.data
            codes, scale = nearest(w.float(), bits)
            w = codes.double() * scale.double()
            p.data = w.mT.contiguous() if transposed else w
    recipe = dataclasses.replace(mmqc.recipes.rtn(bits), keep=("router", "head"))
    model, report = quantized(model, recipe)
    assert {row.role for row in report.layers} == {"experts"}
    sqnr = [row.worst_sqnr for row in report.layers]
    assert all((15 if bits == 4 else 35) < db < (45 if bits == 4 else 70) for db in sqnr), sqnr
    assert_close(logits(model, batch), logits(rounded, batch), torch.float32)  # scales are


def test_experts__groups_and_few_bits():
    model, batch = mixture(), tokens()
    float_model = copy.deepcopy(model)
    _, report = quantized(model, mmqc.recipes.rtn(3, group_size=4))
    mixed = experts_of(model)["experts"]
    assert mixed.up[0].weight_scale.shape == (EXPERTS, 2 * INNER, 4)
    assert mixed.up[0].storage_bits == 3
    assert not [r for r in report.refused if "experts" in r.fqn]
    spec = mmqc.recipes.rtn(3, group_size=4).language.weight
    w = solve(float_model.experts.down[2].detach().float(), spec)
    assert torch.equal(mixed.down.codes()[2], w.codes)
    assert torch.isfinite(logits(model, batch)).all()


@pytest.mark.parametrize("activation", [None, 8])
def test_experts__last_group_may_be_short(activation):
    float_model = mixture()
    model, report = quantized(copy.deepcopy(float_model), mmqc.recipes.rtn(8, activation, group_size=5))
    mixed = experts_of(model)["experts"]
    assert mixed.up[0].weight_scale.shape == (EXPERTS, 2 * INNER, 4)
    assert "the last group has 1 of 5 input channels" in {r.fqn: r.note for r in report.layers}["experts.up"]
    batch = tokens()
    wanted, got = logits(float_model, batch), logits(model, batch)
    assert (got - wanted).norm() / wanted.norm() < 0.1


def test_experts__quantized_inputs_in_groups_are_the_dequantized_product():
    """W4A8 in groups: every expert's rows by hand, from the module's own codes, scales and input scales."""
    model, report = quantized(mixture(), mmqc.recipes.integer_scale(group_size=8))
    mixed = experts_of(model)["experts"]
    stack = mixed.up[0]
    assert (stack.scheme, stack.weight_scale.shape) == ("W4A8-g8", (EXPERTS, 2 * INNER, 2))
    assert "computed with as floats" in {r.fqn: r.note for r in report.layers}["experts.up"]
    x, offsets = torch.randn(11, stack.in_features), torch.tensor([0, 4, 4, 9, *[11] * (EXPERTS - 3)])
    rows = Rows(x, offsets.to(torch.int32), lambda y: y, None)
    got = stack(x, rows, None)
    for e in range(EXPERTS):
        part, scale = x[offsets[e] : offsets[e + 1]], stack.input_scale[e, 0].double()
        w = stack.codes()[e].double() * stack.weight_scale[e].double().repeat_interleave(8, 1)
        wanted = (part.double() / scale).round().clamp(-128, 127) * scale @ w.T
        wanted = wanted if stack.bias is None else wanted + stack.bias[e].double()
        assert_close(got[offsets[e] : offsets[e + 1]], wanted)


# --- static inputs ----------------------------------------------------------------------------------------------------


def absmax_scale(x):
    return max(float(-x.min()) / 128, float(x.max()) / 127)


def test_experts__static_scales_are_those_of_the_rows_routed_to_each():
    model, batch = mixture(), tokens(2, 20)
    rows, inner = by_hand(model, batch)
    seen = [len(r) for r in rows]
    assert min(seen) < ENOUGH_ROWS <= sorted(seen)[-2]  # else the test shows one case alone
    _, report = quantized(model, mmqc.recipes.rtn(8, 8), [batch])
    mixed = experts_of(model)["experts"]
    for stack, parts in ((mixed.up[0], rows), (mixed.down, inner)):
        shared = absmax_scale(torch.cat(parts))
        wanted = [absmax_scale(p) if len(p) >= ENOUGH_ROWS else shared for p in parts]
        assert_close(stack.input_scale, torch.tensor(wanted)[:, None])
    assert all("saw fewer than 16 rows" in r.note for r in report.layers if r.role == "experts")


@pytest.mark.parametrize("bits", [4, 8])
def test_experts__integer_path_is_the_simulation_code_for_code(bits):
    model, batch = mixture(), tokens()
    float_model = copy.deepcopy(model)
    recipe = dataclasses.replace(mmqc.recipes.rtn(bits, 8), keep=("router", "head"))
    quantized(model, recipe)
    mixed = experts_of(model)["experts"]
    simulated = copy.deepcopy(float_model)

    def rounded(x, scale):
        return torch.round(x / scale).clamp(-128, 127) * scale

    def expert(x, e):
        w = [(s.codes()[e].double() * s.weight_scale[e].double()[:, None]) for s in (mixed.up[0], mixed.down)]
        s = [float(stack.input_scale[e]) for stack in (mixed.up[0], mixed.down)]
        gate, up = F.linear(rounded(x, s[0]), w[0]).chunk(2, dim=-1)
        return F.linear(rounded(F.silu(gate) * up, s[1]), w[1])

    simulated.experts.expert = expert
    assert_close(logits(model, batch), logits(simulated, batch))


def test_experts__gptq_solves_with_the_second_moment_of_each_experts_rows():
    model, batch = mixture(allowed=4), tokens(8, 40)
    rows, inner = by_hand(model, batch)
    weights = {"up": model.experts.up.detach().clone(), "down": model.experts.down.detach().clone()}
    recipe = dataclasses.replace(mmqc.recipes.mquant(4, rotate=False, suppress=False, msq=False), keep=("router", "head"))
    _, report = quantized(model, recipe, [batch])
    mixed, spec = experts_of(model)["experts"], recipe.language.weight
    for stack, parts, name in ((mixed.up[0], rows, "up"), (mixed.down, inner, "down")):
        for e in range(4):
            x = parts[e].double()
            wanted = solve(weights[name][e], spec, x.T @ x)
            assert (stack.codes()[e] != wanted.codes).double().mean() < 0.01  # sums in another order
        nearest = solve(weights[name][4], dataclasses.replace(spec, solver="rtn"))
        assert torch.equal(stack.codes()[4], nearest.codes)
    notes = [r.note for r in report.layers if r.role == "experts"]
    assert all("1 of 5 experts saw no token: rounded to nearest, the input scale of all experts" in n for n in notes)


def test_experts__none_reached_by_any_token_is_refused():
    """Every expert computes every token, and the router gives all of them to rows of zeros."""
    statistics = StackStatistics(3, ActivationSpec(), hessian=False)
    rows = Rows(torch.zeros(6, 4), torch.tensor([0, 2, 4, 6], dtype=torch.int32), lambda y: y, None)
    statistics.update(rows.x, rows, torch.zeros(6, dtype=torch.long))
    assert statistics.scales(ActivationSpec(), language=True) is None


# --- modalities -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("observer", ["minmax", "percentile"])
def test_stack_statistics__one_scale_per_expert_and_modality(observer):
    spec = ActivationSpec(per_modality=True, observer=observer, percentile=1.0)
    x, modality = torch.randn(90, 4), torch.arange(90) % 2
    x[modality == 1] *= 10
    offsets = torch.tensor([0, 80, 84, 84], dtype=torch.int32)
    rows = Rows(x, offsets, lambda y: y, None)
    statistics = StackStatistics(3, spec, hessian=True)
    for part in (slice(None),):
        statistics.update(x[part], rows, modality[part])
    inside = x[:84], modality[:84]  # the last rows are no expert's
    shared = [absmax_scale(inside[0][inside[1] == m]) for m in (0, 1)]
    own = [absmax_scale(x[:80][modality[:80] == m]) for m in (0, 1)]
    scales = statistics.scales(spec, language=True)
    if observer == "minmax":
        assert_close(scales, torch.tensor([own, shared, shared]))
    else:  # a histogram's bins are 1 % wide
        assert ((scales / torch.tensor([own, shared, shared]) - 1).abs() < 0.012).all()
    assert statistics.seen().tolist() == [80, 4, 0]
    assert_close(statistics.hessian[1], x[80:84].double().T @ x[80:84].double())
    uneven = StackStatistics(3, spec, hessian=True, row_weights={"text": 0.25, "visual": 3.0})
    uneven.update(x, rows, modality)
    wanted = sum(a * x[:80][modality[:80] == m].double().T @ x[:80][modality[:80] == m].double() for m, a in ((0, 0.25), (1, 3.0)))
    assert_close(uneven.hessian[0], wanted)
    assert statistics.scales(dataclasses.replace(spec, per_modality=False), language=True).shape == (3, 1)


def test_quant_stack__takes_each_rows_scale_by_expert_and_modality():
    stack = QuantStack(3, 6, 5, weight_bits=8, activation_bits=8, input_scales=2)
    codes = torch.randint(-127, 128, (3, 5, 6), dtype=torch.int8)
    stack.qweight.copy_(codes)
    stack.weight_scale.copy_(torch.rand(3, 5))
    stack.input_scale.copy_(torch.rand(3, 2) * 0.02 + 0.01)
    x, visual = torch.randn(8, 6), torch.arange(8) % 3 == 0
    expert = torch.tensor([0, 0, 0, 2, 2, 2, 2, 2])
    rows = Rows(x, torch.tensor([0, 3, 3, 8], dtype=torch.int32), lambda y: y, None)
    assert torch.equal(rows.experts(), expert)
    scale = stack.input_scale[expert, visual.long()].double()[:, None]
    x_q = torch.round(x.double() / scale).clamp(-128, 127)
    wanted = torch.einsum("sk,snk->sn", x_q, codes[expert].double()) * scale * stack.weight_scale[expert]
    assert_close(stack(x, rows, visual), wanted)
    assert not torch.equal(stack(x, rows, None), stack(x, rows, visual))


def test_expert_call__an_absent_expert_gives_zero():
    call = ExpertCall("routed", ("x", "index", "weights"), ("x", "index", "weights"), 3)
    x, index = torch.randn(4, 6), torch.tensor([[0, 3], [3, 3], [2, 1], [3, 0]])  # 3 is on another device
    stack = QuantStack(3, 6, 6, weight_bits=8)
    stack.qweight.copy_(torch.eye(6, dtype=torch.int8).expand(3, 6, 6))
    stack.weight_scale.fill_(1.0)
    module = QuantExperts(call, [stack])
    y = module(x, weights=torch.full((4, 2), 0.5), index=index)
    assert_close(y, x * torch.tensor([0.5, 0.0, 1.0, 0.5])[:, None])


# --- the model --------------------------------------------------------------------------------------------------------


def test_experts__keep_patterns_and_filter():
    model, report = quantized(mixture(), dataclasses.replace(W8, keep=("experts", "head")))
    assert not experts_of(model)
    assert {r.reason for r in report.refused if r.fqn == "experts.up"} == {"kept in floating point (experts)"}
    model = mixture()
    mmqc.quantize_(model, W8, [tokens()], filter_fn=lambda module, fqn: fqn != "experts", progress=False)
    assert not experts_of(model)
    assert type(model.router).__name__ == "QuantLinear"


def test_experts__copy_cast_and_spec():
    model, _ = quantized(mixture("interleaved"), mmqc.recipes.rtn(4, 8))
    mixed = experts_of(model)["experts"]
    spec = json.loads(json.dumps(module_spec(mixed)))
    again = build_module(spec).to_empty(device="cpu")
    again.load_state_dict(mixed.state_dict())
    args = (torch.randn(7, 16).double(), torch.randint(0, EXPERTS, (7, 2)), torch.rand(7, 2).double())
    assert torch.equal(again(*args), mixed(*args))
    half = copy.deepcopy(mixed).half()
    assert half.up[0].weight_scale.dtype == torch.float32
    assert half.up[0].bias.dtype == torch.float16
    assert half(args[0].half(), args[1], args[2].half()).dtype == torch.float16
    with pytest.raises(ValueError, match="quantized already"):
        mmqc.quantize_(model, W8, [tokens()], progress=False)


RECIPES = {
    "static": mmqc.recipes.mquant(4, solver="rtn"),
    "zero points": mmqc.recipes.awq(4, 16, symmetric=False),
    "gptq, zero points": mmqc.recipes.gptq(3, symmetric=False),
}


@pytest.mark.parametrize("recipe", often(RECIPES, "zero points"))
def test_experts__saved_and_loaded_by_transformers(tmp_path, recipe):
    model, batch = FAMILIES["mixtral"]()
    report = mmqc.quantize_(model, RECIPES[recipe], [batch], progress=False)
    rows = [r for r in report.layers if r.role == "experts"]
    assert len(experts_of(model)) == 2
    assert len(rows) == 4
    assert any("online" in t for r in rows for t in r.transforms) == (recipe == "static")
    assert all(r.scheme.endswith("-asym") for r in rows) == (recipe != "static")
    assert not [r for r in report.refused if "experts" in r.fqn]
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(loaded(**batch).logits, model(**batch).logits)
    assert not [n for n, p in loaded.named_parameters() if p.dim() == 3]


def test_experts__are_one_graph():
    torch._dynamo.reset()
    model, _ = quantized(mixture("interleaved").float(), mmqc.recipes.rtn(4, 8))
    batch = tokens()
    assert_close(logits(torch.compile(model, backend="eager", fullgraph=True), batch), logits(model, batch))
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [mmqc.recipes.rtn(4, 8), mmqc.recipes.awq(4, 8, symmetric=False)], ids=["A8", "zeros"])
def test_experts__compiled(recipe):
    torch._dynamo.reset()
    model, _ = quantized(mixture("interleaved").float(), recipe)
    batch = tokens()
    compiled = torch.compile(model, backend="mmqc", fullgraph=True)
    assert_close(logits(compiled, batch), logits(model, batch))
    torch._dynamo.reset()


def test_pack__of_stacked_codes_is_that_of_each():
    codes = torch.randint(-8, 8, (3, 5, 7), dtype=torch.int8)
    assert torch.equal(pack(codes, 4), torch.stack([pack(c, 4) for c in codes]))
