"""Every kernel once, on a small odd shape, next to its plain-torch reference: tests/support/run_sanitizer.py runs it under a tool.

    python tests/gpu_tests/sanitize.py [--planted memcheck | racecheck]      on a CUDA device
    TRITON_INTERPRET=1 python tests/gpu_tests/sanitize.py --dry              on the CPU

``@ start NAME`` goes out before a kernel is launched, ``@ right NAME`` or ``@ wrong NAME: why`` when it has run and was compared:
what a tool prints in between has a name.  Operands are made and results compared on the CPU, so that a tool has little else
to watch.  Tiles are like those of mmqc/kernels/matmul/configs.py, so that the same instructions run (64 rows and 4 warps: wgmma).
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/support")]

from row_scales import KINDS, row_scales  # noqa: E402
from sanitize_tokens import (  # noqa: E402
    Place,
    assert_codes,
    clips,
    fused,
    integers,
    mixed,
    poison,
    rounded_keys,
    rounded_text,
    rows_of_bytes,
    sweep,
    there,
)
from tolerance import assert_close  # noqa: E402

from mmqc.kernels.hadamard import hadamard_quantize, hadamard_wgmma  # noqa: E402
from mmqc.kernels.hadamard.hadamard_plan import hadamard_plan  # noqa: E402
from mmqc.kernels.hadamard.hadamard_tiles import Written  # noqa: E402
from mmqc.kernels.matmul.configs import MatmulConfig as Tile  # noqa: E402
from mmqc.kernels.matmul.epilogue_tiles import Epilogue  # noqa: E402
from mmqc.kernels.matmul.float4_matmul import float4_matmul  # noqa: E402
from mmqc.kernels.matmul.scaled_matmul import Linear, scaled_matmul  # noqa: E402
from mmqc.kernels.matmul.scaled_matmul_epilogue import scaled_matmul_epilogue  # noqa: E402
from mmqc.kernels.matmul.unpack_weight import unpack_weight  # noqa: E402
from mmqc.kernels.matmul.weight_only_matmul import weight_only_matmul  # noqa: E402
from mmqc.kernels.rows import norm_quantize, quantize  # noqa: E402
from mmqc.kernels.shared.device_facts import (  # noqa: E402
    fp8_reason,
    gpu_name,
    has_inline_ptx,
    has_tensor_descriptors,
    has_warpgroup_products,
    multiprocessors,
)
from mmqc.kernels.shared.row_scale import row_scale  # noqa: E402
from mmqc.nn.norm import RMSNorm  # noqa: E402
from mmqc.ops import float4_matmul as float4_op  # noqa: E402
from mmqc.ops import hadamard  # noqa: E402
from mmqc.ops import quantize_per_token as per_token_op  # noqa: E402
from mmqc.ops import scaled_matmul_epilogue as epilogue_op  # noqa: E402
from mmqc.ops.pack import pack_int4  # noqa: E402
from mmqc.specs import BLOCKS  # noqa: E402

FP8 = torch.float8_e4m3fn
MANY = 0  # in a shape: as many columns as give every program of a persistent grid a second tile

SCALED = {  # name: (codes of x and w, (M, N, K), tile)
    "scaled_matmul int8 rows": ("int8", (70, 101, 256), Tile(64, 64, 64, 4, 3, group_m=2)),
    "scaled_matmul int8 rows, odd K": ("int8", (70, 101, 203), Tile(64, 64, 32, 4, 3, group_m=2)),
    "scaled_matmul int8 columns": ("int8", (17, 101, 256), Tile(16, 64, 64, 2, 4, group_m=2, variant="columns")),
    "scaled_matmul int8 columns, wgmma": ("int8", (70, 101, 256), Tile(64, 128, 64, 4, 3, variant="columns")),
    "scaled_matmul int8 split K": ("int8", (5, 101, 768), Tile(8, 64, 64, 4, 4, split_k=3, variant="columns")),
    "scaled_matmul int8 split K, rows": ("int8", (70, 101, 515), Tile(64, 64, 64, 4, 3, split_k=3)),
    "scaled_matmul int8 nested": ("int8", (130, MANY, 208), Tile(64, 64, 64, 4, 3, variant="nested")),
    "scaled_matmul int8 tail": ("int8", (130, MANY, 208), Tile(64, 64, 64, 4, 3, variant="nested", tail=32)),
    "scaled_matmul int8 descriptors": ("int8", (130, MANY, 208), Tile(64, 64, 64, 4, 3, variant="descriptors")),
    "scaled_matmul fp8 rows": ("fp8", (70, 101, 256), Tile(64, 64, 64, 4, 3)),
    "scaled_matmul fp8 split K": ("fp8", (5, 101, 768), Tile(8, 64, 64, 4, 4, split_k=3, variant="columns")),
    "scaled_matmul fp8 descriptors": ("fp8", (130, MANY, 208), Tile(64, 64, 64, 4, 3, variant="descriptors")),
    "scaled_matmul int4 columns": ("int4", (70, 101, 256), Tile(64, 128, 64, 4, 4, variant="columns")),
    "scaled_matmul int4 columns, odd K": ("int4", (17, 101, 203), Tile(16, 64, 32, 4, 3, variant="columns")),
    "scaled_matmul int4 rows": ("int4", (70, 101, 256), Tile(64, 64, 64, 4, 3)),
    "scaled_matmul int4 split K": ("int4", (5, 101, 1536), Tile(8, 64, 128, 4, 4, split_k=3, variant="columns")),
    "scaled_matmul int4 unpack": ("int4", (130, 101, 208), Tile(64, 64, 64, 4, 3, variant="unpack")),
    "scaled_matmul int4 x fp8": ("int4 fp8", (17, 101, 512), Tile(16, 64, 64, 4, 3, variant="columns")),
}
PINGPONG = {  # as SCALED
    "scaled_matmul int8 pingpong": ("int8", (130, 6008, 208), Tile(64, 128, 128, 4, 4, variant="pingpong")),
    "scaled_matmul int8 pingpong, cut": ("int8", (130, 264, 3600), Tile(64, 128, 128, 4, 8, split_k=4, variant="pingpong")),
    "scaled_matmul fp8 pingpong, one": ("fp8", (130, 264, 208), Tile(128, 256, 128, 8, 3, variant="pingpong")),
}
REGISTERS = {  # as SCALED
    "scaled_matmul int4 in registers": ("int4", (130, 264, 224), Tile(64, 128, 64, 4, 4, per_sm=2, variant="registers")),
    "scaled_matmul int4 in registers, cut": (
        "int4",
        (130, 264, 3616),
        Tile(128, 128, 64, 4, 4, split_k=4, per_sm=2, variant="registers"),
    ),
}
WEIGHT_ONLY = {  # name: (bits, group, zero points, (M, N, K), tile)
    "weight_only_matmul int4": (4, 64, False, (17, 101, 256), Tile(16, 64, 64, 2, 4, variant="columns")),
    "weight_only_matmul int4 split K": (4, 128, False, (1, 101, 1536), Tile(8, 64, 128, 4, 4, split_k=3, variant="columns")),
    "weight_only_matmul int4 asymmetric": (4, 64, True, (70, 101, 256), Tile(64, 128, 64, 8, 3, variant="columns")),
    "weight_only_matmul int4, odd K": (4, 32, True, (17, 101, 203), Tile(16, 64, 32, 4, 3, variant="columns")),
    "weight_only_matmul int4, zero between codes": (4, 32, "between", (17, 101, 203), Tile(16, 64, 32, 4, 3, variant="columns")),
    "weight_only_matmul int8": (8, 64, False, (17, 101, 256), Tile(16, 64, 64, 2, 4, variant="columns")),
    "weight_only_matmul int8 asymmetric": (8, 64, True, (5, 101, 768), Tile(8, 64, 64, 4, 4, split_k=3, variant="columns")),
    "weight_only_matmul int8 per channel": (8, 0, True, (70, 101, 203), Tile(64, 128, 64, 8, 3, variant="columns")),
}
EPILOGUES = {  # name: (bits, gated, activation, form of the next scale, or none: z gets a term of rank 3, (M, N, K), tile)
    "scaled_matmul epilogue, low rank": (8, False, "none", "none", (70, 101, 203), Tile(64, 64, 32, 4, 3)),
    "scaled_matmul epilogue": (8, False, "quick_gelu", "visual", (70, 101, 203), Tile(64, 64, 32, 4, 3)),
    "scaled_matmul epilogue, split K": (4, False, "relu", "one", (5, 101, 1536), Tile(8, 64, 128, 4, 4, 8, 3, variant="columns")),
    "scaled_matmul epilogue, nested": (8, False, "gelu", "visual", (130, MANY, 208), Tile(64, 64, 64, 4, 3, variant="nested")),
    "gated_matmul": (4, True, "silu", "none", (70, 101, 256), Tile(128, 128, 64, 4, 4, variant="columns")),
    "gated_matmul, split K": (4, True, "silu", "one", (5, 101, 1536), Tile(8, 64, 128, 4, 4, 8, 3, variant="columns")),
    "gated_matmul, nested": (8, True, "gelu_tanh", "visual", (130, MANY, 208), Tile(64, 128, 64, 4, 3, variant="nested")),
    "gated_matmul, pingpong": (8, True, "silu", "visual", (130, 6000, 208), Tile(64, 256, 128, 4, 4, variant="pingpong")),
    "gated_matmul, pingpong, cut": (
        8,
        True,
        "silu",
        "one",
        (130, 272, 3600),
        Tile(128, 128, 128, 4, 8, split_k=4, variant="pingpong"),
    ),
}
NORM = {  # name: (shape, form of the scale; gain, bias and residual)
    "norm_quantize": ((5, 3420), "one", False),
    "norm_quantize per modality": ((5, 100), "visual", True),
    "norm_quantize by rows, residual": ((5, 3420), "row", True),
}
HADAMARD = {  # name: (shape, form of the scale, asymmetric by token, or none: no quantization; gated)
    "hadamard_quantize, one matrix": ((70, 27), "one", False),
    "hadamard_quantize, rows together": ((11, 192), "visual", False),
    "hadamard_quantize": ((5, 1280), "asymmetric", False),
    "hadamard_quantize, two parts": ((5, 5120), "row", False),
    "hadamard_quantize, two parts, asymmetric": ((3, 2368), "asymmetric", False),
    "hadamard_quantize gated": ((5, 1280), "one", True),
    "hadamard_quantize gated, two parts": ((3, 2368), "none", True),
}
WARPGROUPS = {
    "hadamard, warpgroups": ((15, 8192), "none", False),
    "hadamard_quantize, warpgroups, two blocks": ((9, 10240), "visual", False),
    "hadamard_quantize, warpgroups, three blocks, asymmetric": ((9, 18944), "asymmetric", False),
}
# One error that each tool must find: a tool that finds nothing here has said nothing about the rest.
PLANTED = {
    "memcheck": """extern "C" __global__ void planted_memcheck(int* out, int n) { out[n + threadIdx.x] = 1; }""",
    "racecheck": """extern "C" __global__ void planted_racecheck(int* out, int n) {
        __shared__ int s[64];
        s[threadIdx.x] = threadIdx.x + n;
        out[threadIdx.x] = s[(threadIdx.x + 32) % 64];  // written by the other warp, no barrier in between
    }""",
}


def scaled(place: Place, kind: str, shape: tuple[int, int, int], tile: Tile, form: str) -> None:
    m, n, k = shape
    # 3 rows of tiles of 64 x 64, and one column of them more than there are programs
    n = n or 64 * (multiprocessors(place.device) // 3 + 2) - 27
    codes = integers(-8, 8, n, k) if "int4" in kind else integers(-128, 128, n, k)
    x = torch.randn(m, k).to(FP8) if "fp8" in kind else integers(-128, 128, m, k)
    w = torch.randn(n, k).to(FP8) if kind == "fp8" else codes
    w_scale, bias = torch.rand(n) * 0.01 + 0.001, torch.randn(n).to(place.dtype)
    scale, more, rows = row_scales(form, m, "cpu")
    stored = pack_int4(codes) if "int4" in kind else w
    x_d, w_d, scale_d, w_scale_d, bias_d = (t.to(place.device) for t in (x, stored, scale, w_scale, bias))
    out, given = poison(place, m, n), there(place, **more)
    scaled_matmul(x_d, w_d, scale_d, w_scale_d, bias_d, out_dtype=place.dtype, out=out, config=tile, **given)
    want = (x.double() @ w.double().t()) * rows.double()[:, None] * w_scale.double() + bias.double()
    assert_close(out.cpu(), want)


def epilogue(place: Place, bits: int, gated: bool, activation: str, form: str, shape: tuple[int, int, int], tile: Tile) -> None:
    m, n, k = shape
    n = n or 64 * (multiprocessors(place.device) // 3 + 2) - 27
    top = 2 ** (bits - 1)
    x, w = integers(-128, 128, m, k), [integers(-top, top, n, k) for _ in range(1 + gated)]
    w_scale, bias = torch.rand(n) / (100 * top), torch.randn(n).to(place.dtype)
    scale, more, rows = row_scales("one" if form == "none" else form, m, "cpu")
    y = poison(place, m, n) if form == "none" else torch.full((m, n), -77, dtype=torch.int8).to(place.device)
    w_scale_d, bias_d, one = (t.to(place.device) for t in (w_scale, bias, torch.ones(1)))
    stored = [(c if bits == 8 else pack_int4(c)).to(place.device) for c in w]
    low = [torch.randn(r, 3).to(place.dtype) for r in (m, n)] if form == "none" and not gated else None
    low_d = None if low is None else (low[0].to(place.device), low[1].to(place.device))
    codes = None if form == "none" else row_scale(scale.to(place.device), m, **there(place, **more))
    scaled_matmul_epilogue(
        x.to(place.device),
        [Linear(v, w_scale_d, bias_d, y) for v in stored],
        row_scale(one, m),
        Epilogue(activation, place.dtype, codes, 8, low_d),
        tile,
    )
    z = [(x.double() @ v.double().t() * w_scale.double() + bias.double()).to(place.dtype) for v in w]
    z = z if low is None else [(z[0].double() + low[0].double() @ low[1].double().t()).to(place.dtype)]
    h = epilogue_op.ACTIVATIONS[activation](z[0].float()).to(place.dtype)
    h = h * z[1] if gated else h
    if codes is None:
        assert_close(y.cpu(), h)
    else:
        assert_codes(y, h.float() / rows[:, None], 0.02)


def grouped(bits: int, group: int, zeros: bool | str, n: int, k: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Codes, scales, zero points and the float64 weight that they mean."""
    codes = integers(-8, 8, n, k) if bits == 4 else integers(-128, 128, n, k)
    shape = (n, -(-k // group)) if group else (n,)
    scale, zero = torch.rand(shape) * 0.01 + 0.001, integers(-8, 8, *shape) if zeros else None
    zero = zero if zero is None or zeros != "between" else (zero + torch.rand(shape)).half()
    wide = [
        t.double().repeat_interleave(group, 1)[:, :k] if group else t.double()[:, None]
        for t in (scale, torch.zeros(shape) if zero is None else zero)
    ]
    return codes, scale, zero, (codes.double() - wide[1]) * wide[0]


def weight_only(place: Place, bits: int, group: int, zeros: bool | str, shape: tuple[int, int, int], tile: Tile) -> None:
    m, n, k = shape
    codes, scale, zero, weight = grouped(bits, group, zeros, n, k)
    x, bias = torch.randn(m, k).to(place.dtype), torch.randn(n).to(place.dtype)
    stored = pack_int4(codes) if bits == 4 else codes
    x_d, w_d, scale_d, bias_d = (t.to(place.device) for t in (x, stored, scale, bias))
    out = poison(place, m, n)
    weight_only_matmul(x_d, w_d, scale_d, bias_d, group_size=group, out=out, config=tile, **there(place, zero=zero))
    assert_close(out.cpu(), x.double() @ weight.t() + bias.double())


FLOAT4 = {  # name: (form, (M, N, K), tile)
    "float4_matmul mxfp4": ("mxfp4", (17, 101, 256), Tile(16, 64, 64, 2, 4, variant="columns")),
    "float4_matmul nvfp4, odd K, split K": ("nvfp4", (1, 101, 403), Tile(16, 64, 32, 4, 3, split_k=3, variant="columns")),
    "float4_matmul nvfp4 written out": ("nvfp4", (70, 101, 203), Tile(16, 64, 64, 4, 3, variant="unpack")),
}


def float4(place: Place, form: str, shape: tuple[int, int, int], tile: Tile) -> None:
    m, n, k = shape
    w = torch.randint(0, 256, (n, -(-k // 2)), dtype=torch.uint8), torch.randint(112, 122, (n, -(-k // BLOCKS[form]))).byte()
    divisor = torch.full((1,), 300.0) if form == "nvfp4" else None
    x, bias, out = torch.randn(m, k).to(place.dtype), torch.randn(n), poison(place, m, n)
    given = [None if t is None else t.to(place.device) for t in (x, *w, divisor, bias)]
    float4_matmul(*given, form=form, out=out, config=tile)
    assert_close(out.cpu(), float4_op.reference(x.double(), *w, divisor, bias.double(), form), place.dtype)


def unpack(place: Place, bits: int, numbers: bool) -> None:
    codes, scale, zero, weight = grouped(bits, 48, True, 37, 203)
    stored = (pack_int4(codes) if bits == 4 else codes).to(place.device)
    if not numbers:
        assert torch.equal(unpack_weight(stored, 203, bits=bits).cpu(), codes), "codes differ"
        return
    given = there(place, scale=scale, zero=zero)
    assert_close(unpack_weight(stored, 203, bits=bits, dtype=place.dtype, group_size=48, **given).cpu(), weight)


def norm(place: Place, shape: tuple[int, int], form: str, full: bool) -> None:
    m, width = shape
    x, r = torch.randn(m, width).to(place.dtype), torch.randn(m, width).to(place.dtype)
    module = RMSNorm(width, 1e-5, torch.randn(width), torch.randn(width)) if full else RMSNorm(width, 1e-5)
    scale, visual, rows = row_scales(form, m, "cpu")
    scales = row_scale(scale.to(place.device), m, **there(place, **visual))
    more = there(place, gain=module.weight, bias=module.bias, residual=r) if full else {}
    got = norm_quantize.plan(x.to(place.device), norm_quantize.Norm(1e-5, **more), scales).run()
    if got.total is not None:
        assert torch.equal(got.total.cpu(), x + r), "x + r differs"
    assert_codes(got.q, module(x + r if full else x).detach().float() / rows[:, None], 0.01)


def static(place: Place, shape: tuple[int, int], form: str) -> None:
    x = torch.randn(shape).to(place.dtype)
    scale, visual, rows = row_scales(form, shape[0], "cpu")
    scales = row_scale(scale.to(place.device), shape[0], **there(place, **visual))
    got = quantize.plan(x.to(place.device), scales).run()
    assert torch.equal(got.cpu(), torch.round(x.float() / rows[:, None]).clamp(-128, 127).to(torch.int8)), "codes differ"


def transform(place: Place, shape: tuple[int, int], form: str, gated: bool) -> None:
    m, n = shape
    x, up = torch.randn(m, n).to(place.dtype), torch.randn(m, n).to(place.dtype)
    h = (F.silu(x.float()).to(place.dtype) * up if gated else x).double()
    y = hadamard.reference(h, hadamard.hadamard_factors(n))
    x, gate = x.to(place.device), up.to(place.device) if gated else None
    q, scales = torch.empty_like(x, dtype=x.dtype if form == "none" else torch.int8), None
    token, offset = (torch.empty(m, 1, device=x.device) if form == "asymmetric" else None for _ in "so")
    if form not in ("asymmetric", "none"):
        scale, visual, rows = row_scales(form, m, "cpu", 0.02, 0.04)
        scales = row_scale(scale.to(place.device), m, **there(place, **visual))
    written = Written(q, scales, token, offset)
    # two programs, so that each takes several turns
    if hadamard_wgmma.tiling(n):
        launch = hadamard_wgmma.launch(x, written)
        launch._replace(grid=(2,), constants=launch.constants | {"PROGRAMS": 2}).run()
    else:
        hadamard_quantize.rows_launch(x, gate, written, hadamard_plan(n, x.device, x.dtype), programs=2).run()
    # The first of two products is rounded to x's dtype, so a code in twenty may fall on the other side.
    if form == "none":
        assert_close(q.cpu(), y)
    elif form == "asymmetric":
        assert token is not None
        assert offset is not None
        assert_close(token.cpu(), per_token_op.reference(y, None, [n], [8])[1], place.dtype)
        assert_codes(q, (y - offset.cpu().double()) / token.cpu().double(), 0.1)
    else:
        assert_codes(q, y / rows.double()[:, None], 0.1)


Case = tuple[str, Callable[[], None]]


def cases(place: Place) -> Iterator[Case]:
    """Every kernel: its name, and the call that runs and compares it."""
    given = SCALED | (PINGPONG | REGISTERS if has_warpgroup_products(place.device) else {})
    for i, (name, (kind, shape, tile)) in enumerate(given.items()):
        if not ("fp8" in kind and fp8_reason(place.device)) and (kind != "int4 fp8" or has_inline_ptx(place.device)):
            yield name, functools.partial(scaled, place, kind, shape, tile, KINDS[i % len(KINDS)])
    for name, case in EPILOGUES.items():
        yield name, functools.partial(epilogue, place, *case)
    for name, weights in WEIGHT_ONLY.items():
        yield name, functools.partial(weight_only, place, *weights)
    for name, weights in FLOAT4.items():
        yield name, functools.partial(float4, place, *weights)
    yield "unpack_weight int4 codes", functools.partial(unpack, place, 4, False)
    yield "unpack_weight int4", functools.partial(unpack, place, 4, True)
    yield "unpack_weight int8", functools.partial(unpack, place, 8, True)
    yield "gptq_block", functools.partial(sweep, place, (17, 101), False)
    yield "gptq_block asymmetric", functools.partial(sweep, place, (128, 33), True)
    yield "power_clip", functools.partial(clips, place, (9, 1, 1100), False)
    yield "power_clip asymmetric", functools.partial(clips, place, (5, 7, 33), True)
    if has_tensor_descriptors(place.device):
        yield "mixed_matmul, quantize_per_token", functools.partial(mixed, place, [208, 48], True)
        yield "mixed_matmul, one part", functools.partial(mixed, place, [176], False)
    if has_warpgroup_products(place.device):
        tile = Tile(64, 128, 128, 4, 8, split_k=4, variant="pingpong")
        yield "mixed_matmul, pingpong, cut", functools.partial(mixed, place, [3600], True, 264, tile)
        yield "mixed_matmul, two parts, pingpong, cut", functools.partial(mixed, place, [3136, 464], True, 264, tile)
        tile = REGISTERS["scaled_matmul int4 in registers, cut"][2]
        yield "mixed_matmul, in registers, cut", functools.partial(mixed, place, [3136, 464], True, 264, tile)
    yield "norm_, hadamard_ and basis_quantize_per_token", functools.partial(fused, place)
    yield "quantize", functools.partial(static, place, (37, 3420), "one")
    yield "quantize per modality", functools.partial(static, place, (5, 100), "visual")
    for name, row in NORM.items():
        yield name, functools.partial(norm, place, *row)
    for name, row in (HADAMARD | (WARPGROUPS if has_warpgroup_products(place.device) else {})).items():
        yield name, functools.partial(transform, place, *row)
    yield "kv_token_attention 4 bits", functools.partial(rounded_text, place, 4, 96, 32)
    yield "kv_token_attention 8 bits", functools.partial(rounded_text, place, 8, 80, 16)
    yield "kv_rows_attention", functools.partial(rows_of_bytes, place, [84, 12], [4, 8])
    yield "kv_rows_attention, rows of whole words", functools.partial(rows_of_bytes, place, [112, 16], [4, 8])
    yield "kv_rows_attention, one part", functools.partial(rows_of_bytes, place, [80], [8])
    yield "kv_round_keys", functools.partial(rounded_keys, place, 1, 40)


def say(*words: str) -> None:
    print("@", *words, flush=True)


def one(name: str, call: Callable[[], None], synchronize: Callable[[], None]) -> bool:
    """Run one kernel; False where the device is lost for the next."""
    say("start", name)
    try:
        call()
        synchronize()
    except Exception as error:  # a wrong result, a refusal, or whatever a compiler and a driver raise
        say("wrong", f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
        try:
            synchronize()
        except Exception:
            return False
        return True
    say("right", name)
    return True


def planted(tool: str, synchronize: Callable[[], None]) -> None:
    """Run the error that the tool has to find; it may cost the context, so it comes last."""
    try:
        kernel = torch.cuda._compile_kernel(PLANTED[tool], f"planted_{tool}")
    except Exception as error:
        say("missing", f"planted: {type(error).__name__}: {str(error)[:200]}")
        return
    out = torch.zeros(64, dtype=torch.int32).cuda()
    one("planted", lambda: kernel(grid=(1, 1, 1), block=(64, 1, 1), args=[out, 64]), synchronize)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="in Triton's interpreter, on the CPU")
    parser.add_argument("--part", default="1/1", help="2/4: every fourth kernel from the second on")
    parser.add_argument("--planted", choices=list(PLANTED), help="end with an error that this tool must find")
    args = parser.parse_args()
    if not args.dry and not torch.cuda.is_available():
        say("facts", json.dumps({"device": None}))
        return 0
    # The interpreter computes bf16 wrongly.
    place = Place(torch.device("cpu"), torch.float16) if args.dry else Place(torch.device("cuda"), torch.bfloat16)
    torch.manual_seed(0)
    every = list(cases(place))
    first, step = map(int, args.part.split("/"))
    todo = dict(every[first - 1 :: step])
    say(
        "facts",
        json.dumps(
            {
                "device": gpu_name(place.device),
                "torch": torch.__version__,
                "triton": triton.__version__,
                "python": platform.python_version(),
                "of": len(every),
                "kernels": list(todo),
            }
        ),
    )

    def synchronize() -> None:
        if not args.dry:
            torch.cuda.synchronize()
        if args.planted:
            time.sleep(0.1)  # a tool prints from a process of its own: before the next kernel's name

    for name, call in todo.items():
        if not one(name, call, synchronize):
            return 1
    if args.planted:
        planted(args.planted, synchronize)
    return 0


if __name__ == "__main__":
    sys.exit(main())
