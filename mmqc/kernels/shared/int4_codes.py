"""Tile code: packed bytes (ops/pack.py) to tensor-core operands, without leaving the registers.

    low  = (byte & 15) - 8        high = (byte >> 4) - 8          the two halves of a row, so no lane moves

int8 operands   16 q, not q: ``byte ^ 0x88`` makes both nibbles two's complement, and a nibble in the upper half of a byte
                is 16 q as it stands.  Two instructions for four codes; the epilogue multiplies by 1/16, exactly.
                |16 q x| K < 2^31 for K < 131,072.  Where an integer scale multiplies the sum there is no room for the 16: plain
                codes then, at twice the instructions.
fp16 operands   0x6400 | v is 1024 + v: one byte permutation and one AND for two codes, then an exact subtraction
                (1024 + 16 v for the upper nibble, then a fused multiply-add by 1/16).
bf16 operands   0x4300 | v is 128 + v, likewise.
Codes are exact in every operand type.  The arithmetic forms below are the meaning; the PTX forms are the same bits.
Source: the fp16 trick is Kim et al., arXiv:2211.10017; used by Marlin (arXiv:2408.11743).
"""

import triton
import triton.language as tl


@triton.jit
def int4_as_int8(packed, PTX: tl.constexpr):
    """Packed uint8 -> (16 low, 16 high) int8."""
    if PTX:
        low = tl.inline_asm_elementwise(
            "{ .reg .b32 t; shl.b32 t, $1, 4; lop3.b32 $0, t, 0x88888888, 0xF0F0F0F0, 0x28; }",
            "=r,r", [packed], dtype=tl.int8, is_pure=True, pack=4)
        high = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, 0x88888888, 0xF0F0F0F0, 0x28;",
            "=r,r", [packed], dtype=tl.int8, is_pure=True, pack=4)
    else:
        wide = packed.to(tl.int32)
        low = (((wide & 15) - 8) * 16).to(tl.int8)
        high = (((wide >> 4) - 8) * 16).to(tl.int8)
    return low, high


@triton.jit
def int4_as_codes(packed, PTX: tl.constexpr):
    """Packed uint8 -> (low, high) int8: u - 8 in every byte, with a bit above it that takes the borrow."""
    if PTX:
        low = tl.inline_asm_elementwise(
            """{ .reg .b32 t; lop3.b32 t, $1, 0x0F0F0F0F, 0x80808080, 0xEA;
            sub.u32 t, t, 0x08080808; xor.b32 $0, t, 0x80808080; }""",
            "=r,r", [packed], dtype=tl.int8, is_pure=True, pack=4)
        high = tl.inline_asm_elementwise(
            """{ .reg .b32 t; shr.b32 t, $1, 4; lop3.b32 t, t, 0x0F0F0F0F, 0x80808080, 0xEA;
            sub.u32 t, t, 0x08080808; xor.b32 $0, t, 0x80808080; }""",
            "=r,r", [packed], dtype=tl.int8, is_pure=True, pack=4)
    else:
        wide = packed.to(tl.int32)
        low = ((wide & 15) - 8).to(tl.int8)
        high = ((wide >> 4) - 8).to(tl.int8)
    return low, high


@triton.jit
def int4_as_fp8(packed):
    """Packed uint8 -> (low, high) float8e4nv times 2^-9: the magnitude 0..8 is a subnormal's mantissa, the sign its bit."""
    low = tl.inline_asm_elementwise(
        """{ .reg .b32 v, s, m;
        and.b32 v, $1, 0x0F0F0F0F; not.b32 s, v; shr.b32 s, s, 3; and.b32 s, s, 0x01010101;
        shl.b32 m, s, 3; sub.u32 m, m, s; and.b32 v, v, 0x07070707; xor.b32 v, v, m; add.u32 v, v, s;
        shl.b32 s, s, 7; or.b32 $0, v, s; }""",
        "=r,r", [packed], dtype=tl.int8, is_pure=True, pack=4)
    high = tl.inline_asm_elementwise(
        """{ .reg .b32 v, s, m;
        shr.b32 v, $1, 4; and.b32 v, v, 0x0F0F0F0F; not.b32 s, v; shr.b32 s, s, 3; and.b32 s, s, 0x01010101;
        shl.b32 m, s, 3; sub.u32 m, m, s; and.b32 v, v, 0x07070707; xor.b32 v, v, m; add.u32 v, v, s;
        shl.b32 s, s, 7; or.b32 $0, v, s; }""",
        "=r,r", [packed], dtype=tl.int8, is_pure=True, pack=4)
    return low.to(tl.float8e4nv, bitcast=True), high.to(tl.float8e4nv, bitcast=True)


