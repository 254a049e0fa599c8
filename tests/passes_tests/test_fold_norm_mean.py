import pytest
import torch
from blocks import WIDTH, Branch, Mlp, RMSNorm, Text, ids
from float64 import EXACT, output_of, relative_error
from models import randomise
from pass_cases import CASES, check_exact, check_golden, check_once, misses, program, randn
from torch import Tensor, nn
from torch.nn import functional as F

import mmqc
from mmqc.passes.fold_norm_mean import FoldNormMean

PRE_LN = [case for case in CASES if case.startswith("pre_ln") or case in ("fused_qkv", "parallel", "vlm")]


@pytest.mark.parametrize("case", CASES)
def test_fold_norm_mean__exact(case: str) -> None:
    prog = program(case, FoldNormMean())
    check_exact(prog, FoldNormMean())
    assert bool(prog.records[-1].sites) == (case in PRE_LN)
    assert not prog.nodes("layer_norm")


@pytest.mark.parametrize("case", PRE_LN)
def test_fold_norm_mean__once(case: str) -> None:
    check_once(program(case, FoldNormMean()), FoldNormMean())


def test_fold_norm_mean__golden() -> None:
    check_golden(program("vlm", FoldNormMean()), FoldNormMean(), "vlm")


def test_fold_norm_mean__every_writer_loses_its_mean() -> None:
    prog = program("vlm", FoldNormMean())
    check_exact(prog, FoldNormMean())
    written = {name.removeprefix("vision.") for name in prog.changed if prog.derived(name)[-1].formula.endswith("mean(W)")}
    assert written == {"patches.weight", "token", "positions", "blocks.0.body.o.weight", "blocks.1.body.down.weight"}
    for name, axis in (("patches.weight", 0), ("patches.bias", 0), ("token", -1), ("positions", -1)):
        assert prog.value(f"vision.{name}").mean(axis).abs().max() < torch.finfo(torch.float64).eps * WIDTH


class Stream(nn.Module):
    """A Pre-LN stream with one thing on it that forbids taking its mean."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.embed = how, nn.Embedding(40, WIDTH)
        self.block, self.extra, self.rms = Branch(nn.LayerNorm(WIDTH), Mlp()), nn.Linear(WIDTH, WIDTH), RMSNorm()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8)

    def forward(self, input_ids: Tensor, features: Tensor) -> Tensor:
        x = self.block(self.embed(input_ids))
        ways = {
            "linear": lambda: x + self.extra(x),
            "two_streams": lambda: x + self.extra(self.block.norm(features)),
            "rms_norm": lambda: x + self.extra(self.rms(x)),
            "operation": lambda: x + F.gelu(self.extra(self.block.norm(x))),
            "input": lambda: x + features,
            "function": lambda: x + self.extra(F.layer_norm(x, (WIDTH,))),
            "output": lambda: x,
        }
        x = ways[self.how]()
        return x if self.how == "output" else self.head(self.norm(x))


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("linear", "something other than a LayerNorm reads the stream"),
        ("rms_norm", "something other than a LayerNorm reads the stream"),
        ("operation", "a graph input, a graph output or an operation lies on the stream"),
        ("input", "a graph input, a graph output or an operation lies on the stream"),
        ("output", "a graph input, a graph output or an operation lies on the stream"),
        ("two_streams", "the norm runs over another stream too"),
        ("function", "the norm is no nn.LayerNorm module of its own, so it cannot be swapped"),
    ],
)
def test_fold_norm_mean__refuses(how: str, reason: str) -> None:
    model = randomise(Stream(how))
    found = misses(model, {**ids(), "features": randn(2, 6, WIDTH)}, FoldNormMean())
    assert found["block.norm"] == reason


def test_fold_norm_mean__refuses_a_norm_over_two_streams() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Embedding(40, WIDTH), nn.Embedding(40, WIDTH)
            self.norm, self.head = nn.LayerNorm(2 * WIDTH), nn.Linear(2 * WIDTH, 8)
            self.first = nn.LayerNorm(WIDTH)

        def forward(self, input_ids: Tensor) -> Tensor:
            a, b = self.a(input_ids), self.b(input_ids)
            return self.head(self.norm(torch.cat((a, b), -1))) + self.first(a).sum()

    found = misses(randomise(Wide()), ids(), FoldNormMean())
    assert any("each copy has a mean of its own" in reason for reason in found.values())


def test_fold_norm_mean__post_norm_keeps_gain_and_bias() -> None:
    """x + LN(f(x)): the branch's last linear loses its mean, the norm becomes an RMSNorm with gain and bias."""
    model = randomise(
        Text(Branch(RMSNorm(), Mlp(), nn.LayerNorm(WIDTH)), Branch(RMSNorm(), Mlp(), nn.LayerNorm(WIDTH, bias=False)))
    )
    assert misses(model, ids(), FoldNormMean()) == {}
    called = Called(model).double()
    batch, other = ids(), {"input_ids": (ids()["input_ids"] * 3 + 1) % 20}
    expected = [output_of(called, b) for b in (batch, other)]
    mmqc.quantize_(called, mmqc.recipes.rotate(), [batch], progress=False)
    assert [type(m).__name__ for n, m in called.named_modules() if n.endswith("after")] == ["RMSNorm", "RMSNorm"]
    assert called.get_submodule("model.blocks.0.after").bias is not None
    for b, before in zip((batch, other), expected, strict=True):
        assert relative_error(output_of(called, b), before) < EXACT


class Called(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids)


def test_fold_norm_mean__text_of_rms_norms_has_no_site() -> None:
    assert misses(randomise(Text(Branch(RMSNorm(), Mlp()))), ids(), FoldNormMean()) == {}
