"""quantize_per_token through Inductor, where no kernel takes it: equal to eager for any parts, order and number of rows."""

import pytest
import torch
from compiled_ops import check_compiled

ops = torch.ops.mmqc


@pytest.mark.parametrize("dynamic", [False, True])
def test_lower_quantize_per_token__parts_in_an_order(dynamic: bool) -> None:
    order, parts = torch.randperm(24), (([24], [8]), ([21, 3], [4, 8]), ([15, 6, 3], [2, 4, 8]))

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = [ops.quantize_per_token(x, o, *some) for some in parts for o in (None, order)]
        return tuple(t for results in found for t in results)

    _, record = check_compiled(function, torch.randn(2, 9, 24), dynamic=dynamic)
    assert record.ops["quantize_per_token"] == 6
