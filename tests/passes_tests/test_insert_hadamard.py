import pytest
import torch
from blocks import WIDTH, Attention, Branch, Mlp, RMSNorm, Text, ids
from hypothesis import given, settings
from hypothesis import strategies as st
from models import randomise
from pass_cases import CASES, check_exact, check_golden, check_once, misses, program
from torch import Tensor, nn
from torch.nn import functional as F

from mmqc.passes.insert_hadamard import InsertHadamard


@pytest.mark.parametrize("case", CASES)
def test_insert_hadamard__exact(case: str) -> None:
    prog = program(case, InsertHadamard())
    check_exact(prog, InsertHadamard())
    assert all(site.split(":")[0].endswith(("down.weight", "o.weight")) for site in prog.records[-1].sites[:1])
    assert bool(prog.records[-1].sites) == (case != "fused_qkv")


@pytest.mark.parametrize("case", CASES)
def test_insert_hadamard__once(case: str) -> None:
    check_once(program(case, InsertHadamard()), InsertHadamard())


def test_insert_hadamard__golden() -> None:
    check_golden(program("vlm", InsertHadamard()), InsertHadamard(), "vlm")


@settings(max_examples=15)
@given(st.integers(2, 70))
def test_insert_hadamard__every_width(hidden: int) -> None:
    model = randomise(Text(Branch(RMSNorm(), Mlp(hidden=hidden))))
    assert misses(model, ids(), InsertHadamard()) == {}


def test_insert_hadamard__weight_called_twice_is_multiplied_once() -> None:
    prog = program("shared", InsertHadamard())
    check_exact(prog, InsertHadamard())
    assert [s.split(":")[0] for s in prog.records[-1].sites] == ["blocks.0.body.down.weight"]
    assert len(prog.nodes("hadamard")) == 2
    assert len(prog.derived("blocks.0.body.down.weight")) == 3  # rotated out, signs, W Hᵀ


class Odd(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.norm, self.up = how, RMSNorm(), nn.Linear(WIDTH, 24)
        self.down, self.weight = nn.Linear(24, WIDTH), nn.Parameter(torch.zeros(WIDTH, 24))
        self.wide = nn.Linear(24 + WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        h = F.gelu(self.up(y))
        ways = {
            "read_twice": lambda: self.down(h) + self.down.weight.sum(1),
            "function": lambda: F.linear(h, self.weight),
            "part": lambda: self.wide(torch.cat((h, y), -1)),
        }
        return x + ways[self.how]()


@pytest.mark.parametrize(
    ("how", "fqn", "reason"),
    [
        ("read_twice", "blocks.0.down.weight", "something else reads its weight"),
        ("function", "blocks.0.weight", "it is no nn.Linear module, so an online transform has no place"),
        ("part", "blocks.0.wide.weight", "only some of its columns read an operation's result"),
    ],
)
def test_insert_hadamard__refuses(how: str, fqn: str, reason: str) -> None:
    assert misses(randomise(Text(Odd(how))), ids(), InsertHadamard()) == {fqn: reason}


@pytest.mark.parametrize("blocks", [2, 4])
def test_insert_hadamard__blocks_are_the_language_models(blocks: int) -> None:
    prog = program("vlm", InsertHadamard(blocks=blocks))
    check_exact(prog, InsertHadamard(blocks=blocks))
    has = {fqn: prog.decided.blocks.get(fqn, 1) for fqn in prog.decided.hadamards}
    assert {fqn for fqn, n in has.items() if n == blocks} == {fqn for fqn in has if fqn.startswith("text.")}
    assert set(has.values()) == {1, blocks}


def test_insert_hadamard__refuses_a_width_without_such_blocks() -> None:
    model = randomise(Text(Branch(RMSNorm(), Mlp(hidden=30))))
    reason = "its width of 30 has no 4 equal blocks, one for each rank of tensor_parallel"
    assert misses(model, ids(), InsertHadamard(blocks=4)) == {"blocks.0.body.down.weight": reason}


def test_insert_hadamard__values_of_attention_need_none() -> None:
    model = randomise(Text(Branch(RMSNorm(), Attention())))
    assert misses(model, ids(), InsertHadamard()) == {}
