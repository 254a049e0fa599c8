"""Compiled equals eager, op by op, and the kernels are the intended ones."""

from collections import Counter

import pytest
import torch
from compiled_ops import check_compiled
from tolerance import assert_close

from mmqc.backend import collect_records
from mmqc.ops import integer_matmul
from mmqc.ops.pack import pack_int4
from mmqc.ops.rotate import random_hadamard

pytestmark = pytest.mark.usefixtures("integer_products")

ops = torch.ops.mmqc


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_scaled_matmul__int_mm_and_a_fused_epilogue(dtype: torch.dtype) -> None:
    w8 = torch.randint(-128, 128, (63, 100), dtype=torch.int8)
    even, odd = torch.randint(-8, 8, (24, 64), dtype=torch.int8), torch.randint(-8, 8, (17, 63), dtype=torch.int8)
    s1, s2, visual = torch.tensor([0.02]), torch.tensor([0.02, 0.05]), torch.rand(2, 9) > 0.5
    bias, packed = torch.randn(63), [pack_int4(even), pack_int4(odd)]

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = ops.scaled_matmul(ops.quantize(x, s2, visual, 8), w8, s2, torch.rand(63) * 0 + 0.01, bias, visual, 8, dtype)
        y_q = ops.quantize(torch.nn.functional.silu(y), s1, None, 8)
        z = ops.scaled_matmul(y_q, packed[1], s1, torch.ones(17), None, None, 4, dtype)
        u = ops.scaled_matmul(ops.quantize(x[..., :64], s1, None, 8), packed[0], s1, torch.ones(24), None, None, 4, dtype)
        return y, z, u

    _, record = check_compiled(function, torch.randn(2, 9, 100).to(dtype))
    assert record.kernels.count("extern _int_mm") == 3
    others = {name for name in record.kernels if not name.startswith("cpp_fused_")} - {"extern _int_mm"}
    assert others == {"extern aten.silu"}, record.kernels
    assert record.fallbacks == []


def test_lower_scaled_matmul__fallback_is_exact_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    w = torch.randint(-128, 128, (9, 33), dtype=torch.int8)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (ops.scaled_matmul(x, w, torch.ones(1), torch.ones(9), None, None, 8, torch.float32),)

    monkeypatch.setattr(integer_matmul, "cpu_int_mm_is_exact", lambda: False)
    with torch._inductor.config.patch(force_disable_caches=True):
        _, record = check_compiled(function, torch.randint(-128, 128, (5, 33), dtype=torch.int8))
    ((op, reason),) = record.fallbacks
    assert op.startswith("scaled_matmul")
    assert "saturates" in reason
    assert "extern _int_mm" not in record.kernels


def test_lower_scaled_matmul__group_scales() -> None:
    w, packed = torch.randint(-128, 128, (9, 100), dtype=torch.int8), torch.randint(0, 256, (9, 50), dtype=torch.uint8)
    t, s1, floats = torch.randint(-5, 900, (9, 4), dtype=torch.int32), torch.tensor([0.02]), torch.rand(9, 4)
    s2, visual, bias = torch.tensor([0.02, 0.05]), torch.rand(2, 5) > 0.5, torch.randn(9)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            ops.scaled_matmul(x, w, s1, floats[:, 0], None, None, 8, torch.bfloat16, t, 32),
            ops.scaled_matmul(x, packed, s2, floats, bias, visual, 4, torch.float32, None, 32),
            *ops.scaled_matmuls(x, [packed] * 2, s1, [floats] * 2, [None] * 2, None, 4, torch.float32, None, 32),
        )

    _, record = check_compiled(function, torch.randint(-128, 128, (2, 5, 100), dtype=torch.int8))
    assert {reason for _, reason in record.fallbacks} == {"group scales on cpu: float64 matmul instead"}


