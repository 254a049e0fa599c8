"""decode_attention in a compiled graph: the op itself without a GPU, one launch with it, at sizes that are symbols too."""

import pytest
import torch
from tolerance import assert_close
from torch._inductor.utils import run_and_get_code

from mmqc.ops import decode_attention as op


def attend(q, k, v, mask):
    return torch.ops.mmqc.decode_attention(q * 2, k, v, mask, 0.25) + 1


def operands(batch, heads, rows, tokens, width, dtype, device):
    q = torch.randn(batch, heads, rows, width, device=device, dtype=dtype)
    k, v = (torch.randn(batch, heads, tokens, width, device=device, dtype=dtype) for _ in range(2))
    mask = torch.rand(batch, 1, 1, tokens, device=device) < 0.7
    k = k.masked_fill(~mask.transpose(2, 3), torch.nan)
    return q, k, v, mask


def compiled(dynamic=None):
    torch._dynamo.reset()
    return torch.compile(attend, backend="mmqc", dynamic=dynamic, fullgraph=True)


@pytest.mark.parametrize("dynamic", [False, True])
def test_decode_attention__is_the_op_without_a_gpu(dynamic):
    given = operands(2, 2, 3, 17, 16, torch.float32, "cpu")
    assert_close(compiled(dynamic)(*given), attend(*given))


@pytest.mark.gpu
@pytest.mark.parametrize("dynamic", [False, True])
def test_decode_attention__is_one_launch(dynamic):
    call = compiled(dynamic)
    for batch, tokens in ((3, 300), (1, 2048), (16, 515), (2, 40)):
        given = operands(batch, 4, 7, tokens, 128, torch.bfloat16, "cuda")
        y, (code, *_) = run_and_get_code(call, *given) if batch == 3 else (call(*given), ["decode_attention_kernel"])
        q, k, v, mask = given
        want = op.reference((q * 2).double(), k.double(), v.double(), mask, 0.25) + 1
        assert_close(y, want, torch.bfloat16)
        assert "decode_attention_kernel" in code
