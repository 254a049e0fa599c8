"""What modules are handed is compared with what they were handed before: rotated values are noticed, rounded ones are not."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mmqc
from mmqc import QuantConfig, Rewrites
from mmqc.nn.unseen import UnseenError
from mmqc.quantization.handed import Handed

WIDTH = 16


class Halves(nn.Module):
    """A stream between two norms, on which no weight lies, and something that only some calls come by."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.first = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.between = Between()
        self.second = nn.RMSNorm(WIDTH)
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, ids: Tensor, more: bool = False) -> Tensor:
        x = self.second(self.between(self.first(self.embed(ids)), more))
        for linear in self.linears:
            x = linear(x)
        return self.head(x)


class Between(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, more: bool) -> Tensor:
        return x + self.extra(x) if more else x


def turned(x: Tensor) -> Tensor:
    """Rotated a little."""
    angle = torch.tensor(0.3)
    turn = torch.eye(x.shape[-1])
    turn[:2, :2] = torch.stack((angle.cos(), -angle.sin(), angle.sin(), angle.cos())).view(2, 2)
    return x @ turn


@pytest.mark.parametrize(
    ("change", "dtype", "frames"),
    [
        (lambda x: x, torch.float32, set()),
        (lambda x: x.bfloat16().float(), torch.bfloat16, set()),
        (lambda x: x.bfloat16().float(), torch.float32, {"", "between"}),
        (turned, torch.float32, {"", "between"}),
        (lambda x: x.roll(1, -1), torch.bfloat16, {"", "between"}),
        (lambda x: x * torch.linspace(1, 3, WIDTH), torch.bfloat16, {"", "between"}),
    ],
)
def test_changed__is_more_than_rounding(change: Any, dtype: torch.dtype, frames: set[str]) -> None:
    model, ids = Halves(), torch.arange(10).view(2, 5)
    handed = Handed(model, ["", "between", "head"])
    with handed.watched(after=False):
        expected = model(ids)
    model.first.register_forward_hook(lambda m, args, y: change(y))
    model.second.register_forward_pre_hook(lambda m, args: (model.first.forward(model.embed.forward(ids)),))  # undoes it
    with handed.watched(after=True):
        assert torch.equal(model(ids), expected)
    assert handed.changed(dtype) == frames


def test_quantize__what_lies_between_two_norms_is_barred_if_it_is_rotated() -> None:
    torch.manual_seed(0)
    model, ids = Halves().double(), torch.arange(10).view(2, 5)
    expected = model(ids)
    mmqc.quantize_(model, QuantConfig(rewrites=Rewrites(fold_norms=True, rotate=True)), [{"ids": ids}], progress=False)
    assert (model(ids) - expected).norm() < 1e-9 * expected.norm()
    with pytest.raises(UnseenError, match=r"between\.extra"):
        model(ids, more=True)
