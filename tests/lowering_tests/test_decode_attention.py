"""decode_attention in a compiled graph: the op itself without a GPU, one launch with it, at sizes that are symbols too."""

import re

import pytest
import torch
from cuda_source import Sizes, compiled_kernels, wrapper_of
from often import often
from tolerance import assert_close
from torch._dynamo.utils import counters
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


def any_batch_and_length(q, k, v, mask):
    """Numbers of sequences and of tokens are symbols; those of heads, rows and channels are known."""
    for x, axes in ((q, [0]), (k, [0, 2]), (v, [0, 2]), (mask, [0, 3])):
        torch._dynamo.maybe_mark_dynamic(x, axes)


@pytest.mark.parametrize("dynamic", often((False, True), True))
def test_decode_attention__is_the_op_without_a_gpu(dynamic):
    given = operands(2, 2, 3, 17, 16, torch.float32, "cpu")
    assert_close(compiled(dynamic)(*given), attend(*given))


def test_decode_attention__a_launch_for_each_number_of_heads():
    """Read in the wrapper: five launches of which one runs, two of them of one kernel."""
    compiled_kernels()
    sizes = Sizes()
    batch, tokens = sizes["b", 3], sizes["t", 300]
    q = sizes.empty(batch, 4, 7, 128, dtype=torch.bfloat16)
    k, v = (sizes.empty(batch, 4, tokens, 128, dtype=torch.bfloat16) for _ in range(2))
    source = wrapper_of(attend, sizes, q, k, v, sizes.empty(batch, 1, 1, tokens, dtype=torch.bool))
    runs = re.findall(r"if (.*):\n(?:.*\n){1,3}?\s+decode_attention_kernel_(\d)\.run\(", source)
    assert [kernel for _, kernel in runs] == ["0", "1", "2", "3", "1"]
    for heads in (4, 16, 20, 32, 36, 132, 136, 264, 268, 4000):
        meant = [bool(eval(condition, dict.fromkeys(re.findall(r"s\d+", condition), heads // 4))) for condition, _ in runs]
        assert meant == [heads <= 16, 16 < heads <= 32, 32 < heads <= 132, 132 < heads <= 264, heads > 264]


SIZES = ((3, 300), (1, 2048), (16, 515), (2, 40), (10, 70), (33, 90))


@pytest.mark.gpu
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("batch", "tokens"), SIZES)
def test_decode_attention__is_a_launch_for_so_many_heads(batch, tokens, dynamic):
    q, k, v, mask = given = operands(batch, 4, 7, tokens, 128, torch.bfloat16, "cuda")
    if dynamic:
        any_batch_and_length(*given)
    y, codes = run_and_get_code(compiled(None if dynamic else False), *given)
    assert_close(y, answer(q, k, v, mask), torch.bfloat16)
    made = {f"decode_attention_kernel_{i}.run(" for i in range(4)}
    found = [name for name in made for code in codes if name in code]
    assert not codes or len(found) == (4 if dynamic and batch > 1 else 1)


@pytest.mark.gpu
def test_decode_attention__is_compiled_once_for_one_sequence_and_once_for_more():
    call = compiled()
    before = dict(counters["stats"])
    for batch, tokens in SIZES:
        q, k, v, mask = given = operands(batch, 4, 7, tokens, 128, torch.bfloat16, "cuda")
        any_batch_and_length(*given)
        assert_close(call(*given), answer(q, k, v, mask), torch.bfloat16)
    assert counters["stats"]["unique_graphs"] - before.get("unique_graphs", 0) == 2


def answer(q, k, v, mask):
    return op.reference((q * 2).double(), k.double(), v.double(), mask, 0.25) + 1
