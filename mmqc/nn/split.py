"""A quantized linear cut into parts, one for each of n ranks, in one of two ways.

    by outputs   part r has the rows [r N/n, (r+1) N/n) of W: y_r = W_r x                 x whole on every rank, y in parts
    by inputs    part r has the columns [r K/n, (r+1) K/n):    y = sum over r of W_r x_r   x in parts, b on rank 0 alone

Shapes:  codes, sums, biases, outlier columns, and scales by output channel, go with the rows; group scales [N, K/g] with both;
         input scales, orders and Hadamard factors are whole on every rank
Why two: by inputs takes one sum, and only where a part of the inputs is enough for a part of the product.  It is not where an
         online Hadamard mixes more than a part (planned ones are in blocks: Rewrites.tensor_parallel), where a token's scale is
         that of all inputs, or where a cut would go through a group.
Packed codes of a row are a stretch apart in its bytes (ops/pack.py), so that columns are unpacked, cut and packed again.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from mmqc.errors import MmqcError
from mmqc.nn.float4_linear import Float4Linear
from mmqc.nn.integer_weight import PackedLinear
from mmqc.nn.linear import QuantLinear
from mmqc.ops.float4 import pack_float4
from mmqc.ops.pack import pack

BY_ROW = re.compile(r"qweight(_\d+)?|weight_scale|weight_zero|weight_sum|group_scale|bias|outlier_weight")
WHOLE = re.compile(r"input_scale|weight_divisor|outlier_index|order|factor_\d+")


class SplitError(MmqcError, ValueError):
    """A model or a linear cannot be cut for so many ranks: says which, and why."""


def part_of(width: int, rank: int, ranks: int, what: str) -> slice:
    """The rank's part of a width.

    Raises:
        SplitError: they would not be equal; ``what`` is cut.
    """
    if width % ranks:
        raise SplitError(f"{what} has a width of {width}, which {ranks} ranks cannot share evenly; use a number that divides it")
    return slice(rank * width // ranks, (rank + 1) * width // ranks)


def why_not_by_inputs(linear: PackedLinear, ranks: int) -> str:
    """Why a part of the inputs is not enough for a part of the product; empty if it is."""
    if linear.hadamard % ranks:
        mixed = (
            "all its inputs" if linear.hadamard == 1 else f"inputs in {linear.hadamard} blocks, which {ranks} ranks cannot share"
        )
        return f"its online Hadamard mixes {mixed}"
    if not isinstance(linear, QuantLinear | Float4Linear):
        return "a token's scale is that of all its inputs"
    width = linear.in_features // ranks
    if linear.group_size and width % linear.group_size:
        return f"a part of {width} inputs would cut through its groups of {linear.group_size}"
    return ""


def cut_outputs(linear: PackedLinear, rank: int, ranks: int, name: str = "a linear") -> None:
    """Leave a rank its part of the rows, in place.

    Raises:
        SplitError: the rows cannot be shared evenly.
    """
    part = part_of(linear.out_features, rank, ranks, f"the output of {name}")
    for key, buffer in list(linear._buffers.items()):
        if buffer is None or WHOLE.fullmatch(key):
            continue
        if not BY_ROW.fullmatch(key):
            raise SplitError(f"{name}.{key}: nobody said how it is cut")
        linear._buffers[key] = buffer[part].clone()
    linear.out_features = part.stop - part.start


def cut_inputs(linear: PackedLinear, rank: int, ranks: int, name: str = "a linear") -> None:
    """Leave a rank its part of the columns, in place; the bias stays on rank 0 alone.

    Raises:
        SplitError: the columns cannot be cut.
    """
    part = part_of(linear.in_features, rank, ranks, f"the input of {name}")
    reason = why_not_by_inputs(linear, ranks)
    if reason or not isinstance(linear, QuantLinear | Float4Linear):
        raise SplitError(f"{name} cannot be cut by inputs: {reason}")
    codes, buffers = linear.codes()[:, part], linear._buffers
    if isinstance(linear, Float4Linear):
        buffers["qweight"] = pack_float4(codes)
    else:
        buffers["qweight"] = codes.contiguous() if linear.storage_bits == 8 else pack(codes, linear.storage_bits)
    if linear.group_size:
        groups = slice(part.start // linear.group_size, part.stop // linear.group_size)
        for key in ("weight_scale", "weight_zero", "group_scale"):
            scale = buffers.get(key)
            if scale is not None and scale.dim() == 2:
                buffers[key] = scale[:, groups].clone()
    if linear.outlier_index is not None and linear.outlier_weight is not None:
        inside = (linear.outlier_index >= part.start) & (linear.outlier_index < part.stop)
        here = bool(inside.any())
        columns = (linear.outlier_index[inside] - part.start, linear.outlier_weight[:, inside].clone())
        buffers["outlier_index"], buffers["outlier_weight"] = columns if here else (None, None)
    if rank:
        buffers["bias"] = None
    linear.in_features = part.stop - part.start
    if linear.hadamard:
        linear.keep_blocks(ranks)


def columns_of(x: Tensor, rank: int, ranks: int) -> Tensor:
    """The rank's part of the channels of x [..., K]."""
    width = x.shape[-1] // ranks
    return x.narrow(-1, rank * width, width)


def joined(parts: Tensor) -> Tensor:
    """[ranks, ..., K/n] -> [..., K]: the parts of all ranks side by side."""
    return torch.cat(parts.unbind(0), -1)
