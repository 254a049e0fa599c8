"""Gluon, Triton with explicit layouts; in the interpreter the same kernels without the layouts, which say where, never what.

    from mmqc.kernels.gluon_tiles import gl, jit, mma, tile        jit: a kernel, tile: a function that kernels call

Why:     a tensor-core operand that is unpacked from the registers it was loaded to needs a layout that Triton's own choice does
         not find; and Gluon has no interpreter.
Arch:    Ampere and newer (``mma`` is mma.sync).
"""

# Gluon is known when it runs.
# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from mmqc.kernels.shared.device_facts import INTERPRETED

NAMES = ("abs", "broadcast", "ceil", "exp2", "join", "load", "log2", "max", "maximum", "min", "minimum", "program_id",
         "static_range", "store", "sum", "where")


class WithoutLayouts:
    """The names of Gluon that the kernels use."""

    SliceLayout = staticmethod(lambda dim, parent: None)
    convert_layout = staticmethod(lambda x, layout, assert_trivial=False: x)
    arange = staticmethod(lambda start, end, layout=None: tl.arange(start, end))
    zeros = staticmethod(lambda shape, dtype, layout=None: tl.zeros(shape, dtype))
    full = staticmethod(lambda shape, value, dtype, layout=None: tl.full(shape, value, dtype))

    def __getattr__(self, name: str) -> Any:
        if name not in NAMES:
            raise AttributeError(f"Gluon's {name!r} has no counterpart here")
        return getattr(tl, name)  # the interpreter puts its own in place when a kernel starts


def dot(a: Any, b: Any, acc: Any) -> Any:
    """Matrix product and sum."""
    return tl.dot(a, b, acc, input_precision="ieee", out_dtype=acc.dtype)


gl: Any = WithoutLayouts()
jit: Any = triton.jit
tile: Any = lambda function: function  # noqa: E731  the kernel has made ready for it, which takes milliseconds each time
mma: Any = dot
MMA = ROWS = None
if INTERPRETED:
    tl.block_type.layout = None  # the kernels ask tensors where they are
else:
    from triton.experimental import gluon
    from triton.experimental.gluon import language
    from triton.experimental.gluon.language.nvidia.ampere import mma_v2

    gl, jit, tile, mma = language, gluon.jit, gluon.jit, mma_v2
    # one warp: sums [16 i, 8 j], and rows of contiguous bytes, of which four lanes have 64
    MMA = gl.NVMMADistributedLayout([2, 0], [1, 1], instr_shape=[16, 8])
    ROWS = gl.BlockedLayout([1, 16], [8, 4], [1, 1], [1, 0])


def is_gluon(kernel: Any) -> bool:
    """Whether a kernel is Gluon's."""
    return not INTERPRETED and kernel.is_gluon()


def describe(t: Tensor, block: list[int]) -> Any:
    """A tensor descriptor whose blocks arrive in shared memory as wgmma wants them: rows of up to 128 bytes, swizzled."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    width = block[-1] * t.dtype.itemsize
    swizzle = next((w for w in (128, 64, 32) if width % w == 0), 0)
    layout = NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=8 * t.dtype.itemsize, rank=len(block))
    return TensorDescriptor.from_tensor(t, block, layout)


def operand(index: int, k_width: int) -> Any:
    """The layout of a (0) or b (1) for ``mma``; k_width entries share 32 bits."""
    return None if INTERPRETED else gl.DotOperandLayout(index, MMA, k_width)
