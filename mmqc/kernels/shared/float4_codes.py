"""Tile code: bytes of e2m1 codes and of their scales (ops/float4.py) to floats, without leaving the registers.

    e2m1 in fp16    its three bits without the sign are the last two of the exponent and the first of the mantissa, and the number
                    so written is 2^14 times too small: exact, and so are the subnormal 1/2
    e2m1 in bf16    likewise, 2^126 times too small
    e8m0            the exponent of a float32 as it stands; its code 0 is the subnormal 2^-127
    e4m3            the bits of an fp16 without its last seven, 2^8 times too small

The arithmetic forms are the meaning; the PTX forms are the same bits.  A table of 16 numbers in memory would cost a load each.
"""

import triton
import triton.language as tl


@triton.jit
def float4_number_tile(bits, DTYPE: tl.constexpr):
    """Four bits in int32 -> the e2m1 number in DTYPE."""
    size = bits & 7
    halves = tl.where(size < 2, size, (2 + (size & 1)) << tl.maximum((size >> 1) - 1, 0))
    return (tl.where(bits < 8, halves, -halves).to(tl.float32) * 0.5).to(DTYPE)


@triton.jit
def float4_as_float(packed, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """Packed uint8 -> (low, high) e2m1 numbers as fp16 or bf16 (as fp32 without PTX)."""
    if PTX and tl.float16 == DTYPE:
        # halves seeeemmmmmmmmmm: bits 0-2 to 9-11 and 3 to 15, of the upper nibble 4-6 and 7; times 2^14 = 0x7400
        low = tl.inline_asm_elementwise(
            """{ .reg .b32 a, b, c, d, m; mov.b32 m, 0x74007400;
            prmt.b32 a, $2, 0, 0x4140; prmt.b32 b, $2, 0, 0x4342;
            shl.b32 c, a, 9; shl.b32 d, a, 12; and.b32 c, c, 0x0E000E00; lop3.b32 a, d, 0x80008000, c, 0xEA;
            shl.b32 c, b, 9; shl.b32 d, b, 12; and.b32 c, c, 0x0E000E00; lop3.b32 b, d, 0x80008000, c, 0xEA;
            mul.f16x2 $0, a, m; mul.f16x2 $1, b, m; }""",
            "=r,=r,r", [packed], dtype=tl.float16, is_pure=True, pack=4)
        high = tl.inline_asm_elementwise(
            """{ .reg .b32 a, b, c, d, m; mov.b32 m, 0x74007400;
            prmt.b32 a, $2, 0, 0x4140; prmt.b32 b, $2, 0, 0x4342;
            shl.b32 c, a, 5; shl.b32 d, a, 8; and.b32 c, c, 0x0E000E00; lop3.b32 a, d, 0x80008000, c, 0xEA;
            shl.b32 c, b, 5; shl.b32 d, b, 8; and.b32 c, c, 0x0E000E00; lop3.b32 b, d, 0x80008000, c, 0xEA;
            mul.f16x2 $0, a, m; mul.f16x2 $1, b, m; }""",
            "=r,=r,r", [packed], dtype=tl.float16, is_pure=True, pack=4)
    elif PTX and tl.bfloat16 == DTYPE:
        # halves seeeeeeeemmmmmmm: bits 0-2 to 6-8 and 3 to 15, of the upper nibble 4-6 and 7; times 2^126 = 0x7E80, plus -0
        # (0x8000, which leaves every sum as it is; mul.bf16x2 would need sm_90)
        low = tl.inline_asm_elementwise(
            """{ .reg .b32 a, b, c, d, m, o; mov.b32 m, 0x7E807E80; mov.b32 o, 0x80008000;
            prmt.b32 a, $2, 0, 0x4140; prmt.b32 b, $2, 0, 0x4342;
            shl.b32 c, a, 6; shl.b32 d, a, 12; and.b32 c, c, 0x01C001C0; lop3.b32 a, d, 0x80008000, c, 0xEA;
            shl.b32 c, b, 6; shl.b32 d, b, 12; and.b32 c, c, 0x01C001C0; lop3.b32 b, d, 0x80008000, c, 0xEA;
            fma.rn.bf16x2 $0, a, m, o; fma.rn.bf16x2 $1, b, m, o; }""",
            "=r,=r,r", [packed], dtype=tl.bfloat16, is_pure=True, pack=4)
        high = tl.inline_asm_elementwise(
            """{ .reg .b32 a, b, c, d, m, o; mov.b32 m, 0x7E807E80; mov.b32 o, 0x80008000;
            prmt.b32 a, $2, 0, 0x4140; prmt.b32 b, $2, 0, 0x4342;
            shl.b32 c, a, 2; shl.b32 d, a, 8; and.b32 c, c, 0x01C001C0; lop3.b32 a, d, 0x80008000, c, 0xEA;
            shl.b32 c, b, 2; shl.b32 d, b, 8; and.b32 c, c, 0x01C001C0; lop3.b32 b, d, 0x80008000, c, 0xEA;
            fma.rn.bf16x2 $0, a, m, o; fma.rn.bf16x2 $1, b, m, o; }""",
            "=r,=r,r", [packed], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        wide = packed.to(tl.int32)
        low = float4_number_tile(wide & 15, DTYPE)
        high = float4_number_tile(wide >> 4, DTYPE)
    return low, high


@triton.jit
def scale_tile(stored, E8M0: tl.constexpr):
    """The bytes of scales, uint8 -> float32."""
    if E8M0:
        scale = tl.maximum(stored.to(tl.int32) << 23, 0x00400000).to(tl.float32, bitcast=True)
    else:
        scale = (stored.to(tl.int16) << 7).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return scale
