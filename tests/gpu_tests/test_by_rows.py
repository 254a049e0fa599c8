"""Linears of any number of rows, compiled once: what the ops give, to the bit, the first time a number of rows comes and later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import mmqc.lowering  # noqa: F401  (registers the lowerings)
from mmqc.kernels.shared import repeated_launch
from mmqc.ops.pack import pack
from tests.support.tolerance import few_differ

pytestmark = pytest.mark.gpu
ROWS = (917, 1, 300, 17, 513, 3600, 64, 2048, 917, 6417, 200, 513, 16)
K, N = 1280, 768
ops = torch.ops.mmqc


def codes(rows: int, columns: int, bits: int = 8) -> Tensor:
    high = 2 ** (bits - 1)
    return torch.randint(-high, high, (rows, columns), dtype=torch.int8, device="cuda")


def weights(bits: int, count: int) -> list[Any]:
    w = [codes(N + 128 * i, K, bits) for i in range(count)]
    scales = [torch.rand(len(c), device="cuda") / 1e3 for c in w]
    bias: list[Tensor | None] = [torch.randn(len(c), device="cuda", dtype=torch.bfloat16) for c in w]
    return [[pack(c, 4) for c in w] if bits == 4 else w, scales, bias]


def scaled(bits: int, visual: bool) -> Callable[..., Any]:
    w, s, b = weights(bits, 3)
    x_scale = torch.rand(2 if visual else 1, device="cuda")

    def f(x: Tensor, mask: Tensor) -> Any:
        return ops.scaled_matmuls(x, w, x_scale, s, b, mask if visual else None, bits, torch.bfloat16)

    return f


def grouped(bits: int, integer: torch.dtype | None) -> Callable[..., Any]:
    w, s, b = weights(bits, 2)
    x_scale, shape = torch.rand(1, device="cuda"), [(len(part), K // 128) for part in w]
    if integer is None:
        s, groups = [torch.rand(size, device="cuda") / 1e3 for size in shape], None
    else:
        groups = [torch.randint(1, 8, size, dtype=integer, device="cuda") for size in shape]

    def f(x: Tensor, mask: Tensor) -> Any:
        return ops.scaled_matmuls(x, w, x_scale, s, b, None, bits, torch.bfloat16, groups, 128)

    return f


def gated(bits: int) -> Callable[..., Any]:
    (w, _), (s, _) = (part[:2] for part in weights(bits, 2)[:2])
    x_scale, after = torch.rand(1, device="cuda") / 1e2, torch.rand(1, device="cuda")

    def f(x: Tensor, mask: Tensor) -> Any:
        last = (torch.bfloat16, "silu", after)
        return ops.scaled_matmul_epilogue(x, [w, w], x_scale, [s, s], [None, None], None, bits, *last)

    return f


def activated(bits: int) -> Callable[..., Any]:
    w, s, b = weights(bits, 1)
    x_scale, after = torch.rand(1, device="cuda") / 1e2, torch.rand(2, device="cuda")

    def f(x: Tensor, mask: Tensor) -> Any:
        return ops.scaled_matmul_epilogue(x, w, x_scale, s, b, None, bits, torch.bfloat16, "quick_gelu", after, mask)

    return f


def weight_only(count: int, columns: int) -> Callable[..., Any]:
    w = [codes(columns, 4096) for _ in range(count)]
    s = [torch.rand(columns, device="cuda") for _ in w]

    def f(x: Tensor, mask: Tensor) -> Any:
        return ops.weight_only_matmuls(x.bfloat16().repeat(1, 4)[:, :4096].contiguous(), w, s, [None] * count, 8, 0)

    return f


CASES = {
    "w8": lambda: scaled(8, False),
    "w4": lambda: scaled(4, False),
    "w4, a scale per modality": lambda: scaled(4, True),
    "w4, integers of 8 bits a group": lambda: grouped(4, torch.int8),
    "w8, integers of 32 bits a group": lambda: grouped(8, torch.int32),
    "w4, scales of groups": lambda: grouped(4, None),
    "w8, gate": lambda: gated(8),
    "w4, gate": lambda: gated(4),
    "w8, codes": lambda: activated(8),
    "w4, codes": lambda: activated(4),
    "bytes": lambda: weight_only(1, 8192),
    "bytes, two": lambda: weight_only(2, 8192),
}


@pytest.mark.parametrize("case", CASES)
def test_by_rows__equals_the_op(case: str) -> None:
    f = CASES[case]()
    compiled = torch.compile(f, backend="inductor", dynamic=True, fullgraph=True)
    repeated_launch._chosen.clear()
    few, most = (16, 256) if case.startswith("bytes") else (512 if case.startswith("w8") else 16, max(ROWS))
    few = 256 if "group" in case else few
    coming = [rows for rows in ROWS if rows <= most]  # of more bytes the op writes the weight out, and rounds it
    for turn in range(2):  # what was chosen in the first is repeated in the second, on other tensors
        for rows in coming:
            x, mask = codes(rows, K), torch.rand(rows, device="cuda") < 0.5
            got, want = compiled(x, mask), f(x, mask)
            for a, b in zip(*([y] if isinstance(y, Tensor) else y for y in (got, want)), strict=True):
                if case in ("w4, gate", "w4, scales of groups"):  # in parts: what is behind is Inductor's own, sums in other orders
                    few_differ(a, b, 1e-3)
                else:
                    assert torch.equal(a, b), (turn, rows)
    if torch.cuda.get_device_capability() == (9, 0):
        assert {key[0][1] for key in repeated_launch._chosen} == {rows for rows in coming if rows > few}
