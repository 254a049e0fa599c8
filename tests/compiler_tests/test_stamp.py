"""A stamp notices every way in which a tensor can change, and nothing else."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from mmqc.compiler.stamp import Stamp

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)


def swap(p: Tensor) -> None:
    other = nn.Parameter(p.detach() * 2)
    torch.utils.swap_tensors(p, other)


CHANGES: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda p: p.mul_(2),
    "one value": lambda p: p[3, 4].mul_(2),
    "detached": lambda p: p.detach().zero_(),
    "data": lambda p: setattr(p, "data", p.data * 2),
    "data, twice": lambda p: [setattr(p, "data", p.data * 2) for _ in range(2)],
    "through data": lambda p: p.data.mul_(2),
    "another library": lambda p: p.detach().numpy().__imul__(2),
    "dtype": lambda p: setattr(p, "data", p.data.double()),
    "swap_tensors": swap,
    "inference mode": lambda p: torch.inference_mode()(lambda: p.mul_(2))(),
    "said so": lambda p: torch.autograd.graph.increment_version(p),
}


@pytest.mark.parametrize("change", CHANGES)
def test_same__notices(change: str) -> None:
    tensors = [nn.Parameter(torch.randn(33, 40)) for _ in range(3)]
    stamp = Stamp(tensors)
    assert stamp.same(tensors)
    with torch.no_grad():
        CHANGES[change](tensors[1])
    assert not stamp.same(tensors)
    assert Stamp(tensors).same(tensors)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (7,), (64, 64), (33, 5), (3, 8, 8)])
def test_same__any_shape_and_dtype_through_data(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = nn.Parameter(torch.rand(shape).add(1).to(dtype), requires_grad=False)
    stamp = Stamp([tensor])
    assert stamp.same([tensor])
    tensor.data.copy_((tensor.data.float() * 0.5).to(dtype))
    assert not stamp.same([tensor])


def test_same__another_tensor_of_the_same_id_and_address() -> None:
    for _ in range(20):  # CPython and the allocator hand out the same places again
        tensor = nn.Parameter(torch.ones(64, 64))
        stamp = Stamp([tensor])
        del tensor
        other = nn.Parameter(torch.zeros(64, 64))
        assert not stamp.same([other])


def test_same__inference_tensors_and_tensors_without_values() -> None:
    with torch.inference_mode():
        inference = torch.randn(8, 8)
    kinds = [inference, torch.randn(0, 4), torch.empty(4, 4, device="meta"), torch.randn(8, 8).T, torch.tensor(1.0)]
    stamp = Stamp(kinds)
    assert stamp.same(kinds)
    assert not stamp.same(kinds[:-1])
    with torch.inference_mode():
        inference.mul_(2)
    assert not stamp.same(kinds)


def test_stamp__memory_of_another_device_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmqc.compiler.stamp.on_cpu", lambda tensor: False)
    tensor = nn.Parameter(torch.ones(33, 2))
    stamp, memory = Stamp([tensor]), StorageWeakRef(tensor.untyped_storage())
    assert stamp.same([tensor])
    del tensor
    assert memory.expired()
    assert not stamp.same([nn.Parameter(torch.ones(33, 2))]), "in the same place, perhaps"


def test_stamp__zeros_hide_no_scaling() -> None:
    tensor = nn.Parameter(torch.randn(64, 64) * (torch.rand(64, 64) > 0.9))
    stamp = Stamp([tensor])
    tensor.data.mul_(1.5)
    assert not stamp.same([tensor])


def test_stamp__a_tensor_of_zeros_and_half_of_one_are_noticed_through_data() -> None:
    zeros, weight = torch.zeros(64, 32), torch.randn(66, 32)
    stamp = Stamp([zeros, weight])
    assert stamp.same([zeros, weight])
    zeros.data.copy_(torch.randn(64, 32))
    assert not stamp.same([zeros, weight])
    for half in (weight[:33], weight[33:]):
        stamp = Stamp([weight])
        half.data.mul_(-9)
        assert not stamp.same([weight])
