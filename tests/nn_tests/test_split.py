"""Parts of a linear: side by side, or added up, they are the linear."""

from __future__ import annotations

import copy

import pytest
import torch
from tolerance import assert_close
from torchao.quantization.granularity import PerGroup, PerRow

from mmqc.config import WeightSpec
from mmqc.nn.linear import QuantLinear
from mmqc.nn.mixed_linear import MixedLinear
from mmqc.nn.split import BY_ROW, WHOLE, SplitError, columns_of, cut_inputs, cut_outputs, joined, why_not_by_inputs
from mmqc.nn.token_linear import TokenLinear
from mmqc.ops.pack import pack
from mmqc.solvers import solve

K, N = 48, 20


def linear(bits=4, group=0, static=False, symmetric=True, outliers=(), hadamard=False, amplifier=None, zero="int"):
    spec = WeightSpec(bits, PerGroup(group) if group else PerRow(), "rtn", symmetric, amplifier=amplifier, zero_point=zero)
    w, skip = torch.randn(N, K), torch.tensor(outliers, dtype=torch.int64)
    return QuantLinear.from_parts(
        solve(w, spec, skip=skip if outliers else None),
        weight_bits=bits,
        activation_bits=8 if static else None,
        bias=torch.randn(N),
        input_scale=torch.tensor([0.03]) if static else None,
        outliers=(skip, w[:, skip]) if outliers else None,
        hadamard=hadamard,
    )


def mixed():
    widths, codes = [K - 8, 8], torch.randint(-7, 8, (N, K), dtype=torch.int8)
    parts = codes.split(widths, 1)
    return MixedLinear.from_stored(
        [pack(parts[0], 4), parts[1]],
        torch.rand(N, 2),
        torch.stack([p.sum(1, dtype=torch.int32) for p in parts], 1),
        widths=widths,
        stored=[4, 8],
        activation=[4, 8],
        weight_bits=4,
        order=torch.randperm(K),
        bias=torch.randn(N),
    )


FORMS = {
    "w4": dict(),
    "w2 in groups": dict(bits=2, group=6),
    "w3 in groups, asymmetric": dict(bits=3, group=12, symmetric=False),
    "w3 in groups, zero between the codes": dict(bits=3, group=12, symmetric=False, zero="float"),
    "w8 static": dict(bits=8, static=True),
    "w4 static": dict(static=True),
    "asymmetric": dict(symmetric=False),
    "outliers": dict(static=True, outliers=(3, 40, 41)),
    "outliers of one part": dict(static=True, outliers=(40, 41)),
    "integer scales": dict(static=True, group=8, amplifier=1024),
}
BLOCKS = {
    "4 blocks of a Hadamard": dict(static=True, hadamard=4),
    "8 blocks, outliers": dict(static=True, hadamard=8, outliers=(3, 40)),
}


@pytest.mark.parametrize("form", [*FORMS, *BLOCKS])
@pytest.mark.parametrize("ranks", [2, 4])
def test_cut_inputs__parts_add_up(form, ranks):
    whole, x = linear(**(FORMS | BLOCKS)[form]), torch.randn(3, 5, K)
    if form in FORMS and FORMS[form].get("group") and K // ranks % FORMS[form]["group"]:
        pytest.skip("groups are not cut")
    total = 0
    for rank in range(ranks):
        part = copy.deepcopy(whole)
        cut_inputs(part, rank, ranks)
        assert part.in_features == K // ranks
        assert int(part.hadamard) == int(whole.hadamard) // ranks
        total = total + part(columns_of(x, rank, ranks))
    assert_close(total, whole(x))


@pytest.mark.parametrize("form", [*FORMS, "hadamard", "token", "mixed"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_cut_outputs__parts_are_side_by_side(form, ranks):
    weight = solve(torch.randn(N, K), WeightSpec(4, solver="rtn"))
    others = {
        "hadamard": lambda: linear(hadamard=True, static=True),
        "token": lambda: TokenLinear.from_parts(weight, weight_bits=4, bias=torch.randn(N)),
        "mixed": mixed,
    }
    whole, x = others[form]() if form in others else linear(**FORMS[form]), torch.randn(3, 5, K)
    parts = []
    for rank in range(ranks):
        part = copy.deepcopy(whole)
        cut_outputs(part, rank, ranks)
        assert part.out_features == N // ranks
        parts.append(part(x))
    assert_close(joined(torch.stack(parts)), whole(x))
    if form in ("token", "mixed", "w8 static"):  # sums of integers
        assert torch.equal(joined(torch.stack(parts)), whole(x))


def test_cut__takes_memory_of_the_part_alone():
    part = linear(bits=8)
    cut_outputs(part, 0, 4)
    assert part.qweight.untyped_storage().nbytes() == N * K // 4


def test_cut__every_buffer_is_known():
    for one in (linear(static=True, outliers=(1,), symmetric=True), linear(group=8, symmetric=False, hadamard=True), mixed()):
        assert all(BY_ROW.fullmatch(name) or WHOLE.fullmatch(name) for name in one._buffers)
    strange = linear()
    strange.register_buffer("strange", torch.ones(N))
    with pytest.raises(SplitError, match=r"up.strange: nobody said how it is cut"):
        cut_outputs(strange, 0, 2, "up")


def test_cut__refuses_by_name():
    with pytest.raises(SplitError, match="the output of up has a width of 20, which 3 ranks cannot share evenly"):
        cut_outputs(linear(), 0, 3, "up")
    assert why_not_by_inputs(linear(), 2) == ""
    for one, why in (
        (linear(hadamard=True), "its online Hadamard mixes all its inputs"),
        (linear(hadamard=3), "its online Hadamard mixes inputs in 3 blocks, which 2 ranks cannot share"),
        (linear(group=16), "a part of 24 inputs would cut through its groups of 16"),
        (mixed(), "a token's scale is that of all its inputs"),
    ):
        assert why_not_by_inputs(one, 2) == why
        with pytest.raises(SplitError, match=f"down cannot be cut by inputs: {why}"):
            cut_inputs(one, 0, 2, "down")
