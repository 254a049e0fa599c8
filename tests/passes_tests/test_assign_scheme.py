from typing import Any

import pytest
import torch
from blocks import WIDTH, Branch, Mlp, RMSNorm, Text, ids
from float64 import passed, recorded
from models import randomise
from pass_cases import CASES, built, check_exact, check_golden, misses, program
from torch import Tensor, nn
from torch.nn import functional as F

from mmqc.config import ActivationSpec, QuantConfig, Scheme, WeightSpec
from mmqc.graph.linear import weight_of
from mmqc.passes.assign_scheme import AssignScheme, kept
from mmqc.passes.raise_linear import RaiseLinear
from mmqc.passes.raise_ops import RaiseOps
from mmqc.recipes import awq, rtn

W8A8 = Scheme(WeightSpec(8), ActivationSpec())


def assign(**more: Any) -> AssignScheme:
    return AssignScheme(rtn(8, 8).replace(**more))


@pytest.mark.parametrize("case", CASES)
def test_assign_scheme__exact(case: str) -> None:
    prog = program(case, assign())
    check_exact(prog, assign())
    assert prog.records[-1].delta == {}
    linears = [n for n in prog.nodes("linear") if n.args[1].target not in ("head.weight", "text.head.weight")]
    assert all(n.meta["scheme"] == W8A8 for n in linears)


def test_assign_scheme__twice_changes_nothing() -> None:
    prog = program("vlm", assign())
    check_exact(prog, assign())
    meta = {n.name: dict(n.meta) for n in prog.nodes("linear")}
    check_exact(prog, assign())
    assert prog.records[-1].sites == prog.records[-2].sites
    assert {n.name: dict(n.meta) for n in prog.nodes("linear")} == meta


def test_assign_scheme__golden() -> None:
    check_golden(program("vlm", assign()), assign(), "vlm")


def test_assign_scheme__each_tower_has_its_own() -> None:
    item = AssignScheme(QuantConfig(vision=Scheme(WeightSpec(4)), projector=None, language=W8A8))
    prog = program("vlm", item)
    check_exact(prog, item)
    given = {n.args[1].target: str(n.meta["scheme"]) for n in prog.nodes("linear") if "scheme" in n.meta}
    assert {name: scheme for name, scheme in given.items() if name.startswith("vision")}.keys() == {
        f"vision.blocks.{name}.weight" for name in ("0.body.qkv", "0.body.o", "1.body.up", "1.body.down")
    }
    assert all(scheme == ("W4A16" if name.startswith("vision") else "W8A8") for name, scheme in given.items())
    assert not [name for name in given if name.startswith("merger")]


def test_assign_scheme__roles() -> None:
    prog = program("rms_gqa", assign(keep=()))
    check_exact(prog, assign(keep=()))
    roles = {n.args[1].target: n.meta["role"] for n in prog.nodes("linear")}
    body = {"q": "in", "k": "in", "v": "in", "o": "out"}
    assert roles == {f"blocks.0.body.{k}.weight": v for k, v in body.items()} | {
        "blocks.1.body.gate.weight": "in",
        "blocks.1.body.up.weight": "in",
        "blocks.1.body.down.weight": "out",
        "head.weight": "head",
    }


@pytest.mark.parametrize("hadamard", [False, True])
def test_assign_scheme__down_reads_a_non_linearity(hadamard: bool) -> None:
    """By position: the gated product's reader in the language model, not attention's output, nor the vision tower's."""
    down = Scheme(WeightSpec(4), ActivationSpec())
    item = assign(down=down)
    prog = program("vlm", item) if hadamard else passed(recorded(*built("vlm")), [RaiseOps(), RaiseLinear()])
    check_exact(prog, item)
    roles = {weight_of(n): n.meta["role"] for n in prog.nodes("linear") if "scheme" in n.meta}
    found = {fqn for fqn, role in roles.items() if role == "down"}
    assert {fqn for fqn in found if fqn.startswith("text")} == {f for f in roles if f.startswith("text") and ".down" in f}
    given = {weight_of(n) for n in prog.nodes("linear") if n.meta.get("scheme") == down}
    assert given == {fqn for fqn in found if fqn.startswith("text")}
    assert given


