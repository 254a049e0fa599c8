"""Weights of experts: zero points, and AWQ's clip by what each expert saw."""

import copy
import dataclasses

import pytest
import torch
from mixtures import by_hand, experts_of, logits, mixture, quantized, tokens
from tolerance import assert_close

import mmqc
from mmqc.config import PerGroup, PerRow, QuantConfig, Scheme, WeightSpec
from mmqc.experts.modules import QuantStack
from mmqc.quantization.left_out import NothingQuantizedError
from mmqc.solvers import solve


@pytest.mark.parametrize("form", ["routed", "interleaved", "sorted"])
@pytest.mark.parametrize("group", [None, 5])
@pytest.mark.parametrize("kind", ["int", "float"])
def test_experts__zero_points(form, group, kind):
    """Codes, scales and zero points are the solver's, and the output that of a float model with the weights they stand for."""
    model, batch = mixture(form), tokens()
    rounded, transposed = copy.deepcopy(model), form in ("interleaved", "sorted")
    scheme = Scheme(WeightSpec(4, PerGroup(group) if group else PerRow(), symmetric=False, zero_point=kind))
    _, report = quantized(model, QuantConfig(language=scheme, keep=("router", "head")))
    rows = {row.fqn: row for row in report.layers}
    for owner in experts_of(model).values():
        for stack in (*owner.up, *([owner.down] if owner.down is not None else [])):
            assert stack.weight_zero.dtype == (torch.int8 if kind == "int" else torch.float16)
            assert stack.weight_zero.shape == stack.weight_scale.shape
            assert stack.weight_zero.any()
            assert str(stack).endswith("-asym-float)" if kind == "float" else "-asym)")
    for name, p in rounded.experts.named_parameters():
        if p.dim() != 3 or "bias" in name:
            continue
        assert rows[f"experts.{name}"].scheme == f"W4A16{'-g5' if group else ''}-asym{'-float' if kind == 'float' else ''}"
        w = p.data.mT if transposed else p.data
        parts = [solve(each, scheme.weight) for each in w]
        stack = next(s for m in experts_of(model).values() for s in m.modules() if is_stack_of(s, parts))
        assert all(torch.equal(stack.weight_zero[e], q.zero) for e, q in enumerate(parts))
        assert all(torch.equal(stack.weight_scale[e], q.scale) for e, q in enumerate(parts))
        w = torch.stack([(q.codes - q.by_channel(q.zero.double())) * q.by_channel(q.scale) for q in parts])
        p.data = w.mT.contiguous() if transposed else w
    assert_close(logits(model, batch), logits(rounded, batch))


def is_stack_of(module, parts):
    if not isinstance(module, QuantStack) or module.codes()[0].shape != parts[0].codes.shape:
        return False
    return torch.equal(module.codes(), torch.stack([q.codes for q in parts]))


@pytest.mark.parametrize("symmetric", [True, False])
def test_experts__awq_clips_by_the_second_moment_of_each_experts_rows(symmetric):
    model, batch = mixture(allowed=4), tokens(8, 40)
    rows, inner = by_hand(model, batch)
    weights = {"up": model.experts.up.detach().clone(), "down": model.experts.down.detach().clone()}
    spec = WeightSpec(3, PerGroup(4), "awq_clip", symmetric)
    _, report = quantized(model, QuantConfig(language=Scheme(spec), keep=("router", "head")), [batch])
    mixed = experts_of(model)["experts"]
    for stack, parts, name in ((mixed.up[0], rows, "up"), (mixed.down, inner, "down")):
        plain = dataclasses.replace(spec, solver="rtn")
        for e in range(4):
            x = parts[e].double()
            wanted = solve(weights[name][e], spec, x.T @ x)
            assert_close(stack.weight_scale[e], wanted.scale)
            assert (stack.codes()[e] != wanted.codes).double().mean() < 0.01  # sums in another order
            assert not torch.equal(stack.weight_scale[e], solve(weights[name][e], plain).scale)
        nearest = solve(weights[name][4], plain)
        assert torch.equal(stack.codes()[4], nearest.codes)
        assert (stack.weight_zero is None) == symmetric
        assert symmetric or torch.equal(stack.weight_zero[4], nearest.zero)
    notes = [r.note for r in report.layers if r.role == "experts"]
    assert all("1 of 5 experts saw no token: rounded to nearest" in n for n in notes)


