import pytest
import torch
from float64 import passed
from pass_cases import CASES, check_exact, check_golden, program

from mmqc.graph.kinds import kind
from mmqc.graph.linear import operands, weight_of
from mmqc.graph.program import Program
from mmqc.ops.hadamard_matrix import hadamard_factors
from mmqc.ops.rotate import random_hadamard
from mmqc.passes.assign_scheme import AssignScheme
from mmqc.passes.suppress_magnitude import SuppressMagnitude
from mmqc.recipes import rtn


def assigned(case: str, *, by_token: bool = False) -> Program:
    item = AssignScheme(rtn(8, 8).with_token_scales() if by_token else rtn(8, 8))
    return passed(program(case, item), [item])


def dense(width: int) -> torch.Tensor:
    h = torch.ones(1, 1, dtype=torch.float64)
    for factor in hadamard_factors(width):
        h = torch.kron(h, factor)
    return h


@pytest.mark.parametrize("case", CASES)
def test_suppress_magnitude__exact(case: str) -> None:
    prog = assigned(case)
    check_exact(prog, SuppressMagnitude())
    assert prog.records[-1].delta == {}
    assert prog.records[-1].misses == []


@pytest.mark.parametrize("rank", [1, 3, 8])
def test_suppress_magnitude__the_largest_channels_where_the_equation_has_any(rank: int) -> None:
    prog = assigned("vlm")
    behind = [n for n in prog.nodes("linear") if operands(n)["input"].target == torch.ops.mmqc.hadamard.default]
    w, h = prog.weights[weight_of(behind[1])], dense(32)  # whose first row sums up: one channel outgrows the maximum
    noise = torch.randn(w.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    prog.weights[weight_of(behind[1])] = (h[0].sign() + 0.1 * noise).to(w)
    check_exact(prog, SuppressMagnitude(rank))
    found = []
    for node in behind:
        after = prog.value(weight_of(node)).double()
        before = after @ dense(after.shape[1])  # (W Hᵀ) H
        peaks = after.abs().amax(0)
        channels = [i for i in range(len(peaks)) if peaks[i] > before.abs().max()]
        largest = sorted(sorted(range(len(peaks)), key=lambda i: -peaks[i])[:rank])
        assert node.meta.get("outliers", torch.tensor([])).tolist() == (largest if channels else [])
        found.append(len(channels))
    assert 0 in found, "linears without"
    assert any(0 < n < 8 for n in found), "and with fewer than are kept"


def test_suppress_magnitude__column_of_equal_signs_grows() -> None:
    prog = assigned("rms_gqa")
    fqn = "blocks.1.body.down.weight"
    prog.weights[fqn] = random_hadamard(24, 0)[1].expand_as(prog.weights[fqn]).clone()  # fold_signs makes them all 1
    check_exact(prog, SuppressMagnitude())
    (node,) = [n for n in prog.nodes("linear") if weight_of(n) == fqn]
    expected = (torch.ones(24, dtype=torch.float64) @ dense(24).T).abs()
    assert expected[node.meta["outliers"]].max() > 1


def test_suppress_magnitude__twice_changes_nothing() -> None:
    prog = assigned("vlm")
    check_exact(prog, SuppressMagnitude())
    check_exact(prog, SuppressMagnitude())
    assert prog.records[-1].sites == prog.records[-2].sites


def test_suppress_magnitude__without_scheme_or_hadamard_no_site() -> None:
    assert passed(program("vlm", SuppressMagnitude()), [SuppressMagnitude()]).records[-1].sites == []
    assert passed(assigned("fused_qkv"), [SuppressMagnitude()]).records[-1].sites == []


def test_suppress_magnitude__golden() -> None:
    prog = assigned("rms_gqa")
    fqn = "blocks.1.body.down.weight"
    prog.weights[fqn] = torch.ones_like(prog.weights[fqn])
    check_golden(prog, SuppressMagnitude(), "rms_gqa")


def test_suppress_magnitude__leaves_linears_alone_that_would_lose_the_channels() -> None:
    """A module that quantizes its inputs by token has no weights beside its codes."""
    prog = assigned("vlm", by_token=True)
    check_exact(prog, SuppressMagnitude())
    assert prog.records[-1].sites == []
    assert len(prog.records[-1].misses) == len([n for n in prog.nodes("linear") if kind(operands(n)["input"]) == "hadamard"]) > 0
    assert not [n for n in prog.nodes("linear") if "outliers" in n.meta]