def test_assign_scheme__refuses_the_head_whatever_it_is_called() -> None:
    assert misses(*built("rms_gqa"), assign()) == {"head": "kept in floating point (lm_head)"}


@pytest.mark.parametrize("pattern", ["blocks.1", "blocks.1.*", "*.body.down", "down", "d?wn"])
def test_assign_scheme__refuses_what_keep_names(pattern: str) -> None:
    found = misses(*built("rms_gqa"), assign(keep=(pattern,)))
    assert found["blocks.1.body.down"] == f"kept in floating point ({pattern})"
    assert "blocks.0.body.q" not in found


@pytest.mark.parametrize(
    ("pattern", "fqn", "role", "is_kept"),
    [
        ("lm_head", "model.score", "head", True),
        ("lm_head", "model.lm_head", "inner", True),
        ("lm_head", "model.my_lm_head", "inner", False),
        ("down", "a.down", "", True),
        ("down", "a.down.b", "", True),
        ("down", "a.downer", "", False),
        ("a.*.down", "a.0.down", "", True),
    ],
)
def test_assign_scheme__keep_patterns(pattern: str, fqn: str, role: str, is_kept: bool) -> None:
    assert kept(pattern, fqn, role) == is_kept


class Odd(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.norm, self.up = how, RMSNorm(), nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        ways = {
            "computed": lambda: F.linear(y, self.weight * 2),
            "function": lambda: F.linear(y, self.weight),
            "borrowed": lambda: F.linear(y, self.up.weight),
            "read_twice": lambda: self.up(y) * self.up.weight.sum(),
        }
        return x + ways[self.how]()


NO_MODULE = "it is no nn.Linear module of its own, so it cannot be swapped"


@pytest.mark.parametrize(
    ("how", "name", "reason"),
    [
        ("computed", "linear", "its weight is computed"),
        ("function", "blocks.0.weight", NO_MODULE),
        ("borrowed", "blocks.0.up", NO_MODULE),
        ("read_twice", "blocks.0.up", "another operation reads its weight"),
    ],
)
def test_assign_scheme__refuses(how: str, name: str, reason: str) -> None:
    found = misses(randomise(Text(Odd(how))), ids(), assign(keep=()))
    if how == "computed":
        name = "blocks.0"
    assert {key.removesuffix(".weight"): text for key, text in found.items()} == {name.removesuffix(".weight"): reason}


def test_assign_scheme__tower_without_scheme_has_no_site() -> None:
    model = randomise(Text(Branch(RMSNorm(), Mlp())))
    assert misses(model, ids(), AssignScheme(QuantConfig(vision=W8A8, keep=()))) == {}


@pytest.mark.parametrize("clip_scores", [False, True])
def test_assign_scheme__awqs_clip_spares_queries_and_keys(clip_scores: bool) -> None:
    clip = AssignScheme(awq(3, 8, clip_scores=clip_scores))
    prog = passed(program("vlm", clip), (clip,))
    solvers = {weight_of(n): n.meta["scheme"].weight.solver for n in prog.nodes("linear") if "scheme" in n.meta}
    spared = {fqn for fqn, solver in solvers.items() if solver == "rtn"}
    assert set(solvers.values()) == ({"awq_clip"} if clip_scores else {"awq_clip", "rtn"})
    assert clip_scores or spared == {fqn for fqn in solvers if fqn.split(".")[-2] in ("q", "k", "qkv")}


def test_assign_scheme__other_solvers_take_queries_and_keys_too() -> None:
    prog = passed(program("vlm", AssignScheme(awq(3, 8, solver="gptq"))), (AssignScheme(awq(3, 8, solver="gptq")),))
    assert {n.meta["scheme"].weight.solver for n in prog.nodes("linear") if "scheme" in n.meta} == {"gptq"}
