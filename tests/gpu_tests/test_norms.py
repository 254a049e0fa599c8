"""Norms and the static quantization behind them on a CUDA device: the op's kernel, eager and in a compiled graph."""

import pytest
import torch
from tolerance import few_differ
from torch import Tensor, nn

import mmqc.ops  # noqa: F401
from mmqc.backend import backend, collect_records
from mmqc.nn.linear import QuantLinear
from mmqc.ops import norm_quantize
from mmqc.solvers import Quantized

pytestmark = pytest.mark.gpu
ops = torch.ops.mmqc
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
KERNEL = "mmqc norm_quantize_kernel"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("rows", [(1,), (3, 17), (700,)])
@pytest.mark.parametrize("width", [1, 33, 512, 1280, 3420])
def test_norm_quantize__cuda_equals_the_reference(width, rows, center, dtype) -> None:
    x, r = (torch.randn(*rows, width, device="cuda").to(dtype) for _ in "xr")
    gain, bias = ((1 + 0.1 * torch.randn(width, device="cuda")).to(dtype) for _ in "gb")
    visual, scales = torch.rand(rows, device="cuda") < 0.5, torch.tensor([0.03, 0.05], device="cuda")
    for given in (
        (x, r, gain, bias, 1e-6, center, not center, scales, visual, 8),
        (x, None, None, None, 1e-6, center, False, scales[:1], None, 4),
    ):
        got, want = ops.norm_quantize(*given), norm_quantize.reference(*given)
        few_differ(got[0], want[0], 0.03)
        assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("code", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize("dynamic", [False, True])
def test_norm_quantize__in_a_compiled_graph(dynamic, code) -> None:
    torch._dynamo.reset()
    gain, bias = (torch.rand(1280, device="cuda").bfloat16() + 0.5 for _ in "gb")
    scales = torch.tensor([0.03, 0.05], device="cuda")

    def function(x: Tensor, r: Tensor, visual: Tensor) -> tuple[Tensor, ...]:
        first = ops.norm_quantize(x, r, gain, bias, 1e-6, True, False, scales, visual, 8, code)
        second = ops.norm_quantize(first[1], None, gain, None, 1e-6, False, True, scales[:1], None, 8, code)
        return *first, second[0]

    compiled = torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=True)
    with collect_records() as records, torch.no_grad():
        for rows in (300, 40) if dynamic else (300,):
            x, r = (torch.randn(2, rows, 1280, device="cuda", dtype=torch.bfloat16) for _ in "xr")
            visual = torch.rand(2, rows, device="cuda") < 0.5
            for got, want in zip(compiled(x, r, visual), function(x, r, visual), strict=True):
                assert torch.equal(got.view(torch.int8), want.view(torch.int8)), "the same kernels"
    assert [k for record in records for k in record.kernels].count(KERNEL) == 2


class Block(nn.Module):
    """x + f(n(x)), twice, and a LayerNorm the second time."""

    def __init__(self) -> None:
        super().__init__()
        self.rms, self.layer = nn.Parameter(torch.rand(512) + 0.5), nn.LayerNorm(512)
        self.linears = nn.ModuleList(
            QuantLinear.from_parts(
                Quantized(torch.randint(-128, 128, (512, 512), dtype=torch.int8), torch.rand(512) * 1e-3),
                weight_bits=8,
                activation_bits=8,
                input_scale=torch.tensor([0.03]),
            )
            for _ in "ab"
        )

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        h = self.rms * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        x = x + self.linears[0](h)
        return x + self.linears[1](self.layer(x))


@pytest.mark.parametrize(("rows", "kernels"), [(200, 2), (3, 0)])
def test_backend__norms_of_many_rows_are_the_kernel(rows, kernels) -> None:
    torch._dynamo.reset()
    model = Block().cuda().bfloat16()
    for linear in model.linears:
        linear.input_scale.data = linear.input_scale.float()
    x = torch.randn(rows, 512, device="cuda", dtype=torch.bfloat16)
    with collect_records() as records, torch.no_grad():
        got, want = torch.compile(model, backend="mmqc", fullgraph=True, dynamic=False)(x), model(x)
    assert records[0].ops["norm_quantize"] == 2
    assert [k for record in records for k in record.kernels].count(KERNEL) == kernels
    assert ((got - want).norm() / want.norm()).item() < 0.02
