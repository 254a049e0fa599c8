"""few_rows.py's formula as a function in C++, for codes of 2, 4 and 8 bits: fewer instructions a byte, and bytes asked for ahead.

    y[m, n] = sum over chunks i of  s[n, g(t, i)]  sum over j of  q[n, t L + i c + j] x[m, t L + i c + j]

Shapes:  as in few_rows.py; x float32 [M, T L], zeros behind K   y float32 [M N]
Why:     a loop nest of Inductor's multiplies every product by its scale and has no prefetch: some 25 instructions for 16 bytes, so
         a core looks 330 bytes ahead (docs/adr/0018-cpp-for-few-rows.md).
Exact:   as few_rows.py, in another order of summation
"""

from __future__ import annotations

import torch

from mmqc.lowering.cpp_function import call_cpp, cpp_threads, has_vectors, is_plain, whole
from mmqc.lowering.inductor import TensorBox, static_int
from mmqc.ops.pack import STRETCHES, offset

BITS = (2, 4, 8)
TYPES = (torch.float32, torch.bfloat16, torch.float16)  # of scales
BLOCK = 4  # rows of x that share an unpacked byte
AHEAD = 2048  # bytes

BODY = """
constexpr int64_t LINE = 64;
auto few_rows = [&](auto count, const auto* w, const auto* s, const float* x, float* y) {
    using Vec = at::vec::Vectorized<float>;
    using Byte = std::decay_t<decltype(*w)>;
    constexpr int ROWS = decltype(count)::value;
    constexpr int64_t LANES = Vec::size();
    Vec sums[ROWS];
    for (int r = 0; r < ROWS; r++) sums[r] = Vec(0.0f);
    for (int64_t i = 0; i < CHUNKS; i++) {
        Vec part[STRETCHES][ROWS];
        for (int t = 0; t < STRETCHES; t++)
            for (int r = 0; r < ROWS; r++) part[t][r] = Vec(0.0f);
        for (int64_t line = 0; line < CHUNK; line += LINE) {
#if defined(__GNUC__) || defined(__clang__)
            __builtin_prefetch(w + i * CHUNK + line + AHEAD);
#endif
            const int64_t stop = line + LINE < CHUNK ? line + LINE : CHUNK;
            for (int64_t j = line; j < stop; j += LANES) {
                const int64_t at = i * CHUNK + j, lanes = stop - j < LANES ? stop - j : LANES;
                auto z = at::vec::convert<int32_t>(at::vec::Vectorized<Byte>::loadu(w + at, lanes));
                for (int t = 0; t < STRETCHES; t++) {
                    auto u = z;
                    if (t > 0) u = z >> at::vec::Vectorized<int32_t>(BITS * t);
                    if (t < STRETCHES - 1) u = u & at::vec::Vectorized<int32_t>((1 << BITS) - 1);
                    auto q = at::vec::convert<float>(u) - Vec(OFFSET);
                    for (int r = 0; r < ROWS; r++)
                        part[t][r] = at::vec::fmadd(q, Vec::loadu(x + r * WIDTH + t * LENGTH + at, lanes), part[t][r]);
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
};
#pragma omp parallel for num_threads(THREADS) if (THREADS > 1)
for (int64_t n = 0; n < N; n++) {
    const auto* row = w + n * LENGTH;
    const auto* scales = s + n * GROUPS;
    int64_t m = 0;
    for (; m + BLOCK <= M; m += BLOCK)
        few_rows(std::integral_constant<int, BLOCK>(), row, scales, x + m * WIDTH, y + m * N + n);
    for (; m < M; m++) few_rows(std::integral_constant<int, 1>(), row, scales, x + m * WIDTH, y + m * N + n);
}
"""


def takes(x: TensorBox, w_q: TensorBox, w_scale: TensorBox, weight_bits: int) -> bool:
    """Whether there is such a function for x (in float32) and this weight: at::vec has to know the CPU's vectors."""
    types = x.get_dtype() == torch.float32 and w_scale.get_dtype() in TYPES
    return types and weight_bits in BITS and has_vectors() and is_plain(w_q) and is_plain(w_scale)


def multiply(
    x: TensorBox, w_q: TensorBox, w_scale: TensorBox, weight_bits: int, group_size: int, chunk: int
) -> TensorBox:
    """[M N], without the scales of channels and the bias; x is padded."""
    (m, width), (n, length) = ([static_int(size) for size in t.get_size()] for t in (x, w_q))
    groups = static_int(w_scale.get_size()[-1]) if group_size else 1
    constants = {
        "M": m, "N": n, "WIDTH": width, "LENGTH": length, "CHUNK": chunk, "CHUNKS": length // chunk, "GROUP": group_size,
        "GROUPS": groups, "STRETCHES": STRETCHES[weight_bits], "BITS": weight_bits, "BLOCK": BLOCK, "AHEAD": AHEAD,
        "THREADS": cpp_threads(),
    }  # fmt: skip
    said = [f"constexpr int64_t {name} = {value};" for name, value in constants.items()]
    said.append(f"constexpr float OFFSET = {0 if weight_bits == 8 else offset(weight_bits)};")
    given = {"w": w_q, "s": w_scale, "x": whole(x)}
    return call_cpp("few_rows", given, m * n, torch.float32, "\n".join((*said, BODY)))
