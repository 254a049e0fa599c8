import pytest
import torch
from blocks import IMAGE, WIDTH, Branch, Mlp, RMSNorm, Text, ids
from models import randomise
from pass_cases import CASES, check_exact, check_golden, check_once, misses, program
from torch import Tensor, nn
from torch.nn import functional as F

from mmqc.passes.fold_norm_scale import FoldNormScale


@pytest.mark.parametrize("case", CASES)
def test_fold_norm_scale__exact(case: str) -> None:
    prog = program(case, FoldNormScale())
    check_exact(prog, FoldNormScale())
    assert prog.records[-1].sites


@pytest.mark.parametrize("case", CASES)
def test_fold_norm_scale__once(case: str) -> None:
    check_once(program(case, FoldNormScale()), FoldNormScale())


def test_fold_norm_scale__golden() -> None:
    check_golden(program("vlm", FoldNormScale()), FoldNormScale(), "vlm")


def test_fold_norm_scale__merger_reads_one_gain_four_times() -> None:
    prog = program("vlm", FoldNormScale())
    old = prog.weights["merger.mlp.up.weight"].double()
    gain, bias = prog.weights["merger.norm.weight"], prog.weights["merger.norm.bias"]
    check_exact(prog, FoldNormScale())
    torch.testing.assert_close(prog.value("merger.mlp.up.weight"), old * gain.repeat(4))
    moved = prog.value("merger.mlp.up.bias") - prog.weights["merger.mlp.up.bias"]
    torch.testing.assert_close(moved, old @ bias.repeat(4))
    assert prog.value("merger.norm.weight").eq(1).all()
    assert prog.value("merger.norm.bias").eq(0).all()


def test_fold_norm_scale__neutral_value_of_one_plus_w_is_zero() -> None:
    prog = program("sandwich_plus_one", FoldNormScale())
    check_exact(prog, FoldNormScale())
    assert prog.value("norm.weight").eq(0).all()


def test_fold_norm_scale__creates_a_bias_where_there_was_none() -> None:
    prog = program("pre_ln", FoldNormScale())
    assert "head.bias" not in prog.weights
    check_exact(prog, FoldNormScale())
    assert prog.value("head.bias").abs().max() > 0


def test_fold_norm_scale__shared_weight_is_scaled_once() -> None:
    prog = program("shared", FoldNormScale())
    old = prog.weights["blocks.0.body.up.weight"].double()
    check_exact(prog, FoldNormScale())
    torch.testing.assert_close(prog.value("blocks.0.body.up.weight"), old * prog.weights["blocks.0.norm.weight"])


# --- refusals ---------------------------------------------------------------------------------------------------------


class Reader(nn.Module):
    """A norm with gain (and bias) whose output goes somewhere in some way."""

    def __init__(self, how: str, norm: type[nn.Module]) -> None:
        super().__init__()
        self.how, self.norm, self.down = how, norm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        ways = {
            "computed": lambda: F.linear(y, self.weight * 2),
            "gelu": lambda: self.down(F.gelu(y)),
            "add": lambda: self.down(y) + y,
            "scaled": lambda: self.down(2 * y),
            "subtracted": lambda: self.down(-y),
            "padded": lambda: self.down(F.pad(y, (0, 0, 1, 1)))[:, 1:-1],
            "masked": lambda: self.down(y.masked_fill(torch.arange(y.shape[1])[:, None] == 2, 0)),
            "summed": lambda: self.down(y.sum(1, keepdim=True)),
            "twice": lambda: self.down(y) + self.norm.weight,
            "second_norm": lambda: self.down(F.layer_norm(y, (WIDTH,))),
        }
        return x + ways[self.how]()


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("computed", "linear: the weight of this linear is computed"),
        ("gelu", "gelu: gelu does not commute with a rotation"),
        ("add", "another norm reads it"),
        ("scaled", "mul_2: its bias does not reach a linear unchanged"),
        ("subtracted", "neg: its bias does not reach a linear unchanged"),
        ("padded", "linear: some rows have no bias"),
        ("masked", "linear: some rows have no bias"),
        ("summed", "sum_1: its bias does not reach a linear unchanged"),
        ("twice", "something else reads the gain's weight"),
        ("second_norm", "another norm reads it"),
    ],
)
def test_fold_norm_scale__refuses(how: str, reason: str) -> None:
    model = randomise(Text(Reader(how, nn.LayerNorm)))
    found = misses(model, ids(), FoldNormScale())
    assert found["blocks.0.norm.weight"].split("_")[0].split(":")[0] == reason.split("_")[0].split(":")[0]
    assert found["blocks.0.norm.weight"].endswith(reason.split(": ")[-1])


@pytest.mark.parametrize("how", ["scaled", "padded", "masked", "summed", "subtracted"])
def test_fold_norm_scale__without_bias_factors_and_empty_rows_do_no_harm(how: str) -> None:
    model = randomise(Text(Reader(how, RMSNorm)))
    assert misses(model, ids(), FoldNormScale()) == {}


class OddGain(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.norm = how, nn.RMSNorm(WIDTH, elementwise_affine=False, eps=1e-6)
        self.a, self.b = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(WIDTH))
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        gains = {
            "no_neutral": lambda: self.a.square() + 2,
            "two_weights": lambda: self.a * self.b,
            "activation": lambda: x.mean((0, 1)).abs(),
            "no_norm": lambda: self.a,
        }
        return x + self.down((x if self.how == "no_norm" else y) * gains[self.how]())


@pytest.mark.parametrize(
    ("how", "name", "reason"),
    [
        ("no_neutral", "blocks.0.a", "no value of the weight makes this gain 1"),
        ("two_weights", "blocks.0.a,blocks.0.b", "the gain is computed from activations or from several weights"),
    ],
)
def test_fold_norm_scale__refuses_a_gain_that_is_no_norms(how: str, name: str, reason: str) -> None:
    model = randomise(Text(OddGain(how)))
    assert misses(model, ids(), FoldNormScale())[name] == reason


@pytest.mark.parametrize("how", ["activation", "no_norm"])
def test_fold_norm_scale__other_factors_are_no_gain_of_a_norm(how: str) -> None:
    assert misses(randomise(Text(OddGain(how))), ids(), FoldNormScale()) == {}


def test_fold_norm_scale__refuses_qk_norm() -> None:
    prog = program("qk_norm", FoldNormScale())
    check_exact(prog, FoldNormScale())
    refused = {m.fqn: m.reason for m in prog.records[-1].misses}
    assert set(refused) == {"blocks.0.body.q_norm.weight", "blocks.0.body.k_norm.weight"}
    assert all("matmul" in reason for reason in refused.values())


def test_fold_norm_scale__refuses_what_users_see() -> None:
    class Features(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.norm = nn.Embedding(IMAGE, WIDTH), RMSNorm()
            self.block = Branch(RMSNorm(), Mlp())

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.norm(self.block(self.embed(input_ids)))

    found = misses(randomise(Features()), ids(), FoldNormScale())
    assert found == {"norm.weight": "a graph input or output lies on it"}
