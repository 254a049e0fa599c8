"""The linear in two precisions on a CUDA device: the ops' kernels, eager and in a compiled graph."""

import pytest
import torch

import mmqc.ops  # noqa: F401
from mmqc.backend import backend, collect_records
from mmqc.kernels.shared.device_facts import has_warpgroup_products
from mmqc.ops.mixed_matmul import reference
from mmqc.ops.pack import pack_int4
from mmqc.ops.quantize_per_token import reference as quantize_reference

pytestmark = pytest.mark.gpu
ops = torch.ops.mmqc
PARTS = [([448, 64], [4, 8]), ([512], [4]), ([33, 7], [4, 8]), ([32, 16, 16], [4, 4, 8])]


def weights(widths: list[int], bits: list[int], n: int = 200) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    codes = [
        torch.randint(-(2 ** (b - 1)), 2 ** (b - 1), (n, w), dtype=torch.int8, generator=g)
        for w, b in zip(widths, bits, strict=True)
    ]
    stored = [(pack_int4(c) if b == 4 else c).cuda() for c, b in zip(codes, bits, strict=True)]
    scale = (torch.rand(n, len(widths), generator=g) + 0.1).cuda()
    return stored, scale, torch.stack([c.sum(1, dtype=torch.int32) for c in codes], 1).cuda()


@pytest.mark.parametrize(("widths", "bits"), PARTS)
@pytest.mark.parametrize("rows", [(1,), (3, 17), (700,)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_mixed_ops__cuda_equals_the_reference(widths, bits, rows, dtype) -> None:
    x = torch.randn(*rows, sum(widths), device="cuda").to(dtype)
    got, want = ops.quantize_per_token(x, None, widths, bits), quantize_reference(x, None, widths, bits)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    stored, scale, sums = weights(widths, bits)
    y = ops.mixed_matmul(*got, stored, scale, sums, None, widths, bits, dtype)
    expected = reference(*want, stored, scale, sums, None, widths, bits, torch.float64)
    # float32: the kernel rounds once to half a step of the high parts, 1 in 1e5 of these sums
    noise = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 3e-5, torch.float64: 1e-12}[dtype]
    assert float((y.double() - expected).norm() / expected.norm()) < noise


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("widths", "bits"), PARTS[:2])
def test_mixed_matmul__in_a_compiled_graph(widths, bits, dynamic) -> None:
    torch._dynamo.reset()
    stored, scale, sums = weights(widths, bits)
    bias = torch.randn(200, device="cuda").bfloat16()

    def function(x: torch.Tensor) -> torch.Tensor:
        return ops.mixed_matmul(*ops.quantize_per_token(x, None, widths, bits), stored, scale, sums, bias, widths, bits, x.dtype)

    compiled = torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=True)
    with collect_records() as records, torch.no_grad():
        for rows in (300, 40) if dynamic else (300,):
            x = torch.randn(2, rows, sum(widths), device="cuda", dtype=torch.bfloat16)
            y, expected = compiled(x), function(x)
            assert float((y - expected).double().norm() / expected.double().norm()) < 6e-3
    kernels = {k for record in records for k in record.kernels}
    # On Hopper the op itself takes many rows, of a number that is known, to a kernel that no generated code holds.
    call = not dynamic and has_warpgroup_products(torch.device("cuda"))
    assert {"mmqc quantize_per_token_kernel"} | (set() if call else {"mmqc joined_matmul_kernel"}) <= kernels
    assert {k for k in kernels if "mmqc." in k} == ({"extern mmqc.mixed_matmul"} if call else set())
