"""Tile code: float32 values to int8 or fp8 codes, as ops/quantize.py rounds them.

q = clamp(round_half_even(x / s), low, high)      int8
q = fp8e4nv(clamp(x / s, ±448))                   fp8
"""

import triton
import triton.language as tl

NEAR = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds half to even, next to it floats are integers


@triton.jit
def divide_tile(x, s):
    """X / s rounded as IEEE division: one reciprocal for many x, one step of correction (Markstein)."""
    inverse = tl.div_rn(1.0, s)
    q = x * inverse
    s, inverse = tl.broadcast_to(s, q.shape), tl.broadcast_to(inverse, q.shape)  # fma takes equal shapes
    return tl.fma(tl.fma(-q, s, x), inverse, q)


@triton.jit
def round_tile(y, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """Float32 values rounded to DTYPE; bf16 two at a time, which the conversion of one is eight times slower than."""
    if PTX and tl.bfloat16 == DTYPE and y.numel > 1:
        y = tl.inline_asm_elementwise(
            "{ .reg .b32 t; cvt.rn.bf16x2.f32 t, $3, $2; shl.b32 $0, t, 16; and.b32 $1, t, 0xFFFF0000; }",
            "=f,=f,f,f", [y], dtype=tl.float32, is_pure=True, pack=2)
    else:
        y = y.to(DTYPE).to(tl.float32)
    return y


# Codes + NEAR have the code in their low byte, which is cheaper than a conversion.  An integer operation has to stand between the
# sum and its byte: one that is stored straight from the register of a float is converted by ptxas 12.8 and saturates (F2IP), where
# the address lets Triton 3.6 store no more than a byte at a time.


@triton.jit
def clamped_byte(near, LOW: tl.constexpr, HIGH: tl.constexpr):
    """Near - NEAR, cut off at LOW and HIGH, as int8: bits of floats are in the order of the floats, and the sign is the sign."""
    bits = near.to(tl.int32, bitcast=True)
    low, high = tl.cast(NEAR + LOW, tl.int32, bitcast=True), tl.cast(NEAR + HIGH, tl.int32, bitcast=True)
    return tl.minimum(tl.maximum(bits, low), high).to(tl.int8)


@triton.jit
def byte_of(u, first):
    """Round(u) + first as int8, where that is a byte; first is a number, or numbers of float32."""
    return ((u + (NEAR + 2.0 + first)).to(tl.int32, bitcast=True) - 2).to(tl.int8)


@triton.jit
def quantize_tile(x, s, LOW: tl.constexpr, HIGH: tl.constexpr, FP8: tl.constexpr):
    """Codes of float32 values x with scales s, broadcastable to x."""
    q = divide_tile(x, s)
    if FP8:
        codes = tl.minimum(tl.maximum(q, -448.0), 448.0).to(tl.float8e4nv)
    else:
        codes = clamped_byte(q + NEAR, LOW, HIGH)
    return codes
