"""kv_rows_attention against the op's reference, in float64; what no row holds and what the kernel has not written is NaN."""

import os
import subprocess
import sys

import pytest
import torch
from tolerance import assert_close

from mmqc.ops import kv_rows_attention as op
from mmqc.ops import quantize_per_token
from mmqc.ops.kv_rows import to_rows

kernel = pytest.importorskip("mmqc.kernels.kv.kv_rows_attention")
pytestmark = pytest.mark.usefixtures("nan_memory")

FEW = kernel.TokenConfig(per_sm=1, tokens=16)  # so that a program takes several steps
RESQ = [4, 8]


def parts_of(width):
    return [width - width // 8, width // 8]


def rows_case(tokens, widths, bits, *, batch=2, heads=1, group=2, queries=1, dtype=torch.float16, device="cpu", size=1.0):
    """Operands by name; behind the last token of a head lie bytes that are NaN and infinity wherever they are read as numbers."""
    g = torch.Generator().manual_seed(hash((tokens, *widths, *bits, batch, heads, group, queries)) % 2**31)
    width, rows = sum(widths), []
    for _ in "kv":
        x = torch.randn(batch, heads, tokens + 3, width, generator=g) + torch.randn(1, heads, 1, width, generator=g)
        room = to_rows(*quantize_per_token.reference((size * x).to(dtype), None, widths, bits), widths, bits)
        room[:, :, tokens:] = 255
        rows.append(room.to(device)[:, :, :tokens])
    q = torch.randn(batch, queries, heads * group, width, generator=g).to(dtype).to(device).transpose(1, 2)
    return {"q": q, "k_rows": rows[0], "v_rows": rows[1], "widths": widths, "bits": bits, "scaling": width**-0.5 / size}


def assert_like_op(case, config=FEW):
    y = kernel.kv_rows_attention(*case.values(), config=config)
    want = op.reference(*(case | {"q": case["q"].double()}).values())
    assert y.dtype == case["q"].dtype
    assert y.is_contiguous()
    assert_close(y, want, torch.bfloat16 if y.dtype == torch.bfloat16 else torch.float16)


@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("width", [64, 80, 96, 128])
def test_kv_rows_attention__heads_and_widths(width, group, device):
    """At 80 and 96 no row starts at a multiple of 4, nor do its scales."""
    assert_like_op(rows_case(67, parts_of(width), RESQ, group=group, device=device))


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 129, 515])
def test_kv_rows_attention__one_to_hundreds_of_tokens(tokens, device):
    for config in (None, FEW):
        assert_like_op(rows_case(tokens, [28, 4], RESQ, heads=2, group=3, device=device), config)


@pytest.mark.parametrize(
    ("widths", "bits"), [([32], [4]), ([32], [8]), ([21], [4]), ([19, 5], [5, 6]), ([17, 16], [8, 4]), ([1, 1], [4, 4]), ([1], [7])]
)
def test_kv_rows_attention__parts_of_any_kind(widths, bits, device):
    assert_like_op(rows_case(50, widths, bits, group=3, device=device))


@pytest.mark.parametrize(("queries", "group"), [(3, 1), (9, 4)])
def test_kv_rows_attention__several_queries(queries, group, device):
    assert_like_op(rows_case(40, [28, 4], RESQ, heads=2, group=group, queries=queries, device=device))


@pytest.mark.parametrize("size", [1e-3, 300.0])
@pytest.mark.parametrize("bits", [[4, 8], [8, 4], [6, 5]])
def test_kv_rows_attention__small_and_large_values_in_fp16(bits, size, device):
    assert_like_op(rows_case(90, [28, 4], bits, size=size, device=device))


def test_kv_rows_attention__the_widest_range_of_fp16(device):
    """Products with scales are stored times a power of two, and must not overflow."""
    case = rows_case(20, [14, 2], RESQ, device=device)
    x = torch.full((2, 1, 20, 16), 65504.0)
    x[..., ::2] = -65504.0
    case["v_rows"] = to_rows(*quantize_per_token.reference(x, None, [14, 2], RESQ), [14, 2], RESQ).to(device)
    assert_like_op(case)


def test_kv_rows_attention__the_largest_score_comes_last(device):
    """Every step has a new largest score, and the sums so far are scaled."""
    case = rows_case(200, [14, 2], RESQ, device=device)
    case["q"] = case["q"].abs()
    x = torch.randn(2, 1, 200, 16) + torch.arange(200)[:, None] / 8
    case["k_rows"] = to_rows(*quantize_per_token.reference(x, None, [14, 2], RESQ), [14, 2], RESQ).to(device)
    assert_like_op(case)


def test_kv_rows_attention__constant_tokens_and_float32(device):
    """A constant part has s = 0; float32 queries only in the interpreter."""
    if device.type == "cuda":
        pytest.skip("float32 queries take the reference")
    case = rows_case(33, [28, 4], RESQ, dtype=torch.float32, device=device)
    x = torch.full((2, 1, 33, 32), 3.5)
    case["v_rows"] = to_rows(*quantize_per_token.reference(x, None, [28, 4], RESQ), [28, 4], RESQ)
    y = kernel.kv_rows_attention(*case.values(), config=FEW)
    assert_close(y, op.reference(*case.values()))


