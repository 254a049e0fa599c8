import json

import pytest
import torch
from blocks import WIDTH, Attention, Branch, FusedAttention, Mlp, RMSNorm, Text, ids
from float64 import passed, recorded
from models import randomise
from pass_cases import CASES, built, check_exact, check_golden, check_once, program
from tolerance import assert_close
from torch import Tensor, nn
from torch.nn import functional as F

from mmqc.config import QuantConfig, Scheme
from mmqc.graph.plan import Plan
from mmqc.graph.program import Program
from mmqc.graph.scaling import Part, Scaling
from mmqc.passes.assign_scheme import AssignScheme
from mmqc.passes.fold_channel_scale import FoldChannelScale, Site
from mmqc.passes.raise_linear import RaiseLinear
from mmqc.passes.raise_ops import RaiseOps

W4 = QuantConfig(vision=Scheme(), projector=Scheme(), language=Scheme())


def factors(site: Site) -> tuple[Tensor, str]:
    """From 1/3 to 3, different for every site."""
    g = torch.Generator().manual_seed(site.width + sum(map(ord, str(site))))
    return torch.exp(torch.rand(site.width, generator=g, dtype=torch.float64) * 2.2 - 1.1), "random"


def scaled(average: bool = True) -> FoldChannelScale:
    return FoldChannelScale(factors, average)


def raised(model: nn.Module, batch: dict[str, Tensor]) -> Program:
    return passed(recorded(model, batch), [RaiseOps(), RaiseLinear(), AssignScheme(W4)])


def text(*blocks: nn.Module, **more: nn.Module) -> Program:
    return raised(randomise(Text(*blocks, **more)), ids())


def pairs(prog: Program, item: FoldChannelScale | None = None) -> dict[str, str]:
    """What the pass scales, writers by readers, after checking that it is exact."""
    check_exact(prog, item or scaled())
    return {
        ", ".join(dict.fromkeys(p.fqn.removeprefix("blocks.0.") for p in s.parts if p.reads)): ", ".join(
            dict.fromkeys(p.fqn.removeprefix("blocks.0.") for p in s.parts if not p.reads)
        )
        for s in prog.decided.scalings
    }


def reasons(prog: Program) -> dict[str, str]:
    return {m.fqn.removeprefix("blocks.0."): m.reason for m in prog.records[-1].misses}


@pytest.mark.parametrize("case", CASES)
def test_fold_channel_scale__exact(case: str) -> None:
    prog = raised(*built(case))
    check_exact(prog, scaled())
    sites, misses = prog.records[-1].sites, prog.records[-1].misses
    assert len(sites) + len(misses)


@pytest.mark.parametrize("case", ["shared", "vlm"])
def test_fold_channel_scale__exact_behind_the_other_rewrites(case: str) -> None:
    item = AssignScheme(W4)
    check_exact(passed(program(case, item), [item]), scaled())


@pytest.mark.parametrize("case", ["rms_gqa", "vlm"])
def test_fold_channel_scale__once(case: str) -> None:
    check_once(raised(*built(case)), scaled())


def test_fold_channel_scale__golden() -> None:
    check_golden(raised(*built("vlm")), scaled(), "vlm")


def test_fold_channel_scale__norms_heads_and_gates() -> None:
    prog = text(Branch(RMSNorm(), Attention(bias=True)), Branch(RMSNorm(plus_one=True), Mlp(gated=True)))
    assert pairs(prog) == {
        "body.q.weight, body.k.weight, body.v.weight": "norm.weight",
        "body.o.weight": "body.v.weight, body.v.bias",
        "blocks.1.body.gate.weight, blocks.1.body.up.weight": "blocks.1.norm.weight",
        "blocks.1.body.down.weight": "blocks.1.body.up.weight, blocks.1.body.up.bias",
    }
    assert reasons(prog) == {}


def test_fold_channel_scale__values_are_those_of_the_equation() -> None:
    prog = text(Branch(RMSNorm(plus_one=True), Attention(bias=True)))
    names = [f"blocks.0.{n}" for n in ("norm.weight", "body.q.weight", "body.v.weight", "body.v.bias", "body.o.weight")]
    gain, q, v, bias, o = (prog.value(n) for n in names)
    passed(prog, [scaled()])
    first, second = (s.scale for s in prog.decided.scalings)
    assert len(first) == WIDTH
    assert len(second) == WIDTH // 2
    heads = second.reshape(2, 1, 4).expand(2, 2, 4).reshape(-1)  # two query heads read one value head
    want = [(1 + gain) / first - 1, q * first, v * first / second[:, None], bias / second, o * heads]
    for name, expected in zip(names, want, strict=True):
        assert_close(prog.value(name), expected)


def test_fold_channel_scale__fused_projections_scale_their_own_rows() -> None:
    prog = text(Branch(nn.LayerNorm(WIDTH), FusedAttention()))
    before = prog.value("blocks.0.body.qkv.weight")
    found = pairs(prog)
    assert found["body.qkv.weight"] == "norm.weight, norm.bias"
    assert found["body.o.weight"] == "body.qkv.weight, body.qkv.bias"
    rows = next(p for s in prog.decided.scalings for p in s.parts if p.fqn.endswith("qkv.weight") and not p.reads)
    assert sorted(rows.index.tolist()) == list(range(2 * WIDTH, 3 * WIDTH))
    columns = next(s for s in prog.decided.scalings if s.parts[0].fqn.endswith("norm.weight")).scale
    torch.testing.assert_close(prog.value("blocks.0.body.qkv.weight")[: 2 * WIDTH], (before * columns)[: 2 * WIDTH], rtol=0, atol=0)


