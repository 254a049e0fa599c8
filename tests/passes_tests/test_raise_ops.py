import pytest
import torch
from blocks import WIDTH, Branch, Mlp, RMSNorm, Text, ids
from float64 import recorded, relative_error
from pass_cases import CASES, check_exact, check_golden, check_once, misses, program
from torch import Tensor, nn
from torch.nn import functional as F

from mmqc.graph.kinds import kind
from mmqc.graph.semantic import layer_norm, rms_norm
from mmqc.passes.facts import ops_raised
from mmqc.passes.raise_ops import RaiseOps, called_norm


@pytest.mark.parametrize("case", CASES)
def test_raise_ops__exact(case: str) -> None:
    prog = program(case, RaiseOps())
    check_exact(prog, RaiseOps())
    assert prog.records[-1].sites
    assert ops_raised(prog) == []
    assert not prog.nodes("rsqrt")
    assert {n.target for n in prog.nodes("layer_norm", "rms_norm")} <= {layer_norm, rms_norm}


@pytest.mark.parametrize("case", CASES)
def test_raise_ops__once(case: str) -> None:
    check_once(program(case, RaiseOps()), RaiseOps())


def test_raise_ops__golden() -> None:
    check_golden(program("parallel", RaiseOps()), RaiseOps(), "parallel")
    check_golden(program("sandwich_plus_one", RaiseOps()), RaiseOps(), "sandwich_plus_one")


class Spelled(nn.Module):
    """The ways in which transformers spells 1 / rms(x), and look-alikes."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        w = x.float()
        ways = {
            "square": lambda: w * torch.rsqrt(w.square().mean(dim=-1, keepdim=True) + 1e-6),
            "power": lambda: w * torch.pow(w.pow(2).mean((-1,), keepdim=True) + 1e-6, -0.5),
            "eps_first": lambda: (1e-6 + (w**2).mean(-1, keepdim=True)).rsqrt() * w,
            "other_axis": lambda: w * torch.rsqrt(w.pow(2).mean(1, keepdim=True) + 1e-6),
            "other_operand": lambda: (w + 1) * torch.rsqrt(w.pow(2).mean(-1, keepdim=True) + 1e-6),
            "cube": lambda: w * torch.rsqrt(w.abs().pow(3).mean(-1, keepdim=True) + 1e-6),
            "no_keepdim": lambda: w * torch.rsqrt(w.pow(2).mean(-1) + 1e-6),
        }
        return ways[self.how]()


@pytest.mark.parametrize("how", ["square", "power", "eps_first"])
def test_raise_ops__spellings_of_one_norm(how: str) -> None:
    prog = recorded(Spelled(how), {"x": torch.randn(2, 3, 8)})
    check_exact(prog, RaiseOps())
    assert [kind(n) for n in prog.graph.nodes if n.op.startswith("call")] == ["rms_norm"]


class SpelledLayerNorm(nn.Module):
    """A LayerNorm without bias, as Cohere writes it."""

    def __init__(self, divide: bool) -> None:
        super().__init__()
        self.divide, self.weight = divide, nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        mean = x.mean(-1, keepdim=True)
        variance = (x - mean).pow(2).mean(-1, keepdim=True)
        return self.weight * (
            (x - mean) / torch.sqrt(variance + 1e-5) if self.divide else (x - mean) * torch.rsqrt(variance + 1e-5)
        )


@pytest.mark.parametrize("divide", [False, True])
def test_raise_ops__spelled_layer_norm(divide: bool) -> None:
    prog = recorded(SpelledLayerNorm(divide), {"x": torch.randn(2, 3, 8)})
    check_exact(prog, RaiseOps())
    assert [n.target for n in prog.nodes("layer_norm")] == [layer_norm]
    assert not prog.nodes("rsqrt", "sqrt", "rms_norm")


@pytest.mark.parametrize("how", ["other_axis", "other_operand", "cube", "no_keepdim"])
def test_raise_ops__look_alikes_are_left_alone(how: str) -> None:
    prog = recorded(Spelled(how), {"x": torch.randn(4, 4, 4)})
    check_exact(prog, RaiseOps())
    assert prog.records[-1].sites == []


def test_raise_ops__default_epsilon_is_that_of_the_type() -> None:
    prog = recorded(Small(), {"x": 1e-6 * torch.randn(3, 8)})
    check_exact(prog, RaiseOps())
    assert prog.records[-1].sites


class Small(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (8,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_raise_ops__keeps_the_type(dtype: torch.dtype) -> None:
    from mmqc.graph.record import record
    from mmqc.graph.runner import run
    from mmqc.pipeline import FACTS

    model = Text(Branch(RMSNorm(), Mlp())).to(dtype)
    prog = record(model, ids())
    before = replayed_as_is(prog)
    run(prog, [RaiseOps()], FACTS)
    assert replayed_as_is(prog).dtype == before.dtype
    assert relative_error(replayed_as_is(prog), before) < torch.finfo(dtype).eps


def replayed_as_is(prog) -> Tensor:
    with torch.no_grad():
        return prog.replay()[0]


class TwoAxes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(40, WIDTH), nn.LayerNorm((6, WIDTH))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(input_ids)))


def test_raise_ops__refuses_layer_norm_over_two_axes() -> None:
    assert misses(TwoAxes(), ids(), RaiseOps()) == {"layer_norm": "layer_norm over 2 axes"}


def test_raise_ops__later_passes_leave_a_refused_norm_alone() -> None:
    from pass_cases import EXACT_PASSES

    prog = recorded(TwoAxes(), ids())
    for item in EXACT_PASSES:
        check_exact(prog, item)
    assert all(n.target is F.layer_norm for n in prog.nodes("layer_norm"))


def test_raise_ops__an_epsilon_that_dynamo_made_an_input() -> None:
    """As of a block whose frame is compiled by itself, for the second value that it meets."""

    def block(x: Tensor, eps: float) -> Tensor:
        return F.layer_norm(x, (WIDTH,), eps=eps)

    found: list[tuple[bool, float]] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        del inputs
        for node in gm.graph.nodes:
            if kind(node) == "layer_norm":
                found.append((isinstance(node.kwargs["eps"], torch.fx.Node), called_norm(node).eps))
        return gm

    x, compiled = torch.randn(2, 3, WIDTH), torch.compile(block, backend=backend)
    for eps in (1e-5, 0.5, 2.0):
        torch.testing.assert_close(compiled(x, eps), block(x, eps))
    assert found == [(False, 1e-5), (True, 0.5), (True, 2.0)]
