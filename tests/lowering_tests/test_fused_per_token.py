"""Per-token quantization with what stands in front of it through Inductor, where no kernel takes it: equal to eager."""

import pytest
import torch
from tolerance import assert_close

from mmqc.backend import backend, collect_records
from mmqc.ops.hadamard_matrix import hadamard_factors

ops = torch.ops.mmqc


@pytest.mark.parametrize("dynamic", [False, True])
def test_lower_fused_per_token__equals_eager(dynamic: bool) -> None:
    torch._dynamo.reset()
    dtype = torch.float32  # Inductor leaves roundings to bfloat16 inside a kernel out
    factors = [f.float() for f in hadamard_factors(24)]
    gain, order = torch.randn(24).to(dtype), torch.randperm(24)
    basis = torch.eye(8)[torch.randperm(8)].to(dtype)  # sums of one term: no order of summation

    def function(x: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = ops.norm_quantize_per_token(x, r, gain, None, 1e-6, True, order, [15, 6, 3], [2, 4, 8])
        wide = ops.norm_quantize_per_token(x, None, gain, gain, 1e-6, False, None, [21, 3], [4, 8])
        keys = ops.basis_quantize_per_token(x.unflatten(-1, (3, 8)).transpose(1, 2), basis, [7, 1], [4, 8])
        down = ops.hadamard_quantize_per_token(x, r, factors, 4)
        return *first, *wide[:3], *keys, *down

    compiled = torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=True)
    x, r = (torch.randn(2, 9, 24).to(dtype) for _ in "xr")
    with torch.no_grad(), collect_records() as records:
        for got, want in zip(compiled(x, r), function(x, r), strict=True):
            assert got.dtype == want.dtype
            if want.is_floating_point():
                assert_close(got, want, dtype)
            else:
                off = (got.int() - want.int()).abs()
                assert off.max() <= 1
                assert (off > 0).float().mean() <= 0.02 + 1.5 / off.numel()
    assert records[0].ops["norm_quantize_per_token"] == 2
    assert records[0].fallbacks == []
