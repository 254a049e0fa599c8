"""What an op of linears launches, decided in one place: eager calls run it, compiled graphs emit it.

    plan(operands, caller)        ->  [Product, …]     a function of shapes, dtypes, strides and the device alone
    launches(operands, products)  ->  Launch, …        run at once, or put into a graph (lowering/launch.py)

Every op's file has the two.  What no kernel takes its ``supports`` says before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmqc.kernels.matmul.configs import PERSISTENT, MatmulConfig
from mmqc.kernels.matmul.linears import Linear, are_alike
from mmqc.kernels.shared.device_facts import has_tensor_descriptors

# Variants whose kernels take several linears, and up to how many rows those share a launch: beyond, each fills the machine.
ONE_LAUNCH_ROWS = {"rows": 64, "columns": 64, "registers": 512}
STAGES = 3  # of a tile for TMA, where operands come by pointers: more of them do not fit
ANY_ROWS = MatmulConfig(128, 128, 64, 8, 3, variant="columns")  # for any number of rows from packed weights

New = Callable[[tuple[Any, ...], torch.dtype, torch.device], Any]  # memory that a kernel fills


class Product(NamedTuple):
    """One launch of a matmul kernel.

    Attributes:
        kernel: "pointers", "descriptors" (TMA, a persistent grid), "pingpong", "registers", or of gate and up "gated" or
            "gated pingpong" (Gluon's), "torch" (its own product), or "pass" (what follows gate and up, behind their products).
        tile: how the kernel is run.
        linears: which of the op's it multiplies.
        written_out: whether their packed weights are written out first, and that is what it multiplies.
        folded: whether integer scales of groups are multiplied into what is written out.
    """

    kernel: str
    tile: MatmulConfig
    linears: tuple[int, ...] = (0,)
    written_out: bool = False
    folded: bool = False

    @property
    def is_gluon(self) -> bool:
        """Whether the kernel is Gluon's, which a call of the op launches and generated code cannot."""
        return self.kernel in ("pingpong", "registers", "gated", "gated pingpong")


class Caller(NamedTuple):
    """Who launches.

    Attributes:
        gluon: whether kernels of Gluon's can be launched: by eager calls, so by graphs that may call the op.
        always: whether every call needs the launches.  A graph for any number of rows has them for each regime of rows, and
            writes no weight out for calls that do not read it.
        graph: whether the launches go into generated code.
    """

    gluon: bool = True
    always: bool = True
    graph: bool = False


EAGER = Caller()


def new_tensor(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """As ``New``, on a device."""
    return torch.empty(shape, dtype=dtype, device=device)


def share_a_launch(rows: int, tile: MatmulConfig, linears: Sequence[Linear]) -> bool:
    """Whether several linears of an input are one launch."""
    return len(linears) > 1 and rows <= ONE_LAUNCH_ROWS.get(tile.variant, 0) and are_alike(linears)


def why_not_tma(*operands: Tensor) -> str | None:
    """None, or why TMA cannot address x and w (for the kernels that write by TMA: and y)."""
    if not has_tensor_descriptors(operands[0].device):
        return "no tensor descriptors before compute capability 9.0"
    if operands[1].dtype == torch.uint8:
        return "packed weights are read by pointers"
    return why_not_aligned(*operands)


def why_not_aligned(*operands: Tensor) -> str | None:
    """None, or why TMA cannot address these matrices on a device that has it."""
    if any(t.stride(0) * t.dtype.itemsize % 16 or t.data_ptr() % 16 for t in operands):
        return "tensor descriptors need rows and addresses that are multiples of 16 bytes"
    return None


def kernel_of(tile: MatmulConfig, by_tma: bool) -> tuple[str, MatmulConfig]:
    """The kernel that runs a tile, and the tile that it runs; ``by_tma``: whether TMA can address the operands."""
    if tile.variant in ("pingpong", "registers"):
        return tile.variant, tile
    if tile.variant not in PERSISTENT:
        return "pointers", tile
    return ("descriptors", tile) if by_tma else ("pointers", tile.with_stages(STAGES))


def each_alone(plan: Callable[[Linear], list[Product]], linears: Sequence[Linear]) -> list[Product]:
    """The products of linears that do not share a launch."""
    return [product._replace(linears=(i,)) for i, linear in enumerate(linears) for product in plan(linear)]
