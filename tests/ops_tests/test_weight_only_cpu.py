"""Few rows against a stored weight on the CPU: compiled equals the linear in float64, and no copy of the weight is made."""

import math
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from often import often
from tolerance import assert_close
from torch._inductor import config as inductor_config

import mmqc.ops  # noqa: F401  (defines the op that the lowering is for)
from mmqc.backend import GraphRecord, backend, collect_records
from mmqc.lowering import few_rows, few_rows_cpp
from mmqc.ops.pack import PACKED, STRETCHES, pack, stretch

weight_only_matmul = torch.ops.mmqc.weight_only_matmul
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Linear(NamedTuple):
    """Of n outputs and k inputs."""

    n: int
    k: int
    bits: int
    group: int
    bias: bool = False


TAKEN = [
    Linear(40, 256, 4, 128),
    Linear(9, 448, 4, 128, bias=True),  # a group lies across the two halves of a row
    Linear(17, 63, 4, 0, bias=True),  # an odd row's last nibble is no column
    Linear(17, 63, 4, 16),  # and belongs to the last group
    Linear(1, 64, 4, 16),
    Linear(24, 1, 4, 0),
    Linear(33, 160, 8, 32, bias=True),
    Linear(63, 100, 8, 0),
    Linear(5, 33, 8, 33),
    Linear(40, 256, 2, 64),
    Linear(9, 200, 2, 0, bias=True),  # the last stretch is short
    Linear(13, 192, 2, 16, bias=True),
    Linear(40, 512, 3, 64),
    Linear(9, 200, 3, 0, bias=True),
    Linear(11, 384, 3, 32),
]
REFUSED = [
    Linear(17, 60, 4, 16),
    Linear(9, 100, 8, 12),
    Linear(9, 256, 4, 8, bias=True),
    Linear(7, 250, 3, 24),
    Linear(7, 250, 2, 50, bias=True),
]


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


