"""What an op's kernels do with given operands, decided before anything runs.

    found = norm_quantize.plan(x, ..., new)       of shapes, dtypes, strides and the device: no value is read
    found.run()                                   eager
    emit(launch, ...) for each of its launches    in a compiled graph (lowering/rows_on_cuda.py)

Operands are tensors, or what stands for tensors that a compiled graph will have: plans ask for ``shape``, ``dtype``, ``device`` and
``stride`` alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

from mmqc.kernels.shared.device_facts import power_of_two

if TYPE_CHECKING:  # launches need triton, plans do not
    from mmqc.kernels.shared.launch import Launch

ROW_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_ROW = 65_536  # entries that a program holds in registers
FEW_ROWS = 256  # up to which there are multiprocessors to spare: nothing else runs while a lane works off its channels
New = Callable[[int, torch.dtype], Any]  # memory for so many entries of a dtype in every row
Out = TypeVar("Out")


class Plan(NamedTuple, Generic[Out]):
    """Launches, one after the other, and what they fill."""

    launches: tuple[Launch, ...]
    out: Out

    def run(self) -> Out:
        """On tensors, now; an empty grid is nothing to do."""
        for launch in self.launches:
            if all(launch.grid):
                launch.run()
        return self.out


class Refusal(NamedTuple):
    """Why there is no kernel for the operands."""

    reason: str

    def run(self) -> NoReturn:
        """Raise: who has another way asks for the type."""
        raise ValueError(self.reason)


def rows_like(x: Tensor) -> New:
    """Memory for results of every row of x [M, K]."""
    return lambda width, dtype: torch.empty(x.shape[0], width, dtype=dtype, device=x.device)


def first_reason(checks: tuple[tuple[bool, str], ...]) -> str | None:
    """What is said of the first one that does not hold."""
    return next((why for ok, why in checks if not ok), None)


def warps_of_row(rows: Any, channels: int, lane: int, lane_of_few: int) -> int:
    """Of a program that has a row, with so many channels a lane; the number of rows may be a symbol of a graph."""
    each = lane_of_few if isinstance(rows, int) and rows <= FEW_ROWS else lane
    return min(16, power_of_two(-(-channels // (32 * each))))


def why_not_rows(x: Tensor, most: int = MAX_ROW) -> str | None:
    """None, or why programs cannot hold a row of x each, of ``most`` entries."""
    if len(x.shape) != 2:
        return f"x is a matrix, not {list(x.shape)}"
    width = x.shape[1]
    return first_reason((
        (x.dtype in ROW_DTYPES, f"x is one of {ROW_DTYPES}, not {x.dtype}"),
        (1 <= width <= most, f"a row of {width} does not fit one program: 1 to {most}"),
        (x.stride(1) == 1 or width == 1, "rows of x are contiguous"),
    ))
