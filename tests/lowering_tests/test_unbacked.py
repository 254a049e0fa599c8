"""Sizes that only data says, in one compiled graph: images cut where their numbers of patches say, or left out as padding."""

import pytest
import torch
from tolerance import assert_close
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from mmqc.lowering.unbacked import renamed_again
from mmqc.versions import numbers


def cut(x: Tensor, lengths: Tensor) -> Tensor:
    """Rows of each image up to its length, one behind the other."""
    y = torch.ops.mmqc.materialize(x) * 2 + 1
    rows = []
    for i in range(x.shape[0]):
        n = lengths[i].item()
        torch._check(n >= 1)
        torch._check(n <= x.shape[1])
        rows.append(y[i][:n, :].unsqueeze(0).sum(1))
    return torch.cat(rows)


@pytest.mark.parametrize("lengths", [(3, 5), (7, 1)])
def test_slice__of_a_view_ends_where_data_says(lengths: tuple[int, int]) -> None:
    torch._dynamo.reset()
    x, counts = torch.randn(2, 7, 6), torch.tensor(lengths)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        assert_close(torch.compile(cut, backend="mmqc", fullgraph=True)(x, counts), cut(x, counts))


class Patches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 64, 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x[(x == 0.0).sum((1, 2, 3)) != x[0].numel()]).flatten(2).transpose(1, 2)


@pytest.mark.parametrize("padding", [0, 1])
def test_convolution__of_the_images_that_are_there(padding: int) -> None:
    torch._dynamo.reset()
    model, x = Patches().eval(), torch.randn(3, 3, 32, 32)
    x[:padding] = 0
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), torch.no_grad():
        assert_close(torch.compile(model, backend="mmqc")(x), model(x))


def test_renamed_again__a_size_that_equals_another() -> None:
    env = ShapeEnv()
    old, equal, new = (env.create_unbacked_symint().node._expr for _ in range(3))
    env._set_replacement(old, equal, "as a check of the model's does")
    if numbers(torch.__version__) < (2, 14):  # later ones do it themselves
        with pytest.raises(AssertionError, match="->"):
            env._rename_unbacked_to(old, new)
    with renamed_again():
        env._rename_unbacked_to(old, new)
    assert env.replace(new) == env.replace(old) == equal


def written(x: Tensor, weight: Tensor, bounds: Tensor) -> Tensor:
    """Rows and columns between bounds, of what is fused and of what lies in memory."""
    fused = torch.full((x.shape[0], x.shape[0]), -2.0)
    stored = weight * 1
    for i in range(2):
        fused[bounds[i] : bounds[i + 1], bounds[i] :] = i
        stored[bounds[i] : bounds[i + 1]] = 3
        stored[:, : bounds[i]] = 2 + i
    return (fused.exp() @ x) @ stored


@pytest.mark.parametrize("bounds", [(0, 3, 7), (2, 2, 5), (4, 1, -2), (-30, 3, 30)])
def test_written_slices__between_bounds_that_data_says(bounds: tuple[int, ...]) -> None:
    torch._dynamo.reset()
    x, weight = torch.randn(7, 6), torch.randn(6, 6)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(written, backend="mmqc", fullgraph=torch.__version__ >= (2, 12))  # before, it is left to Python
        for given in (bounds, (1, 4, 6)):
            assert_close(compiled(x, weight, torch.tensor(given)), written(x, weight, torch.tensor(given)))
