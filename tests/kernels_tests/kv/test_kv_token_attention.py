"""kv_token_attention against the op's reference, in float64; what no token owns and what the kernel has not written is NaN."""

import os
import subprocess
import sys

import pytest
import torch
from tolerance import assert_close

from mmqc.ops import kv_token_attention as op

kernel = pytest.importorskip("mmqc.kernels.kv.kv_token_attention")
pytestmark = pytest.mark.usefixtures("nan_memory")

FEW = kernel.TokenConfig(per_sm=1, tokens=16)  # so that a program takes several steps
SLACK = 3  # places that no token has yet


def token_case(counts, *, heads=1, group=2, width=32, bits=8, block=16, queries=1, dtype=torch.float16, device="cpu", size=1.0):
    """Operands by name, laid out as the cache has them: place 0 of the codes belongs to nobody, nor do those past a count."""
    g = torch.Generator().manual_seed(hash((counts, heads, group, width, bits, block, queries)) % 2**31)
    rand = lambda *shape: size * torch.randn(*shape, generator=g)  # noqa: E731
    batch, room = len(counts), max(counts) + SLACK
    shift = rand(1, heads, 1, width)
    c = {"q": torch.randn(batch, queries, heads * group, width, generator=g).to(dtype).to(device).transpose(1, 2)}
    for kind in "kv":
        x = (rand(batch, heads, 1 + room, width) + shift).to(dtype)
        codes, scale, offset = op.quantize_tokens(x, bits, block)
        for b, n in enumerate(counts):
            codes[b, :, 1 + n :] = 255
            scale[b, :, 1 + n :] = offset[b, :, 1 + n :] = torch.nan
        scale[:, :, 0] = offset[:, :, 0] = torch.nan
        for name, t in (("codes", codes), ("scale", scale), ("offset", offset)):
            c[f"{kind}_{name}"] = t.to(device)[:, :, 1:]
    count = torch.tensor(counts, dtype=torch.int32, device=device)
    return c | {"count": count, "bits": bits, "scaling": width**-0.5}


def floating(t):
    return isinstance(t, torch.Tensor) and t.is_floating_point()


def assert_like_op(case, config=FEW):
    y, lse = kernel.kv_token_attention(*case.values(), config=config)
    want, want_lse = op.reference(*(t.double() if floating(t) else t for t in case.values()))
    assert y.dtype == case["q"].dtype
    assert_close(y, want, torch.bfloat16 if y.dtype == torch.bfloat16 else torch.float16)
    some = want_lse.isfinite()
    assert torch.equal(some, lse.isfinite())
    assert (lse[~some] == -torch.inf).all()
    assert_close(lse[some], want_lse[some], torch.float16)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("queries", "block"), [(1, 16), (3, 32), (9, 8)])
def test_kv_token_attention__ragged_lengths(bits, queries, block, device):
    assert_like_op(token_case((70, 0, 131), heads=2, bits=bits, queries=queries, block=block, device=device))


@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize(("width", "block"), [(64, 32), (80, 16), (96, 32), (128, 32)])
@pytest.mark.parametrize("bits", [4, 8])
def test_kv_token_attention__heads_and_widths(width, block, bits, group, device):
    """At 96 a byte's two channels lie in different blocks, and a block in both halves; 80 has an odd number of blocks."""
    assert_like_op(token_case((37, 5), width=width, block=block, bits=bits, group=group, device=device))


@pytest.mark.parametrize(("block", "width"), [(64, 64), (80, 80), (2, 24), (5, 20), (1, 32)])
@pytest.mark.parametrize("bits", [4, 8])
def test_kv_token_attention__blocks_of_any_size(block, width, bits, device):
    assert_like_op(token_case((50, 3), width=width, block=block, bits=bits, group=3, device=device))


@pytest.mark.parametrize("size", [1e-3, 300.0])
@pytest.mark.parametrize("bits", [4, 8])
def test_kv_token_attention__small_and_large_values_in_fp16(bits, size, device):
    case = token_case((90,), bits=bits, size=size, device=device)
    case["scaling"] /= size
    assert_like_op(case)


def test_kv_token_attention__the_largest_score_comes_last(device):
    """Every step has a new largest score, and the sums so far are scaled."""
    case = token_case((200,), width=16, device=device)
    case["q"] = case["q"].abs()
    case["k_offset"] += torch.arange(200 + SLACK, device=device)[:, None].half() / 8
    assert_like_op(case)


@pytest.mark.parametrize("tokens", [1, 16, 513, 2999])
def test_kv_token_attention__one_to_thousands_of_tokens(tokens, device):
    assert_like_op(token_case((tokens,), bits=4, group=4, device=device), None)


def test_kv_token_attention__nothing_there(device):
    case = token_case((4, 2), device=device)
    for name in ("k_codes", "k_scale", "k_offset", "v_codes", "v_scale", "v_offset"):
        case[name] = case[name][:, :, :0]
    y, lse = kernel.kv_token_attention(*(case | {"count": torch.zeros_like(case["count"])}).values())
    assert not y.any()
    assert (lse == -torch.inf).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [1, 3, 4, 8, 16])
