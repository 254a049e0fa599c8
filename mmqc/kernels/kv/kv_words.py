"""Tile code: bytes of packed codes (ops/kv_words.py) to 8-bit tensor-core operands, without leaving the registers.

    place t of a byte:  byte & (2^b - 1) << b t       read as int8:  u 2^(b t),  (u - 2^(b-1)) 2^(8-b) for the highest place

One AND unpacks the four codes of a register.  A lane loads 16 bytes at a time, and operand a of mma.m16n8k32 has 4 there, so the
contraction runs over a line's bytes in the order below, the other operand's likewise; and a step's byte rows of keys go to such
rows of the tile that the tokens of the scores come out where the values' operand b wants them, up to one exchange between lanes.

    entry 16 c + 8 k + 4 h + e of every 64  ->  32 k + 16 h + 4 c + e        c: lane, k: instruction, h: register, e: byte
"""

# Triton's values are no Python values to a type checker.
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false
import triton.language as tl

from mmqc.kernels.shared.gluon_tiles import INTERPRETED, ROWS, gl, operand, tile

LOG2E = tl.constexpr(1.4426950408889634)  # scores of attention are in units of log 2
LOWEST = tl.constexpr(-1e30)  # one of nothing
ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds half to even
PTX = tl.constexpr(not INTERPRETED)
LINES = tl.constexpr(ROWS)
A8, B8 = tl.constexpr(operand(0, 4)), tl.constexpr(operand(1, 4))
# p + DIGITS has round(p) + 128 in its lower bytes: a high digit, and a low one with its top bit flipped
DIGITS = tl.constexpr(8388608.0 + 128.0)


@tile
def load_lines(ptr, at, exists, width, C: tl.constexpr, KEEP: tl.constexpr):
    """Lines of 64 C contiguous numbers, of which ``width`` exist, as C tensors [R, 64]; the rest is 0.  KEEP: eviction policy."""
    c = gl.arange(0, 64, layout=gl.SliceLayout(0, LINES))
    here, rows = ptr + at[:, None] + c[None, :], exists[:, None]
    lines = (gl.load(here, mask=rows & (c < width)[None, :], other=0, eviction_policy=KEEP),)
    for i in gl.static_range(1, C):
        more = gl.load(here + 64 * i, mask=rows & (c + 64 * i < width)[None, :], other=0, eviction_policy=KEEP)
        lines = lines + (more,)  # noqa: RUF005
    return lines


@tile
def contraction_order(x, R: tl.constexpr):
    """A line's entries [R, 64] in the order in which they are contracted."""
    return x.reshape([R, 4, 2, 2, 4]).permute([0, 2, 3, 1, 4]).reshape([R, 64])


@tile
def code_planes(x, BITS: tl.constexpr, R: tl.constexpr):
    """Bytes [R, 64] to operand a [P R, 64]: row t R + r is place t of row r."""
    P: tl.constexpr = 8 // BITS
    x = contraction_order(x, R).reshape([1, R, 64])
    t = gl.arange(0, P, layout=gl.SliceLayout(1, gl.SliceLayout(2, x.type.layout)))
    masks = (((1 << BITS) - 1) << (BITS * t)).to(tl.int8)[:, None][:, :, None]
    x, masks = gl.broadcast(x, masks)
    if PTX:
        x = gl.inline_asm_elementwise("and.b32 $0, $1, $2;", "=r,r,r", [x, masks], dtype=tl.int8, is_pure=True, pack=4)
    else:
        x = x & masks
    return gl.convert_layout(x.reshape([P * R, 64]), A8, assert_trivial=True)


@tile
def byte_row(r, BITS: tl.constexpr):
    """Which byte row of keys a step's tile has in row r."""
    if BITS == 1:
        m = r
    elif BITS == 2:
        m = r % 2 + r // 8 * 2 + r // 2 % 4 * 4
    elif BITS == 4:
        m = r // 8 % 2 + r % 2 * 2 + r // 16 * 4 + r // 2 % 4 * 8
    else:
        m = r // 8 % 4 + r % 2 * 4 + r // 32 * 8 + r // 2 % 4 * 16
    return m


@tile
def token_order(x, BITS: tl.constexpr, N: tl.constexpr):
    """Rows t R + r of scores [T, N], of token byte_row(r) P + t, in the order in which values contract tokens, 64 at a time."""
    if BITS == 1:
        x = x.reshape([2, 4, 2, 4, 2, N]).permute([4, 0, 3, 1, 5, 2]).reshape([64, N, 2]).split()
    elif BITS == 2:
        x = (x.reshape([4, 2, 4, 2, N]).permute([1, 3, 2, 0, 4]).reshape([64, N]),)
    elif BITS == 4:
        x = (x.reshape([2, 2, 2, 4, 2, N]).permute([1, 4, 3, 2, 0, 5]).reshape([64, N]),)
    else:
        x = (x.reshape([2, 4, 4, 2, N]).permute([0, 3, 2, 1, 4]).reshape([64, N]),)
    return x


@tile
def place_factor(t, BITS: tl.constexpr):
    """2^(-b t)."""
    return ((127 - BITS * t) << 23).to(tl.float32, bitcast=True)


@tile
def two_digits(x, T: tl.constexpr, GP: tl.constexpr):
    """From p + DIGITS [T, GP] to int8 [T, 2 GP]: columns 2 g and 2 g + 1 are round(p) = 256 high + low."""
    x = x.to(tl.int32, bitcast=True)
    if PTX:
        high, low = gl.inline_asm_elementwise(
            "{ .reg .b32 t, u; prmt.b32 t, $2, $3, 0x5140; prmt.b32 u, $4, $5, 0x5140; prmt.b32 $0, t, u, 0x7632; "
            "prmt.b32 t, t, u, 0x5410; xor.b32 $1, t, 0x80808080; }",
            "=&r,=&r,r,r,r,r", [x], dtype=(tl.int8, tl.int8), is_pure=True, pack=4,
        )
    else:
        high, low = ((x >> 8) & 255).to(tl.int8), ((x & 255) - 128).to(tl.int8)
    return gl.join(high, low).reshape([T, 2 * GP])
