"""Tile code: words of packed tokens (ops/kv_words.py) to tensor-core operands, without leaving the registers.

    plane t of a word:  (word >> 8 (t // (8/b))) & (2^b - 1) << b j,   j = t % (8/b)      read as float16:  u 2^(b j - 24)

The bits stay where they are and are a float16's low mantissa bits, so a code is exact, subnormal, and costs half an AND: one
32-bit instruction for the two neighbours in a register, and one shift for each half of the words.  The factor 2^(24 - b j) is the
same for all tokens of a plane and goes to what is multiplied with it.
The arithmetic form below is the meaning; the PTX form is the same bits.
"""

import triton
import triton.language as tl


@triton.jit
def upper_half(words, PTX: tl.constexpr):
    """The upper byte of every word where the lower one was; the rest is undefined."""
    if PTX:
        upper = tl.inline_asm_elementwise("shr.b32 $0, $1, 8;", "=r,r", [words], dtype=tl.int16, is_pure=True, pack=2)
    else:
        upper = words >> 8
    return upper


@triton.jit
def plane_tile(words, MASK: tl.constexpr, PTX: tl.constexpr):
    """``words & MASK`` as float16; MASK lies in the lower byte."""
    if PTX:
        mask = tl.full(words.shape, MASK, tl.int16)
        plane = tl.inline_asm_elementwise(
            "and.b32 $0, $1, $2;", "=r,r,r", [words, mask], dtype=tl.float16, is_pure=True, pack=2
        )  # fmt: skip
    else:
        plane = (words & MASK).to(tl.int16).to(tl.float16, bitcast=True)
    return plane
