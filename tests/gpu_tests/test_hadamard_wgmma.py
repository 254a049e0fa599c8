"""Warp-specialised transforms on Hopper against float64 and against the kernels that they join: every cut, every kind of scale."""

import pytest
import torch
from poison import poisoned
from row_scales import KINDS, row_scales
from tolerance import assert_close, few_differ
from torch.nn import functional as F

from mmqc.backend import backend, collect_records
from mmqc.kernels.hadamard import hadamard_quantize, hadamard_quantize_per_token
from mmqc.kernels.hadamard import hadamard_wgmma as kernel
from mmqc.kernels.hadamard.hadamard_plan import hadamard_plan
from mmqc.kernels.rows import quantize_per_token
from mmqc.kernels.shared.device_facts import WARPGROUP_ROWS, has_warpgroup_products
from mmqc.kernels.shared.row_scale import row_scale
from mmqc.ops.hadamard import reference
from mmqc.ops.hadamard_matrix import hadamard_factors

HERE = torch.cuda.is_available() and has_warpgroup_products(torch.device("cuda"))
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HERE, reason="warpgroup products are Hopper's")]
# A in one block, two of which one is short, two, three of which one is short, three and no more than two slots
WIDTHS = [8192, 10240, 12288, 14336, 18944, 24576]
ROWS = [513, 1000]
DTYPES = [torch.bfloat16, torch.float16]
FP8 = torch.float8_e4m3fn


