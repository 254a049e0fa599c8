"""kv_attention against the op's reference, in float64; what no token owns is NaN.

Where a row has several programs, kv_combine joins what they found.
"""

import os
import subprocess
import sys

import pytest
import torch
from kv_cases import packed_case
from tolerance import assert_close

from mmqc.ops import kv_attention as op
from mmqc.ops.kv_words import pack_words

kernel = pytest.importorskip("mmqc.kernels.kv.kv_attention")

RAGGED = ((70, 0, 130), (3, 20, 1))
FEW = kernel.KVConfig(per_sm=1, range_per_sm=2)  # so that a program takes several steps


def floating(t) -> bool:
    return isinstance(t, torch.Tensor) and t.is_floating_point()


def assert_like_op(case: dict, config=FEW) -> None:
    y, lse = kernel.kv_attention(*case.values(), config=config)
    want, want_lse = op.reference(*(t.double() if floating(t) else t for t in case.values()))
    assert y.dtype == case["q"].dtype
    assert_close(y, want, torch.bfloat16 if y.dtype == torch.bfloat16 else torch.float16)
    some = want_lse.isfinite()
    assert torch.equal(some, lse.isfinite())
    assert_close(lse[some], want_lse[some], torch.float16)


@pytest.mark.parametrize("tau", [(0, 0), (0, 3), (2, 1), (1, 1)])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_kv_attention__ragged_lengths(bits, tau, device):
    heads = 2 if bits == 1 and tau == (0, 3) else 1
    case = packed_case(*RAGGED, heads=heads, bits=bits, tau=tau, width=64, dtype=torch.float16, device=device)
    assert_like_op(case, FEW.replace(ahead=bits in (1, 8)))


@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("width", [64, 80, 96, 128])
def test_kv_attention__heads_and_widths(width, group, device):
    bits = {64: 1, 80: 2, 96: 4, 128: 8}[width]
    assert_like_op(packed_case((37,), (5,), heads=1, bits=bits, width=width, group=group, dtype=torch.float16, device=device))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("group", [1, 3, 4, 8, 16])
@pytest.mark.parametrize("width", [64, 80, 96, 128, 256])
def test_kv_attention__every_shape(width, group, bits, dtype, device):
    for values, tau in (("channel", (0, 0)), ("channel", (0, 2)), ("token", (1, 3))):
        case = packed_case(
            (700, 33), (5, 40), bits=bits, width=width, group=group, values=values, tau=tau, dtype=dtype, device=device
        )
        for config in (None, FEW, kernel.KVConfig(per_sm=4, range_per_sm=2, ahead=True, early=True)):
            assert_like_op(case, config)


@pytest.mark.parametrize("tau", [(0, 0), (0, 1)])
@pytest.mark.parametrize("bits", [1, 4])
def test_kv_attention__values_by_token(bits, tau, device):
    case = packed_case(*RAGGED, heads=1, bits=bits, values="token", tau=tau, width=32, dtype=torch.float16, device=device)
    assert_like_op(case)


@pytest.mark.parametrize("values", ["channel", "token"])
@pytest.mark.parametrize("bits", [1, 2])
def test_kv_attention__the_largest_score_comes_last(bits, values, device):
    """Every step has a new largest score, and the sums so far are shifted."""
    case = packed_case((450,), (1,), heads=1, bits=bits, values=values, width=64, dtype=torch.float16, device=device)
    rising = torch.linspace(0, 1, 450, device=device) > torch.rand(450, generator=torch.Generator().manual_seed(0)).to(device)
    codes = rising[None, None, :, None].expand(1, 1, 450, 64) * (2**bits - 1)
    case["k_words"] = pack_words(codes, bits)
    case["k_scale"], case["k_offset"] = torch.full_like(case["k_scale"], 0.3), torch.full_like(case["k_offset"], -0.1)
    case["q"] = case["q"].abs()
    assert_like_op(case)


@pytest.mark.parametrize(("visual", "text"), [(1, 0), (0, 1), (16, 64), (2999, 130), (513, 1)])
def test_kv_attention__one_to_thousands_of_tokens(visual, text, device):
    case = packed_case(
        (visual,), (text,), heads=1, group=4, bits=1, tau=(1, 3), width=32, device=device, room=7, dtype=torch.float16
    )
    assert_like_op(case)