@pytest.mark.parametrize("rows", [(1,), (1, 1), (2, 1)])
def test_lower_scaled_matmul__one_row_as_in_decode(rows: tuple[int, ...]) -> None:
    w, packed = (torch.randint(-128, 128, (40, 96), dtype=torch.int8), pack_int4(torch.randint(-8, 8, (1, 96), dtype=torch.int8)))
    s2, visual = torch.tensor([0.02, 0.05]), torch.zeros(rows, dtype=torch.bool)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x_q = ops.quantize(x, s2, visual, 8)
        return (
            ops.scaled_matmul(x_q, w, s2, torch.ones(40), None, visual, 8, torch.float32),
            ops.scaled_matmul(x_q, packed, s2, torch.ones(1), None, visual, 4, torch.float32),
        )

    _, record = check_compiled(function, torch.randn(*rows, 96))
    assert record.kernels.count("extern _int_mm") == 2


def test_lower_scaled_matmul__one_input_channel() -> None:
    w = torch.randint(-128, 128, (40, 1), dtype=torch.int8)

    def function(x_q: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (ops.scaled_matmul(x_q, w, torch.ones(1), torch.ones(40), None, None, 8, torch.float32),)

    _, record = check_compiled(function, torch.randint(-128, 128, (7, 1), dtype=torch.int8))
    assert "one column" in record.fallbacks[0][1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_weight_only_matmul__all_storages(dtype: torch.dtype) -> None:
    w8, w4 = torch.randint(-128, 128, (63, 100), dtype=torch.int8), torch.randint(-8, 8, (17, 63), dtype=torch.int8)
    scale8, scale4, bias, packed = torch.rand(63) * 0.01, torch.rand(17, 4), torch.randn(63), pack_int4(w4)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = ops.weight_only_matmul(x, w8, scale8, bias, 8, 0)
        return y, ops.weight_only_matmul(torch.ones_like(y), packed, scale4, None, 4, 16)

    _, record = check_compiled(function, torch.randn(2, 5, 100).to(dtype))
    assert record.ops == Counter(weight_only_matmul=2)


@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize("between", [False, True])
def test_lower_weight_only_matmul__zero_points(rows: int, between: bool) -> None:
    w4 = pack_int4(torch.randint(-8, 8, (17, 63), dtype=torch.int8))
    scale, zero = torch.rand(17, 4), torch.randint(-8, 8, (17, 4), dtype=torch.int8)
    zero = (zero + torch.rand(17, 4)).half() if between else zero

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (ops.weight_only_matmul(x, w4, scale, None, 4, 16, zero),)

    _, record = check_compiled(function, torch.randn(rows, 63))
    reasons = [reason for _, reason in record.fallbacks]
    assert reasons == (["few rows with zero points: the weight is dequantized into memory"] if rows == 3 else [])


def test_lowerings__dynamic_rows_compile_once() -> None:
    factors = [f.float() for f in random_hadamard(96, 1)[0]]
    w, packed = (torch.randint(-128, 128, (96, 96), dtype=torch.int8), pack_int4(torch.randint(-8, 8, (8, 96), dtype=torch.int8)))
    s2 = torch.tensor([0.02, 0.05])

    def function(x: torch.Tensor, visual: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = ops.scaled_matmul(ops.quantize(x, s2, visual, 8), w, s2, torch.ones(96) * 1e-3, None, visual, 8, torch.float32)
        return (ops.weight_only_matmul(ops.hadamard(y, factors), packed, torch.ones(8), None, 4, 0),)

    compiled, record = check_compiled(function, torch.randn(4, 9, 96), torch.rand(4, 9) > 0.5, dynamic=True)
    assert record.kernels.count("extern _int_mm") == 1
    with collect_records() as more, torch.no_grad():
        for batch, length in ((3, 17), (2, 63), (5, 257)):
            args = torch.randn(batch, length, 96), torch.rand(batch, length) > 0.5
            assert_close(compiled(*args)[0], function(*args)[0])
    assert more == []
