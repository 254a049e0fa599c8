"""Values as bytes and tensors."""

from __future__ import annotations

import torch

from mmqc.distributed.values import places, put_together, raw, taken_apart
from mmqc.solvers import Quantized


def test_taken_apart__tensors_are_beside_the_bytes():
    solved = Quantized(torch.ones(2, 3, dtype=torch.int8).T, torch.rand(3), note="damped")
    content, tensors = taken_apart([solved, {"x": 1}])
    assert places(content) == [((3, 2), torch.int8, "cpu"), ((3,), torch.float32, "cpu")]
    again, rest = put_together(content, [t.clone() for t in tensors])
    assert rest == {"x": 1}
    assert again.note == "damped"
    assert torch.equal(again.codes, solved.codes)
    assert torch.equal(again.scale, solved.scale)


def test_raw__all_bytes_in_order():
    for tensor in (torch.tensor(True), torch.rand(2, 3, dtype=torch.float64), torch.ones(3).to(torch.float8_e4m3fn)):
        assert torch.equal(raw(tensor).view(tensor.dtype).view(tensor.shape).float(), tensor.float())
