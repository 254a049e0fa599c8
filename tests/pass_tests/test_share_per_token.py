"""One token-wise quantization for the linears that read one tensor."""

from collections import Counter

import pytest
import torch
from small_vlm import Small, batches, logits, quantize

from mmqc.backend import backend, collect_records
from mmqc.recipes import quik, resq

ops = torch.ops.mmqc


def records_of(function, *args):
    torch._dynamo.reset()
    with collect_records() as records, torch.no_grad():
        got = torch.compile(function, backend=backend)(*args)
    return got, sum((r.ops for r in records), Counter()), [p for r in records for p in r.passes]


def test_share_per_token__once_and_what_it_refuses(without_inductor: None) -> None:
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
    (share,) = [p for p in passes if p.name == "share_per_token"]
    assert len(share.sites) == 2
    assert len(share.misses) == 3


@pytest.mark.parametrize("config", [resq(kv_bits=None, solver="rtn"), quik(solver="rtn")])
def test_share_per_token__in_a_quantized_model(config, without_inductor: None) -> None:
    model = Small().eval()
    quantize(model, config)
    batch = batches()[0]
    expected = logits(model, batch)
    got, counts, _ = records_of(model, batch["input_ids"], batch["pixel_values"])
    assert torch.equal(got, expected)
    shared = config.rewrites.bases is not None
    assert (counts["quantize_per_token"] < counts["mixed_matmul"]) == shared