def test_fold_channel_scale__skips_shared_heads_if_told_to() -> None:
    prog = text(Branch(RMSNorm(), Attention()))
    assert "body.o.weight" not in pairs(prog, scaled(average=False))
    assert reasons(prog) == {"body.o.weight": "query heads share its value heads"}
    alone = text(Branch(RMSNorm(), Attention(kv_heads=4)))
    assert "body.o.weight" in pairs(alone, scaled(average=False))


class Between(nn.Module):
    """down(f(up(x)))."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.up, self.down = how, nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        ways = {
            "relu": lambda: F.relu(up),
            "leaky": lambda: F.leaky_relu(up, 0.1),
            "gelu": lambda: F.gelu(up),
            "square": lambda: up * up,
            "quick": lambda: up * torch.sigmoid(1.702 * up),
            "read": lambda: F.relu(up) + up,
            "in_place": lambda: up.relu_(),
        }
        return self.down(ways[self.how]())


@pytest.mark.parametrize("how", ["relu", "leaky"])
def test_fold_channel_scale__passes_what_commutes_with_it(how: str) -> None:
    assert pairs(text(Branch(RMSNorm(), Between(how))))["body.down.weight"] == "body.up.weight, body.up.bias"


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("gelu", "gelu makes its input"),
        ("in_place", "relu makes its input"),
        ("square", "neither factor of the product that it reads is a linear's alone"),
        ("quick", "neither factor of the product that it reads is a linear's alone"),
        ("read", "relu"),
    ],
)
def test_fold_channel_scale__refuses_other_non_linearities(how: str, reason: str) -> None:
    prog = text(Branch(RMSNorm(), Between(how)))
    assert "body.down.weight" not in pairs(prog)
    assert reason in reasons(prog)["body.down.weight"]


class TanhNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (WIDTH,), eps=1e-6) * torch.tanh(self.weight)


def test_fold_channel_scale__refuses_a_gain_that_is_not_affine() -> None:
    prog = text(Branch(TanhNorm(), Mlp()))
    assert pairs(prog) == {}
    assert reasons(prog)["body.up.weight"] == "its norm's gain is not w + c"


class Read(nn.Module):
    """The normed stream goes to a linear and, as it is, to the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = RMSNorm(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return y + self.up(y)


def test_fold_channel_scale__refuses_a_norm_that_something_else_reads() -> None:
    prog = text(Read())
    assert pairs(prog) == {}
    assert set(reasons(prog)) == {"up.weight"}


def test_fold_channel_scale__kept_linears_are_scaled_but_ask_for_nothing() -> None:
    model = randomise(Text(Branch(RMSNorm(), Mlp(gated=True))))
    keep = W4.replace(keep=("lm_head", "up"))
    prog = passed(recorded(model, ids()), [RaiseOps(), RaiseLinear(), AssignScheme(keep)])
    asked: list[set[str]] = []

    def ask(site: Site) -> tuple[Tensor, str]:
        asked.append(set(site.schemes))
        return factors(site)

    check_exact(prog, FoldChannelScale(ask))
    assert asked == [{"blocks.0.body.gate.weight"}, {"blocks.0.body.down.weight"}]


def test_fold_channel_scale__without_factors_nothing_changes() -> None:
    prog = raised(*built("rms_gqa"))
    passed(prog, [FoldChannelScale()])
    assert prog.changed == ()


def test_fold_channel_scale__a_plan_scales_what_is_there() -> None:
    whole, part = raised(*built("rms_gqa")), raised(*built("rms_gqa"))
    passed(whole, [scaled()])
    data = json.loads(json.dumps(whole.decided.to_dict()))
    part.plan = Plan.from_dict(data)
    check_exact(part, FoldChannelScale())
    assert sorted(part.changed) == sorted(whole.changed)
    assert all(torch.equal(part.value(n), whole.value(n)) for n in whole.changed)
    check_once(part, FoldChannelScale())
    missing = whole.changed[0]
    few = raised(*built("rms_gqa"))
    few.plan = Plan.from_dict(data)
    del few.weights[missing]
    assert missing not in {p.fqn for site in FoldChannelScale().match(few) for p in site.parts}


def test_scaling__is_its_own_json() -> None:
    index = torch.tensor([4, 5, 6, 0, 1, 9])
    one = Scaling(torch.rand(3, dtype=torch.float64), (Part("a", 1, index, torch.tensor([0, 1, 2, 0, 1, 2]), True, 1.0),))
    again = Scaling.from_dict(json.loads(json.dumps(one.to_dict())))
    (a,), (b,) = one.parts, again.parts
    assert torch.equal(again.scale, one.scale)
    assert torch.equal(a.index, b.index)
    assert torch.equal(a.channel, b.channel)
    assert (a.fqn, a.axis, a.reads, a.shift) == (b.fqn, b.axis, b.reads, b.shift)