@triton.jit
def int4_as_float(packed, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """Packed uint8 -> (low, high) codes in -8 … 7 as fp16 or bf16 (as fp32 without PTX)."""
    if PTX and tl.float16 == DTYPE:
        # halves 1024 + v (1152 - 1024 - 8 would be for bytes): subtract 1032 = 0x6408
        low = tl.inline_asm_elementwise(
            """{ .reg .b32 a, b, o; mov.b32 o, 0x64086408;
            prmt.b32 a, $2, 0x64646464, 0x4140; prmt.b32 b, $2, 0x64646464, 0x4342;
            and.b32 a, a, 0xFF0FFF0F; and.b32 b, b, 0xFF0FFF0F;
            sub.f16x2 $0, a, o; sub.f16x2 $1, b, o; }""",
            "=r,=r,r", [packed], dtype=tl.float16, is_pure=True, pack=4)
        # halves 1024 + 16 v: times 1/16 (0x2C00) minus 72 (0xD480)
        high = tl.inline_asm_elementwise(
            """{ .reg .b32 a, b, m, o; mov.b32 m, 0x2C002C00; mov.b32 o, 0xD480D480;
            prmt.b32 a, $2, 0x64646464, 0x4140; prmt.b32 b, $2, 0x64646464, 0x4342;
            and.b32 a, a, 0xFFF0FFF0; and.b32 b, b, 0xFFF0FFF0;
            fma.rn.f16x2 $0, a, m, o; fma.rn.f16x2 $1, b, m, o; }""",
            "=r,=r,r", [packed], dtype=tl.float16, is_pure=True, pack=4)
    elif PTX and tl.bfloat16 == DTYPE:
        # halves 128 + v: times 1 (0x3F80) minus 136 (0xC308); sub.bf16x2 would need sm_90
        low = tl.inline_asm_elementwise(
            """{ .reg .b32 t, a, b, m, o; mov.b32 m, 0x3F803F80; mov.b32 o, 0xC308C308;
            and.b32 t, $2, 0x0F0F0F0F;
            prmt.b32 a, t, 0x43434343, 0x4140; prmt.b32 b, t, 0x43434343, 0x4342;
            fma.rn.bf16x2 $0, a, m, o; fma.rn.bf16x2 $1, b, m, o; }""",
            "=r,=r,r", [packed], dtype=tl.bfloat16, is_pure=True, pack=4)
        high = tl.inline_asm_elementwise(
            """{ .reg .b32 t, a, b, m, o; mov.b32 m, 0x3F803F80; mov.b32 o, 0xC308C308;
            shr.b32 t, $2, 4; and.b32 t, t, 0x0F0F0F0F;
            prmt.b32 a, t, 0x43434343, 0x4140; prmt.b32 b, t, 0x43434343, 0x4342;
            fma.rn.bf16x2 $0, a, m, o; fma.rn.bf16x2 $1, b, m, o; }""",
            "=r,=r,r", [packed], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        wide = packed.to(tl.int32)
        low = ((wide & 15) - 8).to(tl.float32).to(DTYPE)
        high = ((wide >> 4) - 8).to(tl.float32).to(DTYPE)
    return low, high


@triton.jit
def small_code_as_float(packed, third, k, half, t: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr):
    """Stretch t of packed uint8 with 2 bits, or with 3 whose top bits are in ``third``, at columns k -> codes in DTYPE."""
    code = (packed.to(tl.int32) >> (2 * t)) & 3
    if BITS == 3:
        place = 2 * t + (k >= half).to(tl.int32)
        code += ((third.to(tl.int32) >> place[None, :]) & 1) * 4
    return (code - (2 if BITS == 2 else 4)).to(tl.float32).to(DTYPE)


@triton.jit
def int8_as_float(codes, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """Codes in int8 -> the same numbers as fp16 or bf16 (|code| <= 128 is exact in both)."""
    if PTX and tl.float16 == DTYPE:
        # halves 1024 + (code + 128), minus 1152 = 0x6480
        wide = tl.inline_asm_elementwise(
            """{ .reg .b32 t, a, b, o; mov.b32 o, 0x64806480; xor.b32 t, $2, 0x80808080;
            prmt.b32 a, t, 0x64646464, 0x4140; prmt.b32 b, t, 0x64646464, 0x4342;
            sub.f16x2 $0, a, o; sub.f16x2 $1, b, o; }""",
            "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4)
    elif PTX and tl.bfloat16 == DTYPE:
        # 0x4300 | the lower seven bits is 128 + them; 0x4300 | the sign is 128, or 256 for what is less than 0: their difference
        wide = tl.inline_asm_elementwise(
            """{ .reg .b32 a, b, i, j, m; mov.b32 m, 0x3F803F80;
            prmt.b32 a, $2, 0x43434343, 0x4140; prmt.b32 b, $2, 0x43434343, 0x4342;
            lop3.b32 i, a, 0xFF80FF80, 0x80008000, 0xEA; lop3.b32 j, b, 0xFF80FF80, 0x80008000, 0xEA;
            and.b32 a, a, 0xFF7FFF7F; and.b32 b, b, 0xFF7FFF7F;
            fma.rn.bf16x2 $0, a, m, i; fma.rn.bf16x2 $1, b, m, j; }""",
            "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        wide = codes.to(tl.float32).to(DTYPE)
    return wide


@triton.jit
def int8_as_64ths(codes):
    """Codes in int8 -> code / 64 as bf16, exactly: five instructions for four of them, where ``int8_as_float`` has eight.

    0x0000 | (code + 128) is (code + 128) 2^-133, a subnormal number below 128 and the first normal ones from there on, evenly
    spaced; times 2^127 (0x7F00), less 2 (0xC000).
    """
    return tl.inline_asm_elementwise(
        """{ .reg .b32 t, a, b, m, o; mov.b32 m, 0x7F007F00; mov.b32 o, 0xC000C000; xor.b32 t, $2, 0x80808080;
        prmt.b32 a, t, 0, 0x4140; prmt.b32 b, t, 0, 0x4342;
        fma.rn.bf16x2 $0, a, m, o; fma.rn.bf16x2 $1, b, m, o; }""",
        "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)
