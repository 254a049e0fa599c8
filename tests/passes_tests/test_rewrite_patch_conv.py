"""A convolution with one place to be is a linear, on the devices where that is faster."""

from typing import Any

import pytest
import torch
from tolerance import assert_close
from torch import Tensor, nn

from mmqc.compiler.record import collect_records
from mmqc.passes import rewrite_patch_conv


class Patches(nn.Module):
    """As Qwen2-VL's tower embeds them, with what makes the last norm worth a graph."""

    def __init__(self, conv: nn.Module, size: tuple[int, ...]) -> None:
        super().__init__()
        self.conv, self.size = conv, size

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.view(-1, *self.size)).flatten(1).relu()


def sites(conv: nn.Module, size: tuple[int, ...], x: Tensor, sizes: tuple[int, ...] = (0,)) -> list[str]:
    """Of the pass; the compiled module equals the module."""
    model, x = Patches(conv, size).double().eval(), x.double()
    torch.compiler.reset()
    torch._dynamo.maybe_mark_dynamic(x, list(sizes))
    with torch.no_grad(), collect_records() as records:
        got: Any = torch.compile(model, backend="mmqc", fullgraph=True)(x)
        assert_close(got, model(x))
    return [site for r in records for p in r.passes if p.name == "rewrite_patch_conv" for site in p.sites]


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrite_patch_conv, "DEVICES", ("cpu",))


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("bias", [False, True])
def test_rewrite_patch_conv__one_place_is_a_linear(bias: bool) -> None:
    conv = nn.Conv3d(3, 8, (2, 4, 4), stride=(2, 4, 4), bias=bias)
    assert len(sites(conv, (3, 2, 4, 4), torch.randn(7, 96))) == 1
    flat = nn.Conv2d(3, 8, 4, bias=bias)
    assert len(sites(flat, (3, 4, 4), torch.randn(5, 48), (0, 1))) == 1


@pytest.mark.usefixtures("on_cpu")
def test_rewrite_patch_conv__one_behind_another() -> None:
    assert len(sites(nn.Sequential(nn.Conv2d(3, 8, 4), nn.Conv2d(8, 6, 1)), (3, 4, 4), torch.randn(5, 48))) == 2


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(4, 8, 2, stride=2),  # four places
        nn.Conv2d(4, 8, 4, padding=1),
        nn.Conv2d(4, 8, 4, padding="same"),
        nn.Conv2d(4, 8, 4, groups=2),
        nn.Conv2d(4, 8, 2, dilation=3),
        nn.ConvTranspose2d(4, 8, 4),
    ],
)
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_rewrite_patch_conv__others_stay(conv: nn.Module) -> None:
    assert not sites(conv, (4, 4, 4), torch.randn(3, 64))


def test_rewrite_patch_conv__not_on_a_cpu() -> None:
    assert not sites(nn.Conv2d(3, 8, 4), (3, 4, 4), torch.randn(5, 48))
