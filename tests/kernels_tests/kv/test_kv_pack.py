"""kv_pack: the codes, scales and offsets of the op's reference."""

import pytest
import torch
from tolerance import assert_close

from mmqc.ops import kv_pack as op
from mmqc.ops.kv_words import unpack_words

kernel = pytest.importorskip("mmqc.kernels.kv.kv_pack")


@pytest.mark.parametrize("width", [64, 80])
@pytest.mark.parametrize("by", ["channel", "token"])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_kv_pack__codes_of_the_reference(bits, by, width, device):
    g = torch.Generator().manual_seed(bits)
    x = torch.randn(2, 150, 3, width, generator=g).half().to(device).transpose(1, 2)  # as a projection leaves it
    order = torch.stack([torch.randperm(150, generator=g)[:141] for _ in range(2)]).to(device)
    count = torch.tensor([133, 0], dtype=torch.int32, device=device)
    transposed = bits in (1, 8)
    args = (x, order, count, bits, by, 0.6 if bits == 1 else 1.0, transposed)
    words, scale, offset = kernel.kv_pack(*args)
    want, want_scale, want_offset = op.reference(*args)
    assert words.shape == want.shape
    if device.type == "cpu":
        assert torch.equal(words, want)
    got, codes = (unpack_words(w, bits, transposed).int() for w in (words, want))
    assert (got - codes).abs().max() <= 1  # a scale may differ in its last bit on a GPU, and a code that lies on an edge
    assert (got != codes).float().mean() < 1e-4
    assert_close(scale, want_scale)
    assert_close(offset, want_offset)


def test_kv_pack__says_what_it_cannot_do(device):
    x = torch.randn(1, 1, 4, 16, device=device)
    order, count = torch.arange(4, device=device)[None], torch.tensor([4], dtype=torch.int32, device=device)
    assert "'tensor' is found by the reference" in kernel.kv_pack(x, order, count, 2, "tensor", 1.0, False).reason
