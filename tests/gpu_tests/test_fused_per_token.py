"""Per-token quantization with what stands in front of it on a CUDA device: the ops' kernels, eager and in a compiled graph."""

import pytest
import torch
from tolerance import assert_close, few_differ

import mmqc.ops  # noqa: F401
from mmqc.backend import backend, collect_records
from mmqc.ops import basis_quantize_per_token, hadamard_quantize_per_token, norm_quantize_per_token
from mmqc.ops.hadamard_matrix import hadamard_factors

pytestmark = pytest.mark.gpu
ops = torch.ops.mmqc
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [(1,), (3, 17), (700,)])
@pytest.mark.parametrize(("widths", "bits"), [([448, 64], [4, 8]), ([512], [4]), ([33, 7], [4, 8]), ([32, 16, 16], [2, 4, 8])])
def test_norm_quantize_per_token__cuda_equals_the_reference(widths, bits, rows, dtype) -> None:
    width = sum(widths)
    x, r = (torch.randn(*rows, width, device="cuda").to(dtype) for _ in "xr")
    gain, order = torch.rand(width, device="cuda").to(dtype) + 0.5, torch.randperm(width, device="cuda")
    for given in ((x, r, gain, None, 1e-6, True, None), (x, None, gain, gain, 1e-6, False, order)):
        got, want = (f(*given, widths, bits) for f in (ops.norm_quantize_per_token, norm_quantize_per_token.reference))
        few_differ(got[0], want[0], 0.03)
        assert_close(got[1], want[1], dtype)
        assert torch.equal(got[3], want[3])


@pytest.mark.parametrize("dtype", DTYPES[:3])
@pytest.mark.parametrize("shape", [(1, 3584), (300, 3584), (5, 2, 64)])
def test_hadamard_quantize_per_token__cuda_equals_the_reference(shape, dtype) -> None:
    x, up = (torch.randn(shape, device="cuda").to(dtype) for _ in "xu")
    factors = [f.float().cuda() for f in hadamard_factors(shape[-1])]
    for gate in (None, up):
        got = ops.hadamard_quantize_per_token(x, gate, factors, 4)
        want = hadamard_quantize_per_token.reference(x, gate, factors, 4)
        few_differ(got[0], want[0], 0.03)
        assert_close(got[1], want[1], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("widths", "bits"), [([112, 16], [4, 8]), ([70, 10], [3, 8]), ([64], [4])])
def test_basis_quantize_per_token__cuda_equals_the_reference(widths, bits, dtype) -> None:
    width = sum(widths)
    x = torch.randn(2, 3, 50, width, device="cuda").to(dtype).transpose(1, 2)
    basis = torch.linalg.qr(torch.randn(width, width, device="cuda", dtype=torch.float64))[0].to(dtype)
    got, want = (f(x, basis, widths, bits) for f in (ops.basis_quantize_per_token, basis_quantize_per_token.reference))
    few_differ(got[0], want[0], 0.03)
    assert_close(got[1], want[1], dtype)


@pytest.mark.parametrize("dynamic", [False, True])
def test_fused_per_token__in_a_compiled_graph(dynamic) -> None:
    torch._dynamo.reset()
    factors = [f.float().cuda() for f in hadamard_factors(512)]
    gain, basis = torch.rand(512, device="cuda").bfloat16() + 0.5, torch.eye(128, device="cuda").bfloat16()

    def function(x: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, ...]:
        normed = ops.norm_quantize_per_token(x, r, gain, None, 1e-6, True, None, [448, 64], [4, 8])
        transformed = ops.hadamard_quantize_per_token(x, r, factors, 4)
        keys = ops.basis_quantize_per_token(x.unflatten(-1, (4, 128)), basis, [112, 16], [4, 8])
        return *normed, *transformed, *keys

    compiled = torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=True)
    with collect_records() as records, torch.no_grad():
        for rows in (300, 40) if dynamic else (300,):
            x, r = (torch.randn(2, rows, 512, device="cuda", dtype=torch.bfloat16) for _ in "xr")
            for got, want in zip(compiled(x, r), function(x, r), strict=True):
                assert torch.equal(got, want), "the same kernels"
    names = {k for record in records for k in record.kernels}
    wanted = {"norm_quantize_per_token_kernel", "hadamard_quantize_kernel", "basis_quantize_per_token_kernel"}
    assert {f"mmqc {name}" for name in wanted} <= names
    assert not [reason for record in records for reason in record.fallbacks]
