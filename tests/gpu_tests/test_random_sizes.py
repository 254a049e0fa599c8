"""Linears, caches, norms and transforms on a CUDA device at sizes that nobody chose, by the kernels and tiles that they take there.

    pytest -m gpu tests/gpu_tests/test_random_sizes.py --seed=fresh        other sizes, other numbers

A failure prints what was drawn.  Tiles depend on the rows, on both widths and on the device, so sizes of models alone leave most
of them unseen: experts in groups of 48 asked for more shared memory than there is until a sweep met them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kv_cases import packed_case
from tolerance import TOLERANCE, assert_close, assert_codes_of, few_differ
from torch import Tensor

import mmqc.ops  # noqa: F401
from mmqc.ops import (
    basis_quantize_per_token,
    decode_attention,
    float4_matmul,
    grouped_matmul,
    hadamard,
    hadamard_quantize,
    kv_attention,
    kv_rows_attention,
    kv_token_attention,
    mixed_matmul,
    norm_quantize,
    norm_quantize_per_token,
    quantize,
    quantize_per_token,
    scaled_matmul,
    scaled_matmul_epilogue,
    weight_only_matmul,
)
from mmqc.ops.hadamard_matrix import hadamard_factors
from mmqc.ops.kv_rows import to_rows
from mmqc.ops.pack import pack, pack_int4

pytestmark = pytest.mark.gpu
ops = torch.ops.mmqc
TIMES = 30  # cases of each op
HALF = (torch.float16, torch.bfloat16)
FLOATS = (*HALF, torch.float32)
WIDTHS = (128, 256, 896, 1280, 1536, 3584, 4096, 5120)
TRANSFORMED = (1280, 3420, 3584, 5120, 8192, 11008, 13824, 14336, 18944, 24576, 29568)
HEADS = (32, 48, 64, 72, 80, 96, 112, 128, 192, 256)
MORE_ROUNDED = {torch.float32: 0.02, torch.float16: 0.06, torch.bfloat16: 0.2}  # codes that a sum in another order moves by one


class Draw(random.Random):
    """Sizes, and tensors on the device."""

    def rows(self) -> int:
        """From one token to a prompt."""
        return self.choice([self.randint(1, 8), self.randint(1, 64), self.randint(65, 512), self.randint(513, 2600)])

    def width(self, most: int) -> int:
        return self.choice([self.randint(1, 64), self.randint(64, 600), self.randint(600, most), self.choice(WIDTHS)])

    def grouped(self, most: int) -> tuple[int, int]:
        """Columns of a weight and the size of its groups: whole groups; none is 0."""
        group = self.choice([0, 16, 24, 32, 48, 64, 96, 128, 256])
        return (group * self.randint(1, most // group) if group else self.width(most)), group

    def heads(self) -> tuple[int, int, int, torch.dtype]:
        """Heads of keys, queries for each, channels, dtype."""
        return self.randint(1, 3), self.choice([1, 3, 4, 7, 16]), self.choice(HEADS), self.choice(HALF)

    def maybe(self, value: Any) -> Any:
        return self.choice([None, value])

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, device="cuda").to(dtype)

    def positive(self, *shape: int) -> Tensor:
        return torch.rand(*shape, device="cuda") * 0.1 + 0.01

    def codes(self, bits: int, *shape: int) -> Tensor:
        top = 2 ** (bits - 1)
        return torch.randint(-top, top, shape, dtype=torch.int8, device="cuda")

    def zeros_of(self, scale: Tensor, bits: int) -> Tensor | None:
        """None, or whole zero points, or some between the codes."""
        whole = self.codes(bits, *scale.shape)
        return self.choice([None, whole, (whole + torch.rand(scale.shape, device="cuda")).half()])


def reference(op: Any, *operands: Any) -> Any:
    """What the op is."""
    return op.reference(*operands)


def stored(codes: Tensor, bits: int) -> Tensor:
    return codes if bits == 8 else pack(codes, bits)


def close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    assert not got.isnan().any()
    assert_close(got, want, dtype)


def wide(operands: Iterable[Any]) -> list[Any]:
    """Floating-point tensors in float64."""
    return [t.double() if isinstance(t, Tensor) and t.is_floating_point() else t for t in operands]


def weight_only(d: Draw, told: Callable[..., None]) -> None:
    m, n, bits, dtype, (k, group) = d.rows(), d.width(5000), d.choice([2, 3, 4, 8]), d.choice(FLOATS), d.grouped(6000)
    scale = d.positive(*((n, k // group) if group else (n,))).to(d.choice(FLOATS))
    zero, bias = d.zeros_of(scale, bits), d.maybe(d.normal(n, dtype=dtype))
    told(m=m, n=n, k=k, group=group, bits=bits, dtype=dtype, scale=scale.dtype, zero=zero is None or zero.dtype)
    w, x = stored(d.codes(bits, n, k), bits), d.normal(m, k, dtype=dtype)
    y = ops.weight_only_matmul(x, w, scale, bias, bits, group, zero)
    want = reference(weight_only_matmul, *wide((x, w, scale, bias)), bits, group, zero)
    # between zero points in half precision, a weight is rounded twice
    close(y, want, torch.bfloat16 if zero is not None and dtype in HALF else dtype)


def experts(d: Draw, told: Callable[..., None]) -> None:
    n, bits, dtype, (k, group) = d.width(2000), d.choice([2, 3, 4, 8]), d.choice(HALF), d.grouped(2500)
    counts = [d.choice([0, d.randint(0, 5), d.randint(0, 300)]) for _ in range(d.randint(1, 20))]
    m = max(1, sum(counts) + d.choice([0, 3]))
    scale = d.positive(len(counts), *((n, k // group) if group else (n,))).to(d.choice([torch.float16, torch.float32]))
    zero = d.zeros_of(scale, bits)
    told(counts=counts, m=m, n=n, k=k, group=group, bits=bits, dtype=dtype, scale=scale.dtype, zero=zero is None or zero.dtype)
    w, x = stored(d.codes(bits, len(counts), n, k), bits), d.normal(m, k, dtype=dtype)
    ends = torch.tensor([0, *counts], device="cuda").cumsum(0).to(torch.int32)
    y = ops.grouped_matmul(x, w, scale, ends, None, None, bits, group, dtype, zero)
    want = reference(grouped_matmul, x.double(), w, scale, ends, None, None, bits, group, torch.float64, zero)
    close(y, want, torch.bfloat16 if zero is not None else dtype)


def float4(d: Draw, told: Callable[..., None]) -> None:
    m, n, k, form, dtype = d.rows(), d.width(4000), d.width(5000), d.choice(["mxfp4", "nvfp4"]), d.choice(HALF)
    told(m=m, n=n, k=k, form=form, dtype=dtype)
    block, low, high = (32, 118, 130) if form == "mxfp4" else (16, 0, 127)
    w = torch.randint(256, (n, -(-k // 2)), dtype=torch.uint8, device="cuda")
    scale = torch.randint(low, high, (n, -(-k // block)), dtype=torch.uint8, device="cuda")
    divisor, x = torch.tensor([37.0], device="cuda") if form == "nvfp4" else None, d.normal(m, k, dtype=dtype)
    y = ops.float4_matmul(x, w, scale, divisor, None, form)
    close(y, reference(float4_matmul, x.double(), w, scale, divisor, None, form), dtype)


def scaled(d: Draw, told: Callable[..., None]) -> None:
    m, n, k, bits, out, count = d.rows(), d.width(5000), d.width(6000), d.choice([4, 8]), d.choice(FLOATS), d.randint(1, 3)
    visual = d.maybe(torch.rand(m, device="cuda") < 0.5)
    told(m=m, n=n, k=k, bits=bits, out=out, linears=count, modalities=visual is not None)
    x, x_scale = d.codes(8, m, k), d.positive(1 if visual is None else 2)
    w = [stored(d.codes(bits, n, k), bits) for _ in range(count)]
    scale, bias = [d.positive(n) for _ in w], [d.maybe(d.normal(n)) for _ in w]
    for i, y in enumerate(ops.scaled_matmuls(x, w, x_scale, scale, bias, visual, bits, out)):
        close(y, reference(scaled_matmul, x, w[i], x_scale, scale[i], bias[i], visual, bits, torch.float64), out)


def group_scaled(d: Draw, told: Callable[..., None]) -> None:
    m, n, k, bits, out = d.rows(), d.width(3000), d.width(4000), d.choice([4, 8]), d.choice(HALF)
    group = d.choice([16, 32, 48, 96, 128])
    whole = d.maybe(torch.randint(-300, 1000, (n, -(-k // group)), dtype=torch.int32, device="cuda"))
    told(m=m, n=n, k=k, bits=bits, group=group, out=out, integer=whole is not None)
    scale = d.positive(n, -(-k // group)) if whole is None else d.positive(n) / 1000
    operands = d.codes(8, m, k), stored(d.codes(bits, n, k), bits), d.positive(1) / 100, scale, d.normal(n), None, bits
    y = ops.scaled_matmul(*operands, out, whole, group)
    close(y, reference(scaled_matmul, *operands, torch.float64, whole, group), out)


def mixed(d: Draw, told: Callable[..., None]) -> None:
    m, n, widths, out = d.rows(), d.width(3000), [16 * d.randint(1, 260), 16 * d.randint(1, 40)], d.choice(FLOATS)
    told(m=m, n=n, widths=widths, out=out)
    x = reference(quantize_per_token, d.normal(m, sum(widths)) + 0.5, None, widths, [4, 8])
    low, high = d.codes(4, n, widths[0]), d.codes(8, n, widths[1])
    scale, sums = d.positive(n, 2), torch.stack([c.sum(1, dtype=torch.int32) for c in (low, high)], 1)
    operands = *x, [pack_int4(low), high], scale, sums, d.maybe(d.normal(n)), widths, [4, 8]
    y, want = ops.mixed_matmul(*operands, out), reference(mixed_matmul, *operands, torch.float64)
    once = 0.5 * x[1][:, -1:].double() * scale[:, -1].double()  # a sum of low channels, rounded to steps of the high ones
    cuts = 8  # sums of a tile's low channels, at most
    assert ((y.double() - want).abs() <= 1.001 * cuts * once + TOLERANCE[out][0] * (want.abs() + 0.1 * want.abs().amax())).all()


def gated(d: Draw, told: Callable[..., None]) -> None:
    m, n, k, bits, out, count = d.rows(), d.width(3000), d.width(4000), d.choice([4, 8]), d.choice(FLOATS), d.randint(1, 2)
    activation = d.choice(["silu", "gelu", "relu"])
    told(m=m, n=n, k=k, bits=bits, out=out, linears=count, activation=activation)
    x, x_scale = d.codes(8, m, k), d.positive(1)
    w = [stored(d.codes(bits, n, k), bits) for _ in range(count)]
    scale = [d.positive(n) / (100 * 2**bits * k**0.5) for _ in w]
    operands = x, w, x_scale, scale, [d.normal(n) for _ in w], None, bits
    y = ops.scaled_matmul_epilogue(*operands, out, activation)
    # of two linears, gate and up are rounded, and what is computed from them
    close(y, reference(scaled_matmul_epilogue, *operands, torch.float64 if count == 1 else out, activation), out)


def dense_cache(d: Draw, told: Callable[..., None]) -> None:
    batch, heads, rows, width, dtype = d.choice([1, 2, 3, 17]), d.randint(1, 4), d.randint(1, 33), d.choice(HEADS), d.choice(HALF)
    tokens = d.choice([d.randint(1, 40), d.randint(1, 700), d.randint(1, 6000)])
    told(batch=batch, heads=heads, rows=rows, width=width, tokens=tokens, dtype=dtype)
    q, k, v = (d.normal(batch, heads, n, width, dtype=dtype) for n in (rows, tokens, tokens))
    mask = d.maybe(torch.rand(batch, 1, 1, tokens, device="cuda") < 0.6)
    y = ops.decode_attention(q, k, v, mask, width**-0.5)
    close(y, reference(decode_attention, q.double(), k.double(), v.double(), mask, width**-0.5), dtype)


def cache_by_rows(d: Draw, told: Callable[..., None]) -> None:
    queries, (heads, group, width, dtype) = d.choice([1, 1, 2, 9]), d.heads()
    low = d.choice([width, width - width // 8, width // 2]) // 8 * 8
    widths = [low, width - low] if low < width else [width]
    bits, tokens = [d.choice([2, 3, 4, 5, 6, 8]) for _ in widths], queries + d.choice([d.randint(0, 40), d.randint(0, 4000)])
    told(group=group, queries=queries, heads=heads, widths=widths, bits=bits, tokens=tokens, dtype=dtype)
    k, v = (d.normal(2, heads, tokens, width, dtype=dtype) for _ in "kv")
    k, v = (reference(quantize_per_token, t, None, widths, bits) for t in (k, v))
    k, v = (to_rows(*codes, widths, bits) for codes in (k, v))
    q = d.normal(2, queries, heads * group, width, dtype=dtype).transpose(1, 2)
    y = ops.kv_rows_attention(q, k, v, widths, bits, width**-0.5)
    close(y, reference(kv_rows_attention, q.double(), k, v, widths, bits, width**-0.5), dtype)


def cache_by_token(d: Draw, told: Callable[..., None]) -> None:
    queries, (heads, group, width, dtype) = d.choice([1, 1, 2, 5]), d.heads()
    bits, block = d.choice([4, 8]), d.choice([b for b in (1, 4, 8, 16, 20, 32, 64, 128) if width % b == 0])
    counts = [d.choice([0, d.randint(0, 60), d.randint(0, 3000)]) for _ in range(d.randint(1, 4))]
    told(group=group, queries=queries, heads=heads, width=width, bits=bits, block=block, counts=counts, dtype=dtype)
    parts = []
    for _ in "kv":
        parts += kv_token_attention.quantize_tokens(d.normal(len(counts), heads, max(counts) + 3, width, dtype=dtype), bits, block)
    for scale in (parts[1], parts[2], parts[4], parts[5]):
        for b, n in enumerate(counts):
            scale[b, :, n:] = torch.nan
    q = d.normal(len(counts), queries, heads * group, width, dtype=dtype).transpose(1, 2)
    operands = q, *parts, torch.tensor(counts, dtype=torch.int32, device="cuda"), bits, width**-0.5
    y, _ = ops.kv_token_attention(*operands)
    want, _ = reference(kv_token_attention, *wide(operands))
    close(y, want, dtype)


def packed_cache(d: Draw, told: Callable[..., None]) -> None:
    visual = tuple(d.choice([0, d.randint(1, 40), d.randint(1, 3000)]) for _ in range(d.randint(1, 4)))
    text = tuple(9 + d.choice([d.randint(0, 40), d.randint(0, 900)]) for _ in visual)
    (heads, group, _, dtype), width, bits = d.heads(), d.choice([32, 64, 80, 96, 128, 256]), d.choice([1, 2, 4, 8])
    more: dict[str, Any] = {"heads": heads, "group": group, "width": width, "bits": bits, "dtype": dtype}
    more |= {"values": d.choice(["channel", "token"]), "tau": d.choice([(0.0, 0.0), (0.0, 3.0), (2.0, 1.0)])}
    more |= {"queries": d.choice([1, 1, 2, 5]), "room": d.choice([0, 7])}
    told(visual=visual, text=text, **more)
    case = packed_case(visual, text, device="cuda", **more)
    y, _ = ops.kv_attention(*case.values())
    close(y, reference(kv_attention, *wide(case.values()))[0], dtype)


def segments(d: Draw, told: Callable[..., None]) -> None:
    kernel = pytest.importorskip("mmqc.kernels.attention.segment_attention")
    width, heads, dtype, causal = d.choice(HEADS), d.randint(1, 5), d.choice(HALF), d.choice([False, True])
    lengths = [d.choice([d.randint(1, 70), d.randint(1, 1500), d.randint(1, 4500)]) for _ in range(d.randint(1, 6))]
    told(width=width, heads=heads, dtype=dtype, causal=causal, lengths=lengths)
    q, k, v = (d.normal(1, heads, sum(lengths), width, dtype=dtype) for _ in range(3))
    ends = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
    if why := kernel.why_not(q, k, v, ends):
        pytest.skip(why)
    y = kernel.segment_attention(q, k, v, ends, None, causal=causal)
    each = zip(*(t.double().split(lengths, 2) for t in (q, k, v)), strict=True)
    close(y, torch.cat([F.scaled_dot_product_attention(*part, is_causal=causal) for part in each], 2), dtype)


def rows_to_codes(d: Draw, told: Callable[..., None]) -> None:
    m, width, dtype, bits, visual = d.rows(), d.width(9000), d.choice(FLOATS), d.choice([2, 4, 8]), d.choice([False, True])
    told(m=m, width=width, dtype=dtype, bits=bits, visual=visual)
    mask = torch.rand(m, device="cuda") < 0.5 if visual else None
    operands = d.normal(m, width, dtype=dtype), d.positive(2 if visual else 1), mask, bits
    few_differ(ops.quantize(*operands), reference(quantize, *operands), 1e-3)


def normed(d: Draw, told: Callable[..., None]) -> None:
    m, width, dtype, bits, visual = d.rows(), d.width(9000), d.choice(FLOATS), d.choice([4, 8]), d.choice([False, True])
    center, early, residual = (d.choice([False, True]) for _ in range(3))
    told(m=m, width=width, dtype=dtype, bits=bits, visual=visual, center=center, round_first=early, residual=residual)
    x, r = d.normal(m, width, dtype=dtype), d.normal(m, width, dtype=dtype) if residual else None
    mask = torch.rand(m, device="cuda") < 0.5 if visual else None
    gain, bias = d.maybe((1 + 0.2 * d.normal(width)).to(dtype)), d.maybe(d.normal(width, dtype=dtype))
    operands = x, r, gain, bias, 1e-5, center, early, d.positive(2 if visual else 1), mask, bits
    (q, h), (want_q, want_h) = ops.norm_quantize(*operands), reference(norm_quantize, *operands)
    few_differ(q, want_q, 0.03)
    if residual:
        close(h, want_h, dtype)


def normed_per_token(d: Draw, told: Callable[..., None]) -> None:
    m, dtype, widths = d.rows(), d.choice(FLOATS), [d.width(6000) for _ in range(d.randint(1, 3))]
    bits, early, residual = [d.choice([3, 4, 8]) for _ in widths], d.choice([False, True]), d.choice([False, True])
    told(m=m, dtype=dtype, widths=widths, bits=bits, round_first=early, residual=residual)
    x, r = d.normal(m, sum(widths), dtype=dtype), d.normal(m, sum(widths), dtype=dtype) if residual else None
    operands = x, r, d.maybe((1 + 0.2 * d.normal(sum(widths))).to(dtype)), None, 1e-5, early, None, widths, bits
    got, want = ops.norm_quantize_per_token(*operands), reference(norm_quantize_per_token, *operands)
    few_differ(got[0], want[0], 0.03)
    close(got[1], want[1], dtype)


def transformed(d: Draw, told: Callable[..., None]) -> None:
    m, n, dtype = d.rows(), d.choice([d.randint(1, 64), 4 * d.randint(1, 700), d.choice(TRANSFORMED)]), d.choice(FLOATS)
    told(m=m, n=n, dtype=dtype)
    x, factors = d.normal(m, n, dtype=dtype), hadamard_factors(n)
    y = ops.hadamard(x, [f.to("cuda", dtype) for f in factors])
    close(y, reference(hadamard, x.double(), [f.double().cuda() for f in factors]), dtype)


def transformed_to_codes(d: Draw, told: Callable[..., None]) -> None:
    m, n, dtype = d.rows(), d.choice([d.randint(1, 64), 4 * d.randint(1, 700), d.choice(TRANSFORMED)]), d.choice(FLOATS)
    bits, gate, static = d.choice([4, 8]), d.choice([False, True]), d.choice([False, True])
    told(m=m, n=n, dtype=dtype, bits=bits, gate=gate, static=static)
    x, up = d.normal(m, n, dtype=dtype), d.normal(m, n, dtype=dtype) if gate else None
    factors = [f.to("cuda", dtype) for f in hadamard_factors(n)]
    if static:
        operands = x, up, factors, d.positive(1), None, bits
        few_differ(ops.hadamard_quantize(*operands), reference(hadamard_quantize, *operands), MORE_ROUNDED[dtype])
    else:
        h = x.double() if up is None else F.silu(x.double()) * up.double()
        y = reference(hadamard, h, [f.double().cuda() for f in hadamard_factors(n)])
        assert_codes_of(y, *ops.hadamard_quantize_per_token(x, up, factors, bits), dtype)


def in_a_basis(d: Draw, told: Callable[..., None]) -> None:
    m, dtype, widths = d.rows(), d.choice(FLOATS), [8 * d.randint(1, 30), d.choice([8, 16])]
    told(m=m, dtype=dtype, widths=widths)
    basis = torch.linalg.qr(d.normal(sum(widths), sum(widths)))[0].to(dtype)
    operands = (d.normal(m, sum(widths)) + 0.2).to(dtype), basis, widths, [4, 8]
    got, want = ops.basis_quantize_per_token(*operands), reference(basis_quantize_per_token, *operands)
    few_differ(got[0], want[0], MORE_ROUNDED[dtype])
    close(got[1], want[1], dtype)


OPS = (
    weight_only, experts, float4, scaled, group_scaled, mixed, gated, dense_cache, cache_by_rows, cache_by_token, packed_cache,
    segments, rows_to_codes, normed, normed_per_token, transformed, transformed_to_codes, in_a_basis,
)  # fmt: skip


@pytest.mark.parametrize("time", range(TIMES))
@pytest.mark.parametrize("assert_op", OPS, ids=lambda op: op.__name__)
def test_op__equals_its_reference_at_any_size(assert_op: Callable[..., None], time: int) -> None:
    assert_op(Draw(torch.initial_seed()), lambda **sizes: print(assert_op.__name__, sizes))
