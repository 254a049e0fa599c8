"""Tile code of the Hadamard kernels: what stands in front of the transform, and what is written.

    h = x,  or  silu(x) ∘ u           y = k acc         q = clamp(round(k acc))

acc is the unscaled sum and k its factor: the transform's own for y, that over the activation scale for codes.  Codes take one
multiply-add, which rounds once; the quotient of ops/quantize.py rounds twice.  The sums differ by as much with their order.
"""

import triton
import triton.language as tl

FLOAT = tl.constexpr(0)
STATIC = tl.constexpr(1)
DYNAMIC = tl.constexpr(2)


@triton.jit
def silu_tile(gate, PTX: tl.constexpr):
    """Gate / (1 + exp(-gate)) in float32; with PTX by the two approximate functions, good to 2^-21."""
    if PTX:
        y = tl.inline_asm_elementwise(
            """{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t;
            add.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 t, t; mul.f32 $0, $1, t; }""",
            "=f,f", [gate], dtype=tl.float32, is_pure=True, pack=1)  # fmt: skip
    else:
        y = gate / (1.0 + tl.exp(-gate))
    return y


@triton.jit
def input_tile(x_ptr, up_ptr, at_x, at_up, mask, GATED: tl.constexpr, PTX: tl.constexpr):
    """h, in x's dtype."""
    h = tl.load(x_ptr + at_x, mask=mask, other=0.0)
    if GATED:
        # As in the unfused model, silu is rounded before it is multiplied.
        silu = silu_tile(h.to(tl.float32), PTX).to(h.dtype).to(tl.float32)
        h = (silu * tl.load(up_ptr + at_up, mask=mask, other=0.0).to(tl.float32)).to(h.dtype)
    return h


@triton.jit
def store_tile(acc, k, y_ptr, at, mask, MODE: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, FP8: tl.constexpr):
    """Write k acc, or its codes; k is broadcastable to acc."""
    if MODE == FLOAT:
        tl.store(y_ptr + at, (acc * k).to(y_ptr.dtype.element_ty), mask=mask)
    elif FP8:
        tl.store(y_ptr + at, tl.minimum(tl.maximum(acc * k, -448.0), 448.0).to(tl.float8e4nv), mask=mask)
    else:
        # Next to 1.5 * 2^23 floats are integers: the sum rounds half to even and has the code in its low byte.
        near = tl.fma(acc, k + tl.zeros_like(acc), tl.full(acc.shape, 12582912.0, tl.float32))
        near = tl.minimum(tl.maximum(near, 12582912.0 + LOW), 12582912.0 + HIGH)
        tl.store(y_ptr + at, near.to(tl.int32, bitcast=True).to(tl.int8), mask=mask)