@pytest.mark.parametrize("width", [64, 80, 96, 128, 256])
def test_kv_token_attention__every_shape(width, group, bits, dtype, device):
    for block, queries in ((16, 1), (16, 33), (width // 2, 1)):
        case = token_case(
            (700, 33), heads=2, width=width, group=group, bits=bits, block=block, queries=queries, dtype=dtype, device=device
        )
        for config in (None, FEW, kernel.TokenConfig(tokens=64, stages=2), kernel.TokenConfig(warps=2)):
            assert_like_op(case, config)


@pytest.mark.gpu
def test_kv_token_attention__forty_thousand_tokens_in_a_captured_graph(device):
    case = token_case((40000, 7), group=4, width=128, block=32, bits=4, dtype=torch.bfloat16, device=device)
    kernel.kv_token_attention(*case.values())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, lse = kernel.kv_token_attention(*case.values())
    for counts in ((40000, 7), (12345, 0), (1, 4)):  # read on the device
        case["count"].copy_(torch.tensor(counts))
        graph.replay()
        want, want_lse = op.reference(*case.values())
        assert_close(y, want, torch.bfloat16)
        assert_close(lse, want_lse, torch.float16)


def test_kv_token_attention__on_cuda_takes_the_kernel_where_it_can(monkeypatch, device):
    on_cuda = pytest.importorskip("mmqc.kernels.kv_on_cuda")
    case = token_case((9, 4), device=device)
    asked = []
    monkeypatch.setattr(kernel, "table", lambda *args: asked.append(args) or kernel.TokenConfig())
    found = on_cuda.kv_token_attention(*case.values())
    assert len(asked) == 1
    assert all(torch.equal(a, b) for a, b in zip(found, kernel.kv_token_attention(*case.values()), strict=True))
    case["q"] = case["q"].double()
    found = on_cuda.kv_token_attention(*case.values())
    assert len(asked) == 2
    assert all(torch.equal(a, b) for a, b in zip(found, op.reference(*case.values()), strict=True))


def test_kv_token_attention__says_what_it_cannot_do(device):
    case = token_case((4,), width=64, block=1, device=device)
    assert "at most 32 blocks, not 64" in kernel.kv_token_attention(*case.values()).reason
    assert "queries are one of" in kernel.kv_token_attention(*(case | {"q": case["q"].double()}).values()).reason


OFFLINE = """
import math, sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from mmqc.kernels.kv.kv_token_attention import rows_together, table
from mmqc.kernels.kv.kv_token_attention_tiles import kv_token_combine_kernel, kv_token_parts_kernel
from mmqc.kernels.shared.device_facts import power_of_two

arch, bits, width, block, rows = map(int, sys.argv[1:])
bytes_, blocks = width * bits // 8, width // block
planes, columns = power_of_two(bytes_, 16), power_of_two(blocks)
together = rows_together(rows, columns * planes * 8 // bits)
c = table(bits, together * columns * planes * 8 // bits)
shape = dict(BITS=bits, BLOCK=block, NB=blocks, NBP=columns, D=width, W=bytes_, WP=planes, RB=together, BT=c.tokens, UP=1.0,
             CODES_ALIGN=math.gcd(16, bytes_), RANGES_ALIGN=math.gcd(16, 2 * blocks), PTX=True)
kinds = {"q_ptr": "*bf16", "y_ptr": "*bf16", "k_ptr": "*u8", "v_ptr": "*u8", "count_ptr": "*i32", "scaling": "fp32"}
kinds |= {f"{kind}_{name}_ptr": "*bf16" for kind in "kv" for name in ("scale", "offset")}
combine = dict(D=width, DP=power_of_two(width, 16), BP=16)
for kernel, constants in ((kv_token_parts_kernel, shape), (kv_token_combine_kernel, combine)):
    types = {n: "constexpr" if n in constants else kinds.get(n, "*fp32" if n.endswith("_ptr") else "i32")
             for n in kernel.arg_names}
    wide = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(types) if n in ("q_ptr", "part_ptr")}
    options = {"num_warps": c.warps, "num_stages": c.stages, "maxnreg": c.registers or None}
    made = triton.compile(ASTSource(kernel, types, constants, wide), target=GPUTarget("cuda", arch, 32), options=options)
    ptx = made.asm["ptx"]
    print(ptx.count("mma"), ptx.count("cp.async"), ptx.count(".local"), made.metadata.shared)
"""


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize(("bits", "width", "block", "rows"), [(4, 128, 32, 4), (8, 80, 16, 7), (4, 96, 32, 8), (8, 256, 8, 1)])
def test_kv_token_attention__compiles_without_a_gpu(bits, width, block, rows, arch):
    """Products on tensor cores, loads of the next tokens under way, no array in local memory."""
    bare = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", OFFLINE, *map(str, (arch, bits, width, block, rows))]
    done = subprocess.run(command, env=bare, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    (products, copies, local, shared), (none, *_) = [list(map(int, line.split())) for line in done.stdout.splitlines()]
    assert products
    assert copies
    assert not local
    assert not none
    assert shared < 100 << 10  # two programs a multiprocessor
