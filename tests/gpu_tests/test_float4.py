"""Weights as floats of 4 bits on a CUDA device: the op against its reference, a compiled graph that launches the kernel, GPTQ."""

import copy

import pytest
import torch
from tolerance import assert_close
from torch import nn

import mmqc
from mmqc import recipes
from mmqc.backend import backend, collect_records
from mmqc.ops import float4_matmul, gptq_block
from mmqc.ops.float4 import pack_float4, round_float4
from mmqc.specs import BLOCKS, Float4

pytestmark = pytest.mark.gpu
ops = torch.ops.mmqc


def weights(n: int, k: int, form: Float4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    codes = round_float4(torch.randn(n, k, device="cuda") * 4).to(torch.int8)
    scale = torch.randint(112, 122, (n, -(-k // BLOCKS[form])), dtype=torch.uint8, device="cuda")
    return pack_float4(codes), scale, torch.full((1,), 300.0, device="cuda") if form == "nvfp4" else None


@pytest.mark.parametrize("form", BLOCKS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 64, 128), (1, 3584, 18944), (17, 257, 300), (300, 512, 1280), (1000, 96, 63)])
def test_float4_matmul__cuda_equals_the_reference(m: int, n: int, k: int, dtype: torch.dtype, form: Float4) -> None:
    x, w, bias = torch.randn(m, k, device="cuda").to(dtype), weights(n, k, form), torch.randn(n, device="cuda")
    got = ops.float4_matmul(x, *w, bias, form)
    assert_close(got, float4_matmul.reference(x.double(), *w, bias.double(), form), dtype)
    assert torch.equal(ops.float4_matmul(x, *w, bias, form), got)


@pytest.mark.parametrize("size", [17, 128])
def test_gptq_block__cuda_rounds_alike(size: int) -> None:
    w, scale = torch.randint(-60, 61, (size, 100), device="cuda") / 4, torch.ones(size, 100, device="cuda")
    u = torch.eye(size, device="cuda") + torch.diag_embed(torch.full((size - 1,), 0.5, device="cuda"), 1)
    found = ops.gptq_block(w, u, scale, None, 4, True)
    want = gptq_block.reference(w, u, scale, None, 4, True)
    assert torch.equal(found[0], want[0])
    assert torch.equal(found[1], want[1])


@pytest.mark.parametrize("form", BLOCKS)
def test_backend__compiled_graph_calls_the_kernel(form: Float4) -> None:
    model = nn.Sequential(nn.Linear(256, 512), nn.SiLU(), nn.Linear(512, 256)).cuda().bfloat16().eval()
    batches = [{"input": torch.randn(2, 40, 256, device="cuda").bfloat16()} for _ in range(2)]
    mmqc.quantize_(model, recipes.gptq(4).with_float4(form).replace(keep=()), batches, progress=False)
    compiled = copy.deepcopy(model)
    compiled.compile(backend=backend)
    with torch.no_grad(), collect_records() as records:
        for rows in (40, 1, 400):
            x = torch.randn(2, rows, 256, device="cuda").bfloat16()
            assert_close(compiled(x), model(x), torch.bfloat16)
    assert not [fallback for record in records for fallback in record.fallbacks]
    assert any("float4_matmul" in name for record in records for name in record.kernels)
