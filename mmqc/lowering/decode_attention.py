"""decode_attention: on CUDA a launch over all parts of all heads; elsewhere the op as it is.

Where the number of sequences is a symbol there is a launch for each kind of tiles, and the one that is meant runs.
They share the graph's counters: a head is in parts, which are counted, where there are fewer heads than programs.

Shapes:  those of ops/decode_attention.py; any of them may be a symbol but for the number of rows and of channels
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import torch
from sympy import Max, Min
from torch import fx

from mmqc import kernels
from mmqc.lowering.inductor import FloorDiv, TensorBox, at_least, at_most, call_kernel, has_kernel, lowerings, register_lowering

aten = torch.ops.aten


def why_not(node: fx.Node) -> str | None:
    """None, or why the CUDA kernel cannot take this node of an ATen graph."""
    given: list[Any] = [a.meta["val"] if isinstance(a, fx.Node) else a for a in node.args[:4]]
    q, k, _, mask = given
    if q.device.type != "cuda" or not kernels.install():
        return None
    return _kernel().why_not(q, k, mask)


def _kernel() -> Any:
    return importlib.import_module("mmqc.kernels.kv.decode_attention")


@register_lowering(torch.ops.mmqc.decode_attention.default, type_promotion_kind=None)
def lower_decode_attention(q: TensorBox, k: TensorBox, v: TensorBox, mask: TensorBox | None, scale: float) -> TensorBox:
    """A launch of as many programs as the device has room for, or fewer if the cache is known to be short."""
    if not has_kernel(q):
        return call_kernel(torch.ops.mmqc.decode_attention.default, q, k, v, mask, scale)
    launch, kernel = importlib.import_module("mmqc.lowering.launch"), _kernel()
    operands = [launch.Operand.sized(x) for x in (q, k, v)]
    seen = None if mask is None else launch.Operand.sized(mask)
    (batch, heads, rows, width), device = operands[0].shape, operands[0].device
    if kernel.why_not(operands[0], operands[1], seen):
        return call_kernel(torch.ops.mmqc.decode_attention.default, q, k, v, mask, scale)
    y = launch.Operand.sized(lowerings[aten.empty_strided.default](
        [batch, heads, rows, width], None, dtype=operands[0].dtype, device=device
    ))  # fmt: skip
    all_heads, tokens = batch * heads, operands[1].shape[2]
    counters = launch.Operand(launch.counters(launch.COUNTERS, device))
    for config, runs in _configs(launch, kernel, all_heads, (device, rows, width, operands[0].dtype.itemsize)):
        programs = config.per_sm * kernel.multiprocessors(device)
        part = launch.Operand.new((kernel.room(programs, all_heads, rows, width),), torch.float32, device)
        most = FloorDiv(programs + all_heads - 1, all_heads)  # of a head, as the kernel shares them out
        if isinstance(all_heads, int):
            most = min(int(most), kernel.ceil_div(tokens, config.tokens)) if isinstance(tokens, int) else int(most)
        made = kernel.launch(
            *operands, seen, y, part, counters, scale, heads=(batch, heads), tokens=tokens,
            most=most, programs=programs, config=config,
        )  # fmt: skip
        launch.emit(made, rows, rows, runs)
    return y.box


def _configs(launch: Any, kernel: Any, heads: Any, given: tuple[Any, ...]) -> Iterator[tuple[Any, Any]]:
    """Those that may be meant, and 1 where there are so many heads, else 0, or None where there always are."""
    if isinstance(heads, int):
        yield kernel.config_of(heads, *given), None
        return
    above = 0
    for config, last in kernel.configs(*given):
        if last is not None and at_least(heads, last + 1):
            continue
        runs = launch.more_than(heads, above) if above else None
        if last is None or at_most(heads, last):
            yield config, runs
            return
        yield config, Min(1, Max(0, last + 1 - heads)) * (1 if runs is None else runs)
        above = last
