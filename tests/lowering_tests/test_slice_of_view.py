"""Images of a padded batch, each cut where its own number of patches says, in one compiled graph."""

import pytest
import torch
from tolerance import assert_close
from torch import Tensor


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
def test_slice_of_view__ends_where_data_says(lengths: tuple[int, int]) -> None:
    torch._dynamo.reset()
    x, counts = torch.randn(2, 7, 6), torch.tensor(lengths)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        assert_close(torch.compile(cut, backend="mmqc", fullgraph=True)(x, counts), cut(x, counts))
