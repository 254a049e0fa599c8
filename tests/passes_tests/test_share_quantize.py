"""One quantization for the linears that read one tensor."""

from collections import Counter

import pytest
import torch
from fusion_cases import Readers, compile_and_compare, linear
from small_vlm import Small, batches, logits, quantize

from mmqc.backend import backend, collect_records
from mmqc.recipes import quik, resq

ops = torch.ops.mmqc


def test_share_quantize__equal_scales_share_one_quantization_and_one_product(without_inductor: None) -> None:
    ops, _ = compile_and_compare(Readers(linear(8), linear(24), linear(40)), torch.randn(2, 5, 32))
    assert ops == {"quantize": 2, "scaled_matmuls": 1, "scaled_matmul": 1}


def test_share_quantize__other_scale_or_no_bias_stays_apart(without_inductor: None) -> None:
    model = Readers(linear(8), linear(16, 0.06), linear(24, bias=False))
    ops, misses = compile_and_compare(model, torch.randn(3, 32))
    assert ops == {"quantize": 3, "scaled_matmul": 4}
    assert any("its scale differs" in miss for miss in misses["share_quantize"])


def records_of(function, *args):
    torch._dynamo.reset()
    with collect_records() as records, torch.no_grad():
        got = torch.compile(function, backend=backend)(*args)
    return got, sum((r.ops for r in records), Counter()), [p for r in records for p in r.passes]


def test_share_quantize__by_token_once_and_what_it_refuses(without_inductor: None) -> None:
    order, other = torch.arange(8).flip(0), torch.arange(8).roll(1)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        calls = (
            (None, [8], [4]),
            (None, [8], [4]),
            (None, [6, 2], [4, 8]),
            (order, [8], [4]),
            (other, [8], [4]),
            (order, [8], [4]),
        )
        return tuple(ops.quantize_per_token(x, *call)[0] for call in calls)

    x = torch.randn(3, 8)
    got, counts, passes = records_of(function, x)
    assert all(torch.equal(a, b) for a, b in zip(got, function(x), strict=True))
    assert counts["quantize_per_token"] == 4
    (share,) = [p for p in passes if p.name == "share_quantize"]
    assert len(share.sites) == 2
    assert len(share.misses) == 3


@pytest.mark.parametrize("config", [resq(kv_bits=None, solver="rtn"), quik(solver="rtn")])
def test_share_quantize__by_token_in_a_quantized_model(config, without_inductor: None) -> None:
    model = Small().eval()
    quantize(model, config)
    batch = batches()[0]
    expected = logits(model, batch)
    got, counts, _ = records_of(model, batch["input_ids"], batch["pixel_values"])
    assert torch.equal(got, expected)
    shared = config.rewrites.bases is not None
    assert (counts["quantize_per_token"] < counts["mixed_matmul"]) == shared
