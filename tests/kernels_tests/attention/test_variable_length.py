"""The op of packed sequences: who computes it for which segments."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mmqc.kernels.attention import variable_length as op


def test_segments__number_the_sequences_of_every_position() -> None:
    lengths = (5, 1, 7, 3)
    expected = torch.repeat_interleave(torch.arange(1, 5), torch.tensor(lengths))
    assert torch.equal(op.segments(torch.tensor((0, *lengths)).cumsum(0), sum(lengths)), expected)


class OurKernel:
    """In the kernel's place: notes what it is given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.attended: list[int] = []
        self.prepared: list[bool] = []
        self.why_not = lambda q, k, v, ends: "odd" if q.shape[3] % 8 else None
        self.has_warpgroup_products = lambda device: True
        self.why_not_heads = lambda dtype, width: None if width <= 128 else "wide"
        monkeypatch.setattr(op, "_kernels", lambda: self)

    def segment_attention(self, q: Tensor, k: Tensor, v: Tensor, ends: Tensor, scale: float | None, *, causal: bool) -> Tensor:
        self.attended.append(q.shape[2])
        return q

    def prepare(self, q: Tensor, k: Tensor, ends: Tensor, *, causal: bool) -> None:
        self.prepared.append(causal)


@pytest.mark.parametrize(
    ("ends", "longest", "ours"),
    [
        ((0, 5), 5, True),  # one segment, however short
        ((0, 4000), 4000, True),
        ((0, 100, 300), 200, False),  # several, few rows
        ((0, 2000, 4000), 2000, True),
        ((0, *range(40, 4001, 40)), 40, False),  # windows
    ],
)
def test_by_segments__takes_one_segment_or_many_rows(monkeypatch: pytest.MonkeyPatch, ends: Any, longest: int, ours: bool) -> None:
    kernel = OurKernel(monkeypatch)
    q, of = torch.zeros(1, 2, ends[-1], 8), torch.tensor(ends, dtype=torch.int32)
    y = op.by_segments(q, q, q, of, of, None, True, longest)
    assert (y is not None) == ours
    assert kernel.attended == ([ends[-1]] if ours else [])


def test_by_segments__leaves_checks_and_keys_that_end_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = OurKernel(monkeypatch)
    q, ends = torch.zeros(1, 2, 4, 8), torch.tensor((0, 4), dtype=torch.int32)
    with op.check():
        assert op.by_segments(q, q, q, ends, ends, None, False, 4) is None
    assert op.by_segments(q, q, q, ends, ends.clone(), None, False, 4) is None
    assert op.by_segments(q[..., :7], q, q, ends, ends, None, False, 4) is None
    assert not kernel.attended


def test_prepare__asks_for_heads_on_a_gpu_while_they_are_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = OurKernel(monkeypatch)

    def traced(heads: Any, is_cuda: bool = True) -> Any:
        return SimpleNamespace(device="gpu", dtype=torch.bfloat16, shape=(1, heads, 9, 64), is_cuda=is_cuda)

    ends: Any = SimpleNamespace(dtype=torch.int32)
    op._prepare(traced(4, is_cuda=False), traced(4), ends, True)
    op._prepare(traced(torch.tensor(4)), traced(4), ends, True)  # a number of heads that is not known
    assert not kernel.prepared
    for causal in (True, False):
        op._prepare(traced(4), traced(2), ends, causal)
    assert kernel.prepared == [True, False]


def test_has_kernel__is_of_heads_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    OurKernel(monkeypatch)
    on_gpu: Any = SimpleNamespace(is_cuda=True, device="gpu", dtype=torch.bfloat16, shape=(1, 2, 3, 64), dim=lambda: 4)
    assert op.has_kernel(on_gpu)
    on_gpu.shape = (1, 2, 3, 256)
    assert not op.has_kernel(on_gpu)
    assert not op.has_kernel(torch.empty(1, 2, 3, 64, dtype=torch.bfloat16))
