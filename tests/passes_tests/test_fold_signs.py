import pytest
import torch
from blocks import WIDTH, Branch, Mlp, RMSNorm, Text, ids
from models import randomise
from pass_cases import check_exact, check_once, prepared
from torch import Tensor, nn
from torch.nn import functional as F

from mmqc.ops.rotate import random_hadamard
from mmqc.passes.fold_signs import FoldSigns

HIDDEN = 24


class Gated(nn.Module):
    """down(act * up) by way of ``how``."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.both = how, nn.Linear(WIDTH, 2 * HIDDEN)
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN)
        self.down, self.other = nn.Linear(HIDDEN, WIDTH), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = F.silu(self.gate(x)), self.up(x)
        h = gate * up if self.how == "two_readers" else x
        if self.how == "fused":
            halves = self.both(x).chunk(2, -1)
            return self.down(F.silu(halves[0]) * halves[1])
        ways = {
            "plain": lambda: self.down(gate * up),
            "swapped": lambda: self.down(up * gate),
            "two_readers": lambda: self.down(h) + self.other(h),
            "up_read_twice": lambda: self.down(gate * up) + self.other(up),
            "square": lambda: self.down(up * up),
            "behind_relu": lambda: self.down(F.relu(gate * up)),
            "no_gate": lambda: self.down(F.gelu(up)),
        }
        return ways[self.how]()


@pytest.mark.parametrize("how", ["plain", "swapped", "fused", "two_readers"])
def test_fold_signs__flips_one_factor_and_its_readers(how: str) -> None:
    prog = prepared(randomise(Text(Branch(RMSNorm(), Gated(how)))), ids(), FoldSigns())
    up, down = "blocks.0.body.both.weight" if how == "fused" else "blocks.0.body.up.weight", "blocks.0.body.down.weight"
    before = {name: prog.value(name) for name in (up, down)}
    check_exact(prog, FoldSigns(seed=2))
    signs = random_hadamard(HIDDEN, 2)[1]
    rows = torch.cat((torch.ones(HIDDEN), signs)).double() if how == "fused" else signs
    assert torch.equal(prog.value(up), rows[:, None] * before[up])
    assert torch.equal(prog.value(down), before[down] * signs)
    assert prog.decided.flipped >= {(up, 0), (down, 1)}


def test_fold_signs__once() -> None:
    check_once(prepared(randomise(Text(Branch(RMSNorm(), Mlp(gated=True)))), ids(), FoldSigns()), FoldSigns())


@pytest.mark.parametrize("how", ["up_read_twice", "square", "behind_relu", "no_gate"])
def test_fold_signs__leaves_the_rest_alone(how: str) -> None:
    prog = prepared(randomise(Text(Branch(RMSNorm(), Gated(how)))), ids(), FoldSigns())
    check_exact(prog, FoldSigns())
    assert prog.records[-1].sites == []
