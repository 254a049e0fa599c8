import pytest
import torch
from blocks import WIDTH, Branch, Mlp, RMSNorm, Text, ids
from float64 import EXACT, passed, recorded, relative_error, replayed
from models import randomise
from pass_cases import CASES, check_exact, check_golden, check_once, misses, prepared, program, randn
from torch import Tensor, nn
from torch.nn import functional as F

from mmqc.graph.changes import Turned
from mmqc.graph.plan import Plan
from mmqc.graph.program import Program
from mmqc.ops.rotate import random_hadamard, rotation_matrix
from mmqc.passes.fuse_rotation import FuseRotation


@pytest.mark.parametrize("case", CASES)
def test_fuse_rotation__exact(case: str) -> None:
    prog = program(case, FuseRotation())
    check_exact(prog, FuseRotation())
    assert prog.records[-1].sites
    assert prog.records[-1].delta == {}


@pytest.mark.parametrize("case", CASES)
def test_fuse_rotation__once(case: str) -> None:
    check_once(program(case, FuseRotation()), FuseRotation())


def test_fuse_rotation__golden() -> None:
    check_golden(program("vlm", FuseRotation()), FuseRotation(), "vlm")


@pytest.mark.parametrize("case", ["pre_ln", "rms_gqa", "fused_qkv", "parallel", "shared", "library_rms", "vlm"])
def test_fuse_rotation__stream_is_rotated(case: str) -> None:
    prog = program(case, FuseRotation())
    check_exact(prog, FuseRotation())
    rotated = {fqn for fqn, axes in prog.decided.rotated.items() for g in axes.values() if g[0].shape[1] == WIDTH}
    streams = {name for name in prog.weights if name.endswith(("embed.weight", "head.weight", "patches.weight"))}
    assert streams <= rotated


def test_fuse_rotation__weights_are_multiplied_by_the_matrix() -> None:
    prog = program("rms_gqa", FuseRotation())
    embed, q, o = (prog.value(name) for name in ("embed.weight", "blocks.0.body.q.weight", "blocks.0.body.o.weight"))
    check_exact(prog, FuseRotation(seed=3))
    r = rotation_matrix(*random_hadamard(WIDTH, 3))
    torch.testing.assert_close(r @ r.T, torch.eye(WIDTH, dtype=torch.float64))
    torch.testing.assert_close(prog.value("embed.weight"), embed @ r)
    torch.testing.assert_close(prog.value("blocks.0.body.q.weight"), q @ r)
    heads = rotation_matrix(*random_hadamard(4, 3))
    inside = (o.unflatten(1, (4, 4)) @ heads).flatten(1)
    torch.testing.assert_close(prog.value("blocks.0.body.o.weight"), r.T @ inside)


def test_fuse_rotation__seeds_differ() -> None:
    values = []
    for seed in (0, 1):
        prog = program("rms_gqa", FuseRotation())
        passed(prog, [FuseRotation(seed)])
        values.append(prog.value("embed.weight"))
    assert not torch.equal(*values)


# --- refusals ---------------------------------------------------------------------------------------------------------


class Stream(nn.Module):
    """A stream of RMSNorms with one thing on it that no rotation passes."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.embed = how, nn.Embedding(40, WIDTH)
        self.block, self.extra, self.layer = Branch(RMSNorm(), Mlp()), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.gain, self.norm, self.head = nn.Parameter(torch.ones(WIDTH)), RMSNorm(), nn.Linear(WIDTH, 8)
        self.table = torch.linspace(-1, 1, WIDTH, dtype=torch.float64)

    def forward(self, input_ids: Tensor, features: Tensor) -> Tensor:
        x = self.block(self.embed(input_ids))
        ways = {
            "gelu": lambda: F.gelu(x),
            "gain": lambda: x * self.gain,
            "output": lambda: x,
            "input": lambda: x + features,
            "loose": lambda: x + self.table,
            "constant": lambda: x + 1.0,
            "softmax": lambda: x + x.softmax(-1),
            "transposed": lambda: x + F.linear(F.linear(x, self.extra.weight), self.extra.weight.t()),
            "weight_elsewhere": lambda: x + self.extra(x) + self.extra.weight.sum(),
            "bias_elsewhere": lambda: x + self.extra(x) + self.extra.bias,
        }
        x = ways[self.how]()
        return x if self.how == "output" else self.head(self.norm(x))


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("gelu", "gelu: gelu does not commute with a rotation"),
        ("gain", "mul_5: a gain per channel is multiplied in"),
        ("output", "a graph input or output lies on it"),
        ("input", "a graph input or output lies on it"),
        ("loose", "add_3: something that is no channel of a weight is added"),
        ("constant", "add_3: something that is no channel of a weight is added"),
        ("softmax", "softmax: softmax does not commute with a rotation"),
        ("transposed", "it uses extra.weight in another way"),
        ("weight_elsewhere", "add_4: something that is no channel of a weight is added"),
        ("bias_elsewhere", "it uses extra.weight in another way"),
    ],
)
def test_fuse_rotation__refuses(how: str, reason: str) -> None:
    found = misses(randomise(Stream(how)), {**ids(), "features": randn(2, 6, WIDTH)}, FuseRotation())
    (stream,) = [text for names, text in found.items() if "embed.weight" in names]
    assert stream.split(": ")[-1] == reason.split(": ")[-1]


def test_fuse_rotation__refuses_what_only_a_non_linearity_writes() -> None:
    found = misses(randomise(Text(Branch(RMSNorm(), Mlp()))), ids(), FuseRotation())
    assert found == {"blocks.0.body.down.weight": "gelu (gelu) writes it, so the rotation would have to run online"}


class Patches(nn.Module):
    """A linear of pixels, and no linear that reads what it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(12, WIDTH)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.patch(pixels).mean(1)


