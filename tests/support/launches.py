"""What every launch of a kernel has to be, as far as that is known without a device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmqc.kernels.shared.launch import Launch


def no_work(*wanted: Any) -> tuple[Tensor, Tensor]:
    """In the place of ``workspace``, where nothing is launched."""
    return torch.empty(0, dtype=wanted[4]), torch.zeros(1, dtype=torch.int32)


def check_arguments(launch: Launch) -> None:
    """That the kernel is given every argument by its name, and what it calls a descriptor as one."""
    names = set(launch.kernel.arg_names)
    assert set(launch.args) | set(launch.constants) == names
    assert set(launch.outputs) <= set(launch.args)
    assert set(launch.descriptors) == {name for name in names if name.endswith("_desc")}
