"""Launches that are repeated on other tensors, and kernels compiled ahead, of a kernel that only says what it was given."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

repeated_launch = pytest.importorskip("mmqc.kernels.shared.repeated_launch")
from mmqc.kernels.shared import compile_ahead  # noqa: E402
from mmqc.kernels.shared.launch import Launch, Shape  # noqa: E402


class Compiled:
    """Triton's compiled kernel, as far as a launch goes by it."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.ran: list[tuple[Any, ...]] = []
        self.run: Any = lambda *args: self.ran.append(args)


class Described:
    """A tensor descriptor."""

    def __init__(self, base: Any) -> None:
        self.base, self.shape, self.strides = base, tuple(base.shape), base.stride()


class Kernel:
    """A jitted kernel of x, a half of it by a descriptor, y, memory of its own, and a size."""

    __name__ = "kernel"
    arg_names = ("x_ptr", "half_desc", "y_ptr", "new_ptr", "part_ptr", "M", "BLOCK")

    def __init__(self) -> None:
        self.compiled, self.given = Compiled(), list[dict[str, Any]]()

    def __getitem__(self, grid: Any) -> Any:
        return lambda **given: self.compiled

    def warmup(self, **given: Any) -> None:
        self.given.append(given)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    monkeypatch.setattr(Launch, "described", lambda launch, name: Described(launch.args[name]))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    repeated_launch._chosen.clear()
    yield Kernel()
    repeated_launch._chosen.clear()


def run(kernel: Kernel, x: Tensor, y: Tensor, chosen: list[int]) -> None:
    def choose(new: Any, work: Any) -> Iterator[Launch]:
        chosen.append(len(x))
        parts, _ = work(x.device, 2, 8, 2, torch.float32)
        args = {"x_ptr": x, "half_desc": x[:, 16:], "y_ptr": y, "new_ptr": new((5,), torch.int8, x.device), "part_ptr": parts}
        yield Launch(kernel, (3,), {**args, "M": len(x)}, {"BLOCK": 8}, ("y_ptr",), 4, 2, descriptors={"half_desc": (8, 8)})

    repeated_launch.repeat(("site", len(x)), [x, y], choose)


def test_repeat__other_tensors_are_put_in_place_of_the_first(kernel: Kernel) -> None:
    chosen: list[int] = []
    first, second, y = torch.zeros(4, 32), torch.ones(4, 32), torch.zeros(4)
    run(kernel, first, y, chosen)
    assert chosen == [4]
    assert not kernel.compiled.ran
    run(kernel, second, y, chosen)
    assert chosen == [4]
    ((*grid, stream, function, metadata, _, _, _, x_at, half, y_at, new_at, part_at, m, block),) = kernel.compiled.ran
    assert (grid, stream, function, metadata, m, block) == ([3, 1, 1], 7, "function", "metadata", 4, 8)
    assert (x_at, y_at) == (second.data_ptr(), y.data_ptr())
    assert half.base.data_ptr() == second.data_ptr() + 16 * 4
    assert half.shape == (4, 16)
    assert len({x_at, y_at, new_at, part_at, first.data_ptr()}) == 5


def test_repeat__chooses_again_for_other_rows_and_for_addresses_that_are_not_aligned(kernel: Kernel) -> None:
    chosen: list[int] = []
    y = torch.zeros(8)
    for x in (torch.zeros(4, 32), torch.zeros(5, 32), torch.zeros(4 * 32 + 1)[1:].view(4, 32), torch.ones(5, 32)):
        run(kernel, x, y, chosen)
    assert chosen == [4, 5, 4]
    assert len(kernel.compiled.ran) == 1


def test_repeat__a_launch_that_reads_something_else_is_an_error(kernel: Kernel) -> None:
    def choose(new: Any, work: Any) -> Iterator[Launch]:
        args = {name: torch.zeros(4, 32) for name in Kernel.arg_names[:5]}
        yield Launch(kernel, (3,), {**args, "M": 4}, {"BLOCK": 8}, ("y_ptr",), 4, 2)

    with pytest.raises(AssertionError, match="none of its operands"):
        repeated_launch.repeat("elsewhere", [torch.zeros(4, 32)], choose)


def test_ahead__compiles_each_kernel_once_and_wait_waits(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.inference_mode())
    device = torch.device("cpu")
    args = {name: Shape((4, 32), torch.int8, device) for name in Kernel.arg_names[:5]}
    launches = [
        Launch(kernel, (3,), {**args, "M": m}, {"BLOCK": b}, ("y_ptr",), 4, 2) for m, b in ((32, 8), (64, 8), (64, 9), (65, 8))
    ]
    compile_ahead.ahead(launches, device)
    compile_ahead.ahead(launches, device)
    compile_ahead.wait()
    assert sorted((given["M"], given["BLOCK"]) for given in kernel.given) == [(32, 8), (64, 9), (65, 8)]
    assert all(given["x_ptr"].dtype == torch.int8 and given["grid"] == (3,) for given in kernel.given)