def test_experts__whose_channel_factors_they_have_is_said():
    """The router, a linear, reads what the first stack reads; nothing but the second reads the gate."""
    _, report = quantized(mixture(), mmqc.recipes.awq(4, 8))
    notes = {row.fqn: (row.transforms, row.note) for row in report.layers}
    assert "channel scale in" in notes["experts.up"][0]
    assert "those of the linears that read them too" in notes["experts.up"][1]
    assert "no factors of its input channels were searched" in notes["experts.down"][1]
    _, report = quantized(mixture(), mmqc.recipes.gptq(4, 8))
    assert not any("factors" in row.note for row in report.layers)


def test_experts__modality_weights_and_quantized_inputs():
    """A model of text: its rows' weight is a factor of all second moments, which changes nothing."""
    recipe, batch = mmqc.recipes.gptq(3), tokens(4, 20)
    plain, weighted = mixture(), mixture()
    weighted.load_state_dict(plain.state_dict())
    mmqc.quantize_(plain, recipe, [batch], progress=False)
    report = mmqc.quantize_(weighted, recipe, [batch], progress=False, modality_weights={"text": 4.0}, inputs="quantized")
    for a, b in zip(experts_of(plain).values(), experts_of(weighted).values(), strict=True):
        assert torch.equal(a.down.codes(), b.down.codes())
    assert all("measured in the floating-point model" in r.note for r in report.layers if r.role == "experts")


@pytest.mark.parametrize("make", [mmqc.recipes.per_token, mmqc.recipes.quik])
def test_experts__beside_dynamic_activations_are_weight_only_and_said_to_be(make):
    model, report = quantized(mixture(), dataclasses.replace(make(4, 4), keep=("router", "head")))
    rows = [r for r in report.layers if r.role == "experts"]
    assert {r.scheme for r in rows} == {"W4A16"}
    assert all("weight-only: experts' inputs are not quantized token by token" in r.note for r in rows)
    assert all(s.activation_bits is None for s in model.modules() if isinstance(s, QuantStack))


def test_experts__hooks_go_over_and_a_patched_forward_is_refused():
    model, batch = mixture("routed"), tokens()
    seen = []
    model.experts.register_forward_hook(lambda module, args, y: seen.append(type(module).__name__))
    _, report = quantized(model, QuantConfig(language=Scheme(WeightSpec(8)), keep=("router", "head")))
    del seen[:]
    logits(model, batch)
    assert seen == ["QuantExperts"]
    assert {row.fqn for row in report.layers} >= {"experts.up", "experts.down"}

    model, plain = mixture("routed"), type(mixture("routed").experts).forward
    model.experts.forward = lambda *args: seen.append("patched") or plain(model.experts, *args)
    expected = logits(model, batch)
    with pytest.raises(NothingQuantizedError, match=r"2 stack of experts, e\.g\. experts\.up: its module has a patched forward"):
        quantized(model, QuantConfig(language=Scheme(WeightSpec(8)), keep=("router", "head")))
    _, report = quantized(model, QuantConfig(language=Scheme(WeightSpec(8)), keep=("router",)))
    reasons = {r.fqn: r.reason for r in report.refused}
    assert "its module has a patched forward" in reasons["experts.up"]
    del seen[:]
    assert (logits(model, batch) - expected).norm() / expected.norm() < 0.05
    assert seen == ["patched"]


def test_experts__of_4_bit_floats_are_integers_in_their_blocks():
    model = mixture()
    scheme = mmqc.recipes.rtn(4).with_float4("mxfp4").language
    _, report = quantized(model, QuantConfig(language=scheme, keep=("router", "head")))
    rows = [row for row in report.layers if row.fqn.startswith("experts.")]
    assert rows
    assert {row.scheme for row in rows} == {"W4A16-g32"}
    assert all("integers in the same groups: grouped_matmul has no mxfp4 form" in row.note for row in rows)
