"""Tile code: the activations of ops/scaled_matmul_epilogue.py in float32, by two functions of the special units at most.

    silu         x σ(x)                        relu    max(x, 0)
    quick_gelu   x σ(1.702 x)                  gelu    x Φ(x) = max(x, 0) - |x| Q(|x|)
    gelu_tanh    x σ(2 √(2/π) (x + 0.044715 x³)), which is x (1 + tanh(…)) / 2

σ(u) = 1 / (1 + exp(-u)).  Q(z) = erfc(z/√2) / 2 by Abramowitz and Stegun 7.1.26: |error| <= 0.75e-7, next to half a step of the
float32 numbers in front of 1 (0.3e-7), so gelu is off by at most |x| times that.  Two special functions and a dozen multiply-adds;
libdevice's erf and tanh evaluate two polynomials each and choose.
``input_tile`` is what the transforms read: x, or silu(x) ∘ u.
"""

import triton
import triton.language as tl

NONE = tl.constexpr(0)
RELU = tl.constexpr(1)
SILU = tl.constexpr(2)
QUICK_GELU = tl.constexpr(3)
GELU = tl.constexpr(4)
GELU_TANH = tl.constexpr(5)
CODES = {"none": 0, "relu": 1, "silu": 2, "quick_gelu": 3, "gelu": 4, "gelu_tanh": 5}


@triton.jit
def exp2_tile(x, PTX: tl.constexpr):
    """2^x; with PTX good to 2^-22, denormals are zero."""
    if PTX:
        y = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        y = tl.exp2(x)
    return y


@triton.jit
def inverse_tile(x, PTX: tl.constexpr):
    """1 / x; with PTX good to 2^-23."""
    if PTX:
        y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        y = 1.0 / x
    return y


@triton.jit
def silu_tile(gate, PTX: tl.constexpr):
    """Gate / (1 + exp(-gate)) in float32; with PTX by the two approximate functions, good to 2^-21."""
    if PTX:
        y = tl.inline_asm_elementwise(
            """{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t;
            add.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 t, t; mul.f32 $0, $1, t; }""",
            "=f,f", [gate], dtype=tl.float32, is_pure=True, pack=1)
    else:
        y = gate / (1.0 + tl.exp(-gate))
    return y


@triton.jit
def gelu_tile(x, PTX: tl.constexpr):
    """The exact form."""
    z = tl.abs(x)
    t = inverse_tile(1.0 + 0.23164189 * z, PTX)  # p / √2
    # The five coefficients, halved.
    q = ((((0.53070271 * t - 0.72657601) * t + 0.71070687) * t - 0.14224837) * t + 0.12741480) * t
    q = q * exp2_tile(x * x * -0.72134752, PTX)  # log2(e) / 2
    return tl.maximum(x, 0.0) - z * q


@triton.jit
def activation_tile(x, ACTIVATION: tl.constexpr, PTX: tl.constexpr):
    """f(x) of a float32 tile."""
    if ACTIVATION == RELU:
        x = tl.maximum(x, 0.0)
    elif ACTIVATION == SILU:
        x = silu_tile(x, PTX)
    elif ACTIVATION == QUICK_GELU:
        x = x * inverse_tile(1.0 + exp2_tile(x * -2.4554670, PTX), PTX)  # 1.702 log2(e)
    elif ACTIVATION == GELU:
        x = gelu_tile(x, PTX)
    elif ACTIVATION == GELU_TANH:
        u = x * (x * x * -0.10294324 - 2.3022082)  # 2 √(2/π) log2(e)
        x = x * inverse_tile(1.0 + exp2_tile(u, PTX), PTX)
    return x


@triton.jit
def input_tile(x_ptr, up_ptr, at_x, at_up, mask, GATED: tl.constexpr, PTX: tl.constexpr):
    """h, in x's dtype."""
    h = tl.load(x_ptr + at_x, mask=mask, other=0.0)
    if GATED:
        # As in the unfused model, silu is rounded before it is multiplied.
        silu = silu_tile(h.to(tl.float32), PTX).to(h.dtype).to(tl.float32)
        h = (silu * tl.load(up_ptr + at_up, mask=mask, other=0.0).to(tl.float32)).to(h.dtype)
    return h