def test_kv_rows_attention__nothing_there(device):
    case = rows_case(4, [28, 4], RESQ, device=device)
    for name in ("k_rows", "v_rows"):
        case[name] = case[name][:, :, :0]
    assert not kernel.kv_rows_attention(*case.values()).any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("group", [1, 3, 4, 8, 24])
@pytest.mark.parametrize("width", [64, 80, 96, 128, 256])
def test_kv_rows_attention__every_shape(width, group, dtype, device):
    ways = [(parts_of(width), [4, 8]), ([width], [4]), ([width], [8]), (parts_of(width), [6, 4])]
    for widths, bits in ways:
        for tokens, queries in ((1, 1), (733, 1), (733, 5)):
            case = rows_case(tokens, widths, bits, heads=2, group=group, queries=queries, dtype=dtype, device=device)
            for config in (None, FEW, kernel.TokenConfig(tokens=64, stages=2), kernel.TokenConfig(warps=2)):
                assert_like_op(case, config)


@pytest.mark.gpu
def test_kv_rows_attention__forty_thousand_tokens(device):
    case = rows_case(40000, [112, 16], RESQ, heads=2, group=4, dtype=torch.bfloat16, device=device)
    assert_like_op(case, None)
    first = kernel.kv_rows_attention(*case.values())
    assert torch.equal(first, kernel.kv_rows_attention(*case.values()))


def test_kv_rows_attention__on_cuda_takes_the_kernel_where_it_can(monkeypatch, device):
    on_cuda = pytest.importorskip("mmqc.kernels.kv_on_cuda")
    case = rows_case(9, [28, 4], RESQ, device=device)
    asked = []
    monkeypatch.setattr(kernel, "table", lambda *args: asked.append(args) or kernel.TokenConfig())
    assert torch.equal(on_cuda.kv_rows_attention(*case.values()), kernel.kv_rows_attention(*case.values()))
    assert len(asked) == 2
    for other in (case | {"q": case["q"].double()}, rows_case(9, [28, 4], [3, 8], device=device)):
        assert torch.equal(on_cuda.kv_rows_attention(*other.values()), op.reference(*other.values()))
    assert len(asked) == 2


def test_kv_rows_attention__says_what_it_cannot_do(device):
    case = rows_case(4, [28, 4], RESQ, device=device)
    assert "queries are one of" in kernel.kv_rows_attention(*(case | {"q": case["q"].double()}).values()).reason
    few_bits = rows_case(4, [28, 4], [3, 8], device=device)
    assert "one or two parts of 4 to 8" in kernel.kv_rows_attention(*few_bits.values()).reason
    case["k_rows"] = case["k_rows"].repeat_interleave(2, 2)[:, :, ::2]
    assert "rows of a head are contiguous" in kernel.kv_rows_attention(*case.values()).reason


OFFLINE = """
import math, sys, torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from mmqc.kernels.kv.kv_rows_attention import TOGETHER, parts, table
from mmqc.kernels.kv.kv_rows_attention_tiles import kv_rows_split_kernel
from mmqc.ops.kv_rows import row_bytes

arch, kind, heads, low, high, low_bits, high_bits = int(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])
widths, bits = ([low, high], [low_bits, high_bits]) if high else ([low], [low_bits])
row = row_bytes(widths, bits)
shape = parts(widths, bits, kind == "fp16")
config = table(heads, bits, torch.device("cpu"))
shape |= dict(ROW=row, RB=TOGETHER, BT=config.tokens, ALIGN=math.gcd(16, row), PTX=True)
kinds = {"q_ptr": "*" + kind, "k_ptr": "*u8", "v_ptr": "*u8", "scaling": "fp32"}
kernel = kv_rows_split_kernel
types = {n: "constexpr" if n in shape else kinds.get(n, "*fp32" if n.endswith("_ptr") else "i32") for n in kernel.arg_names}
wide = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(types) if n in ("q_ptr", "partial_ptr")}
options = {"num_warps": config.warps, "num_stages": config.stages}
made = triton.compile(ASTSource(kernel, types, shape, wide), target=GPUTarget("cuda", arch, 32), options=options)
ptx = made.asm["ptx"]
print(ptx.count("mma"), ptx.count("cp.async"), ptx.count(".local"), made.metadata.shared)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "kind", "heads"), [(80, "bf16", 8192), (90, "bf16", 8192), (90, "bf16", 1), (90, "fp16", 1)])
@pytest.mark.parametrize(
    ("widths", "bits"), [((112, 16), (4, 8)), ((70, 10), (4, 8)), ((84, 12), (4, 8)), ((256, 0), (8, 0)), ((63, 0), (4, 0))]
)
def test_kv_rows_attention__compiles_without_a_gpu(widths, bits, arch, kind, heads):
    """Products on tensor cores, loads of the next rows under way where they start at multiples of 4, nothing in local memory."""
    bare = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", OFFLINE, *map(str, (arch, kind, heads, *widths, *bits))]
    done = subprocess.run(command, env=bare, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    products, copies, local, shared = map(int, done.stdout.split())
    assert products
    assert copies or widths in ((70, 10), (84, 12))
    assert not local
    assert shared < 100 << 10  # two programs a multiprocessor