def rows_of(m: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of a wider matrix."""
    x = torch.randn(m, n + 64, device="cuda", dtype=dtype)[:, :n]
    assert kernel.why_not(x) is None
    return x


def transformed(x: torch.Tensor, scale: torch.Tensor | None = None, bits: int = 8, code=torch.int8, up=None, new=None, **rows):
    """Codes, or without scales y."""
    scales, code = (None, None) if scale is None else (row_scale(scale, len(x), **rows), code)
    return hadamard_quantize.plan(x, up, hadamard_plan, scales, bits, code, new or poisoned(x)).run()


def per_token(x: torch.Tensor, bits: int, up: torch.Tensor | None = None):
    return hadamard_quantize_per_token.plan(x, up, hadamard_plan, bits, poisoned(x)).run()


def exact(x: torch.Tensor) -> torch.Tensor:
    return reference(x.double(), [f.cuda() for f in hadamard_factors(x.shape[1])])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("n", WIDTHS)
def test_transform__equals_float64(n, m, dtype) -> None:
    x = rows_of(m, n, dtype)
    assert_close(transformed(x), exact(x), dtype)


@pytest.mark.parametrize("n", WIDTHS)
def test_transform__keeps_rows_apart(n) -> None:
    """What is no number in one row stays there: where tiles reach into the next one, zeros are copied."""
    x = rows_of(700, n, torch.bfloat16)
    want = transformed(x)
    x[[3, 340, 699]] = float("nan")
    y = transformed(x)
    lost = y.isnan().all(1)
    assert lost.nonzero().flatten().tolist() == [3, 340, 699]
    assert torch.equal(y[~lost], want[~lost])


@pytest.mark.parametrize("code", [torch.int8, FP8])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", WIDTHS)
def test_codes__scale_of_every_kind(n, kind, code) -> None:
    x = rows_of(777, n, torch.bfloat16)
    scale, given, each = row_scales(kind, 777, "cuda")
    out = transformed(x, scale, code=code, **given)
    values = exact(x) / each.double()[:, None]
    if code == torch.int8:
        # bfloat16 moves h and y by 0.002 at most on average, and so that share of a scale's codes to the other side
        few_differ(out, values.round().clamp(-128, 127), (0.002 / each).mean().item())
    else:
        want = values.float().clamp(-448, 448).to(code).float()
        off = (out.float() - want).abs()
        assert (off <= want.abs() / 8 + 1).all(), "a step of float8"
        assert (off > 0).float().mean() <= 0.1


@pytest.mark.parametrize("n", WIDTHS)
def test_codes__of_few_bits_are_clamped(n) -> None:
    x = rows_of(600, n, torch.bfloat16)
    q = transformed(x, torch.full((1,), 0.1, device="cuda"), bits=4)
    few_differ(q, (exact(x) / 0.1).round().clamp(-8, 7), 0.1)
    assert {q.min().item(), q.max().item()} == {-8, 7}


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", WIDTHS)
def test_per_token__codes_of_the_two_kernels_one_after_the_other(n, dtype, bits) -> None:
    x = rows_of(550, n, dtype) + 0.3
    x[-1] = 0
    out, want = per_token(x, bits), quantize_per_token.plan(transformed(x), [n], [bits]).run()
    for found, wanted in zip(out, want, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("n", [8192, 18944])
def test_gated__silu_is_rounded_before_it_is_multiplied(n) -> None:
    gate, up = torch.randn(600, 2 * n, device="cuda", dtype=torch.bfloat16).chunk(2, 1)
    h = F.silu(gate) * up
    assert_close(transformed(gate, up=up), exact(h), torch.bfloat16)
    few_differ(per_token(gate, 4, up).q, per_token(h, 4).q, 0.1)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled__calls_the_op_where_rows_are_known(dynamic) -> None:
    torch._dynamo.reset()
    factors = [f.float().cuda() for f in hadamard_factors(8192)]
    scale, up = torch.full((1,), 0.03, device="cuda"), torch.randn(2, 400, 8192, device="cuda", dtype=torch.bfloat16)
    ops = torch.ops.mmqc

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = ops.hadamard(x, factors)
        q = ops.hadamard_quantize(y, None, factors, scale, None, 8)
        return y, q, *ops.hadamard_quantize_per_token(y, y, factors, 4)

    compiled = torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=True)
    with collect_records() as records, torch.no_grad():
        found, wanted = compiled(up), function(up)
    assert all(torch.equal(got, want) for got, want in zip(found, wanted, strict=True))
    launches = [name for record in records for name in record.kernels]
    assert sum("extern" in name for name in launches) == (0 if dynamic else 3), launches


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("n", [8192, 18944])
def test_compiled__any_number_of_rows_is_transformed_as_by_the_op(n, gated) -> None:
    """Many to the bit, the first time a number of rows comes and later; few by another kernel, which rounds elsewhere."""
    torch._dynamo.reset()
    factors, scale = [f.float().cuda() for f in hadamard_factors(n)], torch.tensor([0.03, 0.05], device="cuda")
    ops, kept = torch.ops.mmqc, torch.randint(0, n, (8,), device="cuda")

    def function(x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        up = x if gated else None
        codes = ops.hadamard_quantize(x, up, factors, scale[:1], None, 8), ops.hadamard_quantize(x, up, factors, scale, mask, 8)
        some = ops.hadamard_quantize_kept(x, up, factors, kept, scale, mask, 8)
        return ops.hadamard(x, factors), some[1], *codes, some[0], *ops.hadamard_quantize_per_token(x, up, factors, 4)

    compiled = torch.compile(function, backend=backend, dynamic=True, fullgraph=True)
    for rows in (700, 3, 513, 512, 1000, 700, 513, 6417):
        x, mask = torch.randn(rows, n, device="cuda", dtype=torch.bfloat16), torch.rand(rows, device="cuda") < 0.5
        with torch.no_grad():
            found, wanted = compiled(x, mask), function(x, mask)
        if rows > WARPGROUP_ROWS:
            assert all(torch.equal(got, want) for got, want in zip(found, wanted, strict=True)), rows
        else:
            for i in (0, 1, 6):
                assert_close(found[i], wanted[i], torch.bfloat16)
            for got, want in zip(found[2:6], wanted[2:6], strict=True):
                few_differ(got, want, 0.05)


def test_compiled__replays_in_a_graph() -> None:
    x, scale = rows_of(2048, 14336, torch.bfloat16), torch.full((1,), 0.03, device="cuda")
    want, out = transformed(x, scale), torch.empty(2048, 14336, dtype=torch.int8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        transformed(x, scale, new=lambda width, dtype: out)
    for _ in range(3):
        out.fill_(77)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, want)


def test_why_not__says_what_it_cannot_do() -> None:
    x = rows_of(600, 8192, torch.bfloat16)
    assert "rows: more than" in str(kernel.why_not(x[:300]))
    assert "not cut into tiles" in str(kernel.why_not(x[:, :3584]))
    assert "not cut into tiles" in str(kernel.why_not(x.float()))
    odd = torch.randn(600, 8193, device="cuda", dtype=torch.bfloat16)[:, 1:]
    assert "multiples of 16 bytes" in str(kernel.why_not_at(odd, odd))
    assert_close(transformed(odd), exact(odd), torch.bfloat16)  # takes another kernel
