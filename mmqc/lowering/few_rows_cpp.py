"""few_rows.py's formula as a function in C++, for codes of 2, 4 and 8 bits: fewer instructions a byte, and bytes asked for ahead.

    y[m, n] = sum over chunks i of  s[n, g(t, i)]  sum over j of  q[n, t L + i c + j] x[m, t L + i c + j]

Shapes:  as in few_rows.py; x float32 [M, T L], zeros behind K   y float32 [M N]
Why:     a loop nest of Inductor's multiplies every product by its scale and has no prefetch: some 25 instructions for 16 bytes, so
         a core looks 330 bytes ahead (docs/adr/0018-cpp-for-few-rows.md).
Exact:   as few_rows.py, in another order of summation
"""

from __future__ import annotations

import torch

from mmqc.lowering.cpp_function import call_cpp, has_vectors, is_plain, whole
from mmqc.lowering.inductor import TensorBox, parallel_num_threads, static_int
from mmqc.ops.pack import STRETCHES, offset

BITS = (2, 4, 8)
TYPES = (torch.float32, torch.bfloat16, torch.float16)  # of scales
BLOCK = 4  # rows of x that share an unpacked byte
AHEAD = 2048  # bytes

BEFORE = """
#ifndef MMQC_FEW_ROWS
#define MMQC_FEW_ROWS
namespace {
template <int ROWS, typename Sizes, typename Byte, typename Scale>
inline void few_rows(const Byte* w, const Scale* s, const float* x, float* y) {
    using Vec = at::vec::Vectorized<float>;
    using Int = at::vec::Vectorized<int32_t>;
    constexpr int64_t LANES = Vec::size(), LINE = 64, N = Sizes::N, WIDTH = Sizes::WIDTH, LENGTH = Sizes::LENGTH;
    constexpr int64_t CHUNK = Sizes::CHUNK, CHUNKS = Sizes::CHUNKS, GROUP = Sizes::GROUP, BITS = Sizes::BITS;
    constexpr int STRETCHES = Sizes::STRETCHES;
    Vec sums[ROWS];
    for (int r = 0; r < ROWS; r++) sums[r] = Vec(0.0f);
    for (int64_t i = 0; i < CHUNKS; i++) {
        Vec part[STRETCHES][ROWS];
        for (int t = 0; t < STRETCHES; t++)
            for (int r = 0; r < ROWS; r++) part[t][r] = Vec(0.0f);
        for (int64_t line = 0; line < CHUNK; line += LINE) {
#if defined(__GNUC__) || defined(__clang__)
            __builtin_prefetch(w + i * CHUNK + line + Sizes::AHEAD);
#endif
            const int64_t stop = line + LINE < CHUNK ? line + LINE : CHUNK;
            for (int64_t j = line; j < stop; j += LANES) {
                const int64_t at = i * CHUNK + j, count = stop - j < LANES ? stop - j : LANES;
                auto z = at::vec::convert<int32_t>(at::vec::Vectorized<Byte>::loadu(w + at, count));
                for (int t = 0; t < STRETCHES; t++) {
                    auto u = z;
                    if constexpr (STRETCHES > 1) {
                        u = t ? z >> Int(BITS * t) : z;
                        if (t < STRETCHES - 1) u = u & Int((1 << BITS) - 1);
                    }
                    auto q = at::vec::convert<float>(u) - Vec(static_cast<float>(Sizes::OFFSET));
                    for (int r = 0; r < ROWS; r++)
                        part[t][r] = at::vec::fmadd(q, Vec::loadu(x + r * WIDTH + t * LENGTH + at, count), part[t][r]);
                }
            }
        }
        for (int t = 0; t < STRETCHES; t++) {
            const Vec scale(GROUP ? static_cast<float>(s[(t * LENGTH + i * CHUNK) / (GROUP ? GROUP : 1)]) : 1.0f);
            for (int r = 0; r < ROWS; r++) sums[r] = at::vec::fmadd(part[t][r], scale, sums[r]);
        }
    }
    for (int r = 0; r < ROWS; r++)
        y[r * N] = at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return a + b; }, sums[r]);
}
}
#endif
"""

BODY = """
#pragma omp parallel for num_threads(int(Sizes::THREADS)) if (Sizes::THREADS > 1)
for (int64_t n = 0; n < Sizes::N; n++) {
    const auto* row = w + n * Sizes::LENGTH;
    const auto* scales = s + n * Sizes::GROUPS;
    int64_t m = 0;
    for (; m + Sizes::BLOCK <= Sizes::M; m += Sizes::BLOCK)
        few_rows<Sizes::BLOCK, Sizes>(row, scales, x + m * Sizes::WIDTH, y + m * Sizes::N + n);
    for (; m < Sizes::M; m++) few_rows<1, Sizes>(row, scales, x + m * Sizes::WIDTH, y + m * Sizes::N + n);
}
"""


def takes(x: TensorBox, w_q: TensorBox, w_scale: TensorBox, weight_bits: int) -> bool:
    """Whether there is such a function for x (in float32) and this weight: at::vec has to know the CPU's vectors."""
    types = x.get_dtype() == torch.float32 and w_scale.get_dtype() in TYPES
    return types and weight_bits in BITS and has_vectors() and is_plain(w_q) and is_plain(w_scale)


def multiply(x: TensorBox, w_q: TensorBox, w_scale: TensorBox, weight_bits: int, group_size: int, chunk: int) -> TensorBox:
    """[M N], without the scales of channels and the bias; x is padded."""
    (m, width), (n, length) = ([static_int(size) for size in t.get_size()] for t in (x, w_q))
    groups = static_int(w_scale.get_size()[-1]) if group_size else 1
    constants = {
        "M": m,
        "N": n,
        "WIDTH": width,
        "LENGTH": length,
        "CHUNK": chunk,
        "CHUNKS": length // chunk,
        "GROUP": group_size,
        "GROUPS": groups,
        "STRETCHES": STRETCHES[weight_bits],
        "BITS": weight_bits,
        "BLOCK": BLOCK,
        "AHEAD": AHEAD,
        "THREADS": parallel_num_threads(),
        "OFFSET": 0 if weight_bits == 8 else offset(weight_bits),
    }
    sizes = ", ".join(f"{name} = {value}" for name, value in constants.items())
    given = {"w": w_q, "s": w_scale, "x": whole(x)}
    body = f"struct Sizes {{ enum : int64_t {{ {sizes} }}; }};  // a local class has no static members\n{BODY}"
    return call_cpp("few_rows", given, m * n, torch.float32, BEFORE, body)
