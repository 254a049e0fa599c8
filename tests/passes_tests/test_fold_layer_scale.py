import pytest
import torch
from blocks import WIDTH, Branch, Mlp, RMSNorm, ids
from models import randomise
from pass_cases import check_exact, check_once, misses, prepared
from torch import Tensor, nn
from torch.nn import functional as F

from mmqc.passes.fold_layer_scale import FoldLayerScale
from mmqc.passes.fuse_rotation import FuseRotation


class Scaled(nn.Module):
    """x + λ * f(x) by way of ``how``, in front of another branch."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.embed, self.scale = how, nn.Embedding(40, WIDTH), nn.Parameter(torch.ones(WIDTH))
        self.norm, self.f, self.other = RMSNorm(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.block, self.head = Branch(RMSNorm(), Mlp()), nn.Linear(WIDTH, 8)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        y = self.f(self.norm(x))
        ways = {
            "plain": lambda: self.scale * y,
            "dropout": lambda: self.scale * F.dropout(y, 0.3, training=False),
            "tanh": lambda: self.scale.tanh() * y,
            "one_plus": lambda: y * (1 + self.scale),
            "twice": lambda: self.scale * y + self.scale * self.f(x),
            "exp": lambda: self.scale.exp() * y,
            "read_before": lambda: self.scale * y + y,
            "in_place": lambda: y.mul_(self.scale),
            "gain_elsewhere": lambda: self.scale * y + self.scale.sum(),
            "weight_elsewhere": lambda: self.scale * y + self.f(x),
            "bias_elsewhere": lambda: self.scale * y + self.f.bias,
            "two_linears": lambda: self.scale * y + self.scale * self.other(x),
            "softplus": lambda: F.softplus(self.scale) * y,
        }
        return self.head(self.norm(self.block(x + ways[self.how]())))


@pytest.mark.parametrize("how", ["plain", "dropout", "tanh", "one_plus", "twice", "exp"])
def test_fold_layer_scale__exact_and_out_of_the_way(how: str) -> None:
    prog = prepared(randomise(Scaled(how)), ids(), FoldLayerScale())
    check_exact(prog, FoldLayerScale())
    assert prog.records[-1].sites == ["scale -> f.weight"]
    check_once(prog, FoldLayerScale())
    prog = prepared(randomise(Scaled(how)), ids(), FuseRotation())
    check_exact(prog, FuseRotation())
    if how != "twice":  # there it reads the stream un-normed, too
        assert prog.decided.rotated["f.weight"].keys() == {0, 1}


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("read_before", "something else reads what it scales"),
        ("in_place", "its memory is written to in place"),
        ("gain_elsewhere", "something else reads the gain's weight"),
        ("weight_elsewhere", "something else uses the linear's weight"),
        ("bias_elsewhere", "something else uses the linear's bias"),
        ("two_linears", "what it scales is not one linear's output alone"),
        ("softplus", "no value of the weight makes this gain 1"),
    ],
)
def test_fold_layer_scale__refuses(how: str, reason: str) -> None:
    assert misses(randomise(Scaled(how)), ids(), FoldLayerScale()) == {"scale": reason}