@pytest.mark.parametrize("bits", [1, 4])
@pytest.mark.parametrize("config", [FEW, None])
def test_kv_attention__sums_keep_their_digits_under_new_tops(config, bits, device):
    """Without calibration the largest score is not known before; at 1 bit a value's scale is half its range."""
    case = packed_case((2999, 7), (300, 1), heads=1, group=4, bits=bits, width=64, device=device, dtype=torch.float16)
    assert_like_op(case, config)


@pytest.mark.gpu
@pytest.mark.parametrize("early", [False, True])
def test_kv_attention__forty_thousand_tokens_in_a_captured_graph(early, device):
    case = packed_case((40000, 7), (300, 1), heads=1, bits=2, tau=(0, 2), width=128, dtype=torch.bfloat16, device=device)
    config = kernel.table(2).replace(early=early)
    kernel.kv_attention(*case.values(), config=config)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, lse = kernel.kv_attention(*case.values(), config=config)
    for counts in ((40000, 7), (12345, 0), (1, 4)):  # read on the device
        case["visual_count"].copy_(torch.tensor(counts))
        graph.replay()
        want, want_lse = op.reference(*case.values())
        assert_close(y, want, torch.bfloat16)
        assert_close(lse, want_lse, torch.float16)


def test_kv_attention__says_what_it_cannot_do(device):
    case = packed_case((4,), (4,), width=16, queries=2, device=device)
    assert "one query a head, not 2" in kernel.kv_attention(*case.values()).reason


OFFLINE = """
import sys, triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from mmqc.kernels.kv import kv_attention_tiles as tiles

arch, bits, width, group = map(int, sys.argv[1:])
queries = max(4, 1 << (group - 1).bit_length())
shape = dict(BITS=bits, G=group, GP=queries, D=width, C=-(-width // 64), R=max(16, 8 * bits), EARLY=arch >= 90)
more = dict(RANGED=bits <= 2, PER_TOKEN=bits == 8, VR=max(16, 8 * bits * shape["C"]), BT=16, SP=16)
kinds = {"k_ptr": "*i8", "v_ptr": "*i8", "words_ptr": "*i8", "count_ptr": "*i32", "text_count_ptr": "*i32",
         "q_ptr": "*bf16", "k_text_ptr": "*bf16", "v_text_ptr": "*bf16", "scaling": "fp32", "tau1": "fp32", "tau2": "fp32"}
for kernel, constants in ((tiles.kv_range_of_scores_kernel, shape | {"AHEAD": bits < 4}), (tiles.kv_parts_kernel, shape | more)):
    types = {n: "constexpr" if n in constants else kinds.get(n, "*fp32" if n.endswith("_ptr") else "i32")
             for n in kernel.arg_names}
    wide = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(types) if n.endswith("_ptr") or n == "tokens_all"}
    source = GluonASTSource(kernel, types, constants, wide)
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": 1})
    ptx = made.asm["ptx"]
    print(ptx.count("m16n8k32"), ptx.count("and.b32 %r"), made.metadata.shared)
"""


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize(("bits", "width", "group"), [(1, 128, 4), (2, 80, 1), (4, 96, 8), (8, 64, 4)])
def test_kv_attention__compiles_without_a_gpu(bits, width, group, arch):
    """One AND makes four codes a register of an operand, scores that are kept are not computed again, and need no shared memory."""
    bare = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", OFFLINE, *map(str, (arch, bits, width, group))]
    done = subprocess.run(command, env=bare, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [list(map(int, line.split())) for line in done.stdout.splitlines()]
    tiles, columns = 8 if bits == 1 else 4, max(1, group // 4)  # of 16 tokens a step, of 4 queries
    assert found[0][0] == tiles * 2 * -(-width // 64) * columns
    assert (found[1][0] > found[0][0]) == (bits > 2)  # at 1 and 2 bits here, g needs the range
    assert all(products * 4 == ands * columns for products, ands, _ in found)
    assert found[0][2] == 0