def test_fuse_rotation__names_a_linear_that_no_other_linear_meets() -> None:
    found = misses(randomise(Patches()), {"pixels": randn(2, 6, 12)}, FuseRotation())
    assert found == {"patch.weight": "a graph input or output lies on it"}


# --- LayerNorms that keep their mean ----------------------------------------------------------------------------------


class Unfoldable(nn.Module):
    """LayerNorms over a stream whose mean a linear reads, over two tokens side by side, and behind a norm with a gain."""

    def __init__(self, start: bool) -> None:
        super().__init__()
        self.embed, self.start = nn.Embedding(40, WIDTH), nn.LayerNorm(WIDTH) if start else nn.Identity()
        self.blocks = nn.ModuleList(Branch(nn.LayerNorm(WIDTH), Mlp()) for _ in range(6))
        self.wide, self.extra = nn.LayerNorm(2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.end, self.head, self.last = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.start(self.embed(input_ids))
        for block in self.blocks:
            x = block(x)
        y = self.extra(self.wide(x.reshape(len(x), -1, 2 * WIDTH)))
        return self.head(x[:, : y.shape[1]] + y) + self.last(F.gelu(self.end(x[:, : y.shape[1]])))


@pytest.mark.parametrize("n", [1, 2, 12, 16, 60, 296])
def test_fuse_rotation__keeps_means(n: int) -> None:
    turn = Turned.of(n, 3, keep_mean=True)
    r = turn(torch.eye(n, dtype=torch.float64))
    torch.testing.assert_close(r @ r.T, torch.eye(n, dtype=torch.float64))
    torch.testing.assert_close(r.sum(0), torch.ones(n, dtype=torch.float64))
    assert r.abs().max() <= 1 if n < 16 else r.abs().max() < 6 / n**0.5
    x = randn(5, n)
    torch.testing.assert_close(turn(F.layer_norm(x, (n,))), F.layer_norm(turn(x), (n,)))


def test_fuse_rotation__layer_norms_may_keep_their_mean() -> None:
    prog = prepared(randomise(Unfoldable(start=False)), ids(), FuseRotation())
    check_exact(prog, FuseRotation(online=True))
    assert prog.nodes("layer_norm")
    assert prog.decided.mean_kept >= {("embed.weight", 1), ("blocks.0.body.up.weight", 1), ("extra.weight", 0)}
    assert [len(prog.nodes("rotate")), prog.records[-1].delta.get("rotate")] == [1, 1]  # in front of the last gain


@pytest.mark.parametrize("how", ["online", "offline"])
def test_fuse_rotation__a_norm_may_start_a_stream_online(how: str) -> None:
    prog = prepared(randomise(Unfoldable(start=True)), ids(), FuseRotation())
    check_exact(prog, FuseRotation(online=how == "online"))
    sites = [s for s in prog.records[-1].sites if "multiply-adds" in s]
    assert len(prog.nodes("rotate")) == (2 if how == "online" else 0)
    assert len(sites) == (how == "online")
    if how == "offline":
        assert any("would have to run online" in m.reason for m in prog.records[-1].misses)


def test_fuse_rotation__few_linears_are_not_worth_an_online_rotation() -> None:
    class Short(Unfoldable):
        def __init__(self) -> None:
            super().__init__(start=True)
            self.blocks = nn.ModuleList()

    found = misses(randomise(Short()), ids(), FuseRotation(online=True))
    assert "2 online rotations (start, ...) would serve 2 linears" in found.values()
    prog = prepared(randomise(Short()), ids(), FuseRotation())
    check_exact(prog, FuseRotation(online=True, everywhere=True))
    assert len(prog.nodes("rotate")) == 2


# --- fragments --------------------------------------------------------------------------------------------------------


class Part(nn.Module):
    """What a graph break may cut out: linears that read a stream and write it again."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](x)


def part(plan: bool) -> Program:
    model = randomise(Text(Branch(nn.RMSNorm(WIDTH, elementwise_affine=False), Mlp())))
    whole = prepared(model, ids(), FuseRotation())
    passed(whole, [FuseRotation()])
    prog = recorded(Part(model.blocks[0]), {"x": randn(2, 6, WIDTH)})
    prog.fragment = True
    prog.plan = Plan.from_dict(whole.decided.to_dict()) if plan else None
    prog.statistics = {"linears": {f"blocks.0.body.{name}.weight": {} for name in ("up", "down")}}
    return prog


def test_fuse_rotation__fragment_rotates_explicitly_at_its_edges() -> None:
    from mmqc.passes.raise_ops import RaiseOps

    prog = passed(part(plan=True), [RaiseOps()])
    before = replayed(prog)
    passed(prog, [FuseRotation()])
    assert relative_error(replayed(prog), before) < EXACT
    assert prog.records[-1].delta["rotate"] == 2
    assert set(prog.decided.rotated) == {"blocks.0.body.up.weight", "blocks.0.body.down.weight"}


def test_fuse_rotation__fragment_without_plan_is_left_alone() -> None:
    from mmqc.passes.raise_ops import RaiseOps

    prog = passed(part(plan=False), [RaiseOps(), FuseRotation()])
    assert prog.records[-1].sites == []
    assert {m.reason for m in prog.records[-1].misses} == {"the whole model's plan leaves it alone"}