def stored(linear: Linear) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """(weight as stored, scale, bias, the float64 weight)."""
    n, k, bits, group, bias = linear
    codes = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (n, k), dtype=torch.int8)
    scale = torch.rand(n, -(-k // group)) if group else torch.rand(n)
    spread = scale.repeat_interleave(group, 1)[:, :k] if group else scale[:, None]
    kept = codes if bits == 8 else pack(codes, bits)
    return kept, scale, torch.randn(n) if bias else None, codes.double() * spread.double()


def assert_product(y: torch.Tensor, x: torch.Tensor, dense: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Y = x denseᵀ + bias, to the tolerance of y's dtype in units of a sum of random signs: the only output may cancel."""
    x = x.double()
    expected = x @ dense.T + (0 if bias is None else bias.double())
    size = (x.square() @ dense.T.square()).sqrt()
    assert_close(torch.cat([y.double(), size]), torch.cat([expected, size]), y.dtype)


def assert_like_dense(linears: list[Linear], rows: tuple[int, ...], dtype: torch.dtype, dynamic: bool = False) -> GraphRecord:
    """Compile all linears as one graph; the record, after a comparison with float64."""
    weights = [stored(linear) for linear in linears]
    inputs = [torch.randn(*rows, linear.k).to(dtype) for linear in linears]

    def function(*inputs: torch.Tensor) -> list[torch.Tensor]:
        return [
            weight_only_matmul(x, w, scale, bias, linear.bits, linear.group)
            for x, linear, (w, scale, bias, _) in zip(inputs, linears, weights, strict=True)
        ]

    with collect_records() as records, torch.no_grad():
        got = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)(*inputs)
    for x, y, linear, (_, _, bias, dense) in zip(inputs, got, linears, weights, strict=True):
        assert y.dtype == dtype
        m = math.prod(rows)
        taken = few_rows.is_few(m) and not dynamic and not few_rows.why_not(m, linear.k, linear.bits, linear.group)
        assert_product(y, x, dense if taken else dense.to(torch.promote_types(dtype, torch.float32)).to(dtype).double(), bias)
    (record,) = records
    return record


@pytest.mark.parametrize(("bits", "dtype"), [(3, torch.float32), (3, torch.bfloat16), (8, torch.float64)])
def test_few_rows__of_linears_with_one_input(bits: int, dtype: torch.dtype) -> None:
    """Fused into one op of several results, and written by loops, not by the C++ function."""
    weights = [stored(Linear(n, 256, bits, 64)) for n in (24, 8, 8)]
    x = torch.randn(2, 2, 256).to(dtype)

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        return [weight_only_matmul(x, w, scale, bias, bits, 64) for w, scale, bias, _ in weights]

    with collect_records() as records, torch.no_grad():
        got = torch.compile(function, backend=backend, fullgraph=True)(x)
    assert [list(record.ops) for record in records] == [["weight_only_matmuls"]]
    for y, (*_, dense) in zip(got, weights, strict=True):
        assert_product(y, x, dense, None)


@pytest.mark.parametrize(
    ("rows", "dtype", "every"),
    [
        ((1,), torch.float32, 1),
        ((1,), torch.bfloat16, 3),
        pytest.param((1,), torch.float16, 3, marks=pytest.mark.slow),
        pytest.param((1, 3), torch.float32, 3, marks=pytest.mark.slow),
        ((2, 8), torch.bfloat16, 4),
    ],
)
def test_few_rows__is_the_dequantized_linear(rows: tuple[int, ...], dtype: torch.dtype, every: int) -> None:
    """All linears in float32, some of them in the others: a kernel takes the compiler most of a second."""
    record = assert_like_dense(TAKEN[every - 1 :: every], rows, dtype)
    assert record.fallbacks == []
    assert not any(kernel.startswith("extern") for kernel in record.kernels)


def test_few_rows__float64_sums_in_float64() -> None:
    assert_like_dense(TAKEN[:3], (1, 1), torch.float64)


def test_few_rows__one_vector() -> None:
    (x,), (w, scale, _, dense) = torch.randn(1, 64), stored(TAKEN[4])
    compiled = torch.compile(lambda x: weight_only_matmul(x, w, scale, None, 4, 16), backend=backend)
    with torch.no_grad():
        assert_product(compiled(x)[None], x[None], dense, None)


@pytest.mark.parametrize("m", often((1, 6, 13), 6))
def test_few_rows__in_blocks_and_by_themselves(m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real, called = few_rows_cpp.multiply, []
    monkeypatch.setattr(few_rows_cpp, "multiply", lambda *args: called.append(args) or real(*args))
    linears = [Linear(33, 160, 8, 32), Linear(17, 63, 4, 0), Linear(9, 448, 4, 128), Linear(13, 192, 2, 16), Linear(5, 48, 4, 24)]
    linears = linears if m == 6 else linears[:: 2 if m == 1 else 3]  # 6 rows are both, a block and rows by themselves
    with inductor_config.patch(force_disable_caches=True):  # a cached graph is not lowered again
        assert_like_dense(linears, (m,), torch.float32)
    assert len(called) == len(linears)


def test_few_rows__rows_of_a_larger_tensor() -> None:
    x, (w, scale, bias, dense) = torch.randn(3, 5, 448), stored(TAKEN[1])
    compiled = torch.compile(lambda x: weight_only_matmul(x[1, 2:4], w, scale, bias, 4, 128), backend=backend)
    with torch.no_grad():
        assert_product(compiled(x), x[1, 2:4], dense, bias)
        assert_product(compiled(x[..., :448]), x[1, 2:4], dense, bias)


def test_few_rows__weights_that_are_views() -> None:
    (x,), (w, scale, _, dense) = torch.randn(1, 1, 256), stored(Linear(40, 256, 4, 128))
    compiled = torch.compile(lambda x, w, s: weight_only_matmul(x, w[8:], s[8:], None, 4, 128), backend=backend)
    with torch.no_grad():
        assert_product(compiled(x, w, scale), x, dense[8:], None)


@pytest.mark.slow
def test_few_rows__in_a_package(tmp_path: Path) -> None:
    from mmqc.lowering.package import compile_program, load_program, write_package

    class Two(torch.nn.Module):
        """Linears behind one another: their functions share a file."""

        def __init__(self) -> None:
            super().__init__()
            for i, linear in enumerate((Linear(64, 448, 4, 128), Linear(9, 64, 8, 32))):
                self.register_buffer(f"w{i}", stored(linear)[0])
                self.register_buffer(f"s{i}", stored(linear)[1])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = weight_only_matmul(x, self.w0, self.s0, None, 4, 128)
            return weight_only_matmul(x.tanh(), self.w1, self.s1, None, 8, 32)

    model, x = Two().eval(), torch.randn(3, 448)
    files = compile_program(torch.export.export(model, (x,)), as_eager=False, metadata={})
    write_package(str(tmp_path / "two.pt2"), {"forward": files})
    with torch.no_grad():
        assert_close(load_program(str(tmp_path / "two.pt2"), "forward")(x), model(x), torch.float32)


def test_few_rows__without_vectors_by_loops_of_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows_cpp, "has_vectors", lambda: False)
    monkeypatch.delattr(few_rows_cpp, "multiply")
    with inductor_config.patch(force_disable_caches=True):
        assert_like_dense(TAKEN[:3], (2,), torch.float32)


def test_few_rows__rows_share_one_pass_over_the_weight() -> None:
    few, many = (assert_like_dense([Linear(64, 256, 4, 128)], (m,), torch.float32) for m in (2, 16))
    assert len(few.kernels) == len(many.kernels) == 1


LINEARS = st.builds(
    Linear,
    n=st.integers(1, 70),
    k=st.integers(1, 300),
    bits=st.sampled_from([*PACKED, 8]),
    group=st.integers(0, 160),
    bias=st.booleans(),
)


@settings(max_examples=3)
@given(
    linears=st.lists(LINEARS, min_size=3, max_size=3),
    rows=st.integers(1, 4),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
)
def test_few_rows__any_shape(linears: list[Linear], rows: int, dtype: torch.dtype, seed: int) -> None:
    """Three in a graph: the compiler reads its headers once."""
    torch.manual_seed(seed)
    torch._dynamo.reset()
    record = assert_like_dense(linears, (rows,), dtype)
    assert ("extern mm" in record.kernels) == bool(record.fallbacks)


@given(k=st.integers(1, 20000), bits=st.sampled_from([*PACKED, 8]), group=st.sampled_from([0, 16, 32, 48, 64, 96, 100, 128, 256]))
def test_chunk__has_one_scale_in_every_stretch(k: int, bits: int, group: int) -> None:
    length, chunk = stretch(k, bits), few_rows.chunk_of(k, bits, group)
    assert length % chunk == 0
    assert bits != 3 or (length // 2) % chunk == 0, "the third bit changes its place halfway"
    if group and few_rows.why_not(1, k, bits, group) is None:
        starts = range(0, length * STRETCHES[bits], chunk)
        assert all(start // group == (start + chunk - 1) // group for start in starts)
        assert starts[-1] // group < math.ceil(k / group)


def test_few_rows__fallback_is_right_and_named() -> None:
    record = assert_like_dense(REFUSED, (3,), torch.float32)
    assert len(record.fallbacks) == record.kernels.count("extern mm") == len(REFUSED)
    assert "groups of 16 and stretches of 30 columns" in record.fallbacks[0][1]


@pytest.mark.parametrize(("rows", "dynamic"), [(17, False), (16, True)])
def test_few_rows__many_or_unknown_rows_are_a_matmul(rows: int, dynamic: bool) -> None:
    record = assert_like_dense(TAKEN[:1], (rows,), torch.float32, dynamic)
    assert "extern mm" in record.kernels
    assert record.fallbacks == []
