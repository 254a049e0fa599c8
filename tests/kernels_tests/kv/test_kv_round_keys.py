"""kv_round_keys: the codes of a descent in float64, token by token, where no step of it lies on the middle between two codes."""

import os
import subprocess
import sys

import pytest
import torch
from often import often
from tolerance import assert_close

from mmqc.ops import kv_pack as pack_op
from mmqc.ops import kv_round_keys as op
from mmqc.ops.kv_words import unpack_words

kernel = pytest.importorskip("mmqc.kernels.kv.kv_round_keys")
SHRINK = {1: 0.6, 2: 1.0, 4: 1.0, 8: 1.0}


def round_case(counts, *, heads=2, width=32, dtype=torch.float16, device="cpu"):
    """x, order, count, moment: what no token owns is NaN; queries have few directions."""
    g = torch.Generator().manual_seed(width * len(counts) + heads)
    length = max(counts) + 4
    x = torch.randn(len(counts), length, heads, width, generator=g) + torch.randn(heads, width, generator=g)
    order = torch.stack([torch.randperm(length, generator=g)[: max(counts)] for _ in counts])
    for b, n in enumerate(counts):
        unused = torch.ones(length, dtype=torch.bool)
        unused[order[b, :n]] = False
        x[b, unused] = torch.nan
    q = torch.randn(heads, 60, 3, generator=g) @ torch.randn(heads, 3, width, generator=g)
    q = q + 0.3 * torch.randn(heads, 60, width, generator=g)
    count = torch.tensor(counts, dtype=torch.int32)
    given = (x.to(dtype).transpose(1, 2), order, count, q.mT @ q / 60)
    return tuple(t.to(device) for t in given)


def margins(x, order, count, moment, bits, shrink, damping, sweeps):
    """Codes [B, H, N, D] of the descent in float64, and how near [B, H, N] its steps came to the middle between two codes."""
    used = (torch.arange(order.shape[1], device=x.device) < count[:, None])[:, None, :, None]
    k, top = torch.where(used, pack_op.chosen(x, order).double(), 0.0), 2**bits - 1
    low, high = pack_op.ranges(k, used, "channel")
    half = (high - low) * shrink / 2
    offset, scale = (low + high) / 2 - half, torch.where(half > 0, 2 * half / top, 1.0)
    h = op.weighting(moment, damping, torch.float64)
    nearest = torch.full(k.shape[:3], torch.inf, dtype=k.dtype, device=k.device)

    def rounded(w):
        middle = (w - 0.5).round().clamp(0, top - 1) + 0.5
        away = (w - middle).abs()
        return w.clamp(0, top).round(), away.amin(-1) if w.dim() == 4 else away

    u, away = rounded((k - offset) / scale)
    nearest = torch.minimum(nearest, away)
    for c in [*range(x.shape[3])] * sweeps:
        slope = torch.einsum("bhnd,hd->bhn", u * scale + offset - k, h[:, :, c])
        u[..., c], away = rounded(u[..., c] - slope / (scale[..., c] * h[:, c, c, None]))
        nearest = torch.minimum(nearest, away)
    return torch.where(used, u, 0.0), torch.where(used[..., 0], nearest, torch.inf)


def assert_like_op(case, bits, damping=0.3, sweeps=2, least_clear=0.5, **options):
    args = (*case, bits, SHRINK[bits], damping, sweeps)
    words, scale, offset = kernel.kv_round_keys(*args, **options)
    want_words, want_scale, want_offset = op.reference(*args[:1], *args[1:])
    assert words.shape == want_words.shape
    assert words.dtype == torch.int16
    there = case[2] > 0
    assert_close(scale[there], want_scale[there])
    assert_close(offset[there], want_offset[there])
    codes, nearest = margins(*args)
    found = unpack_words(words, bits)
    assert not found[:, :, codes.shape[2] :].any()
    clear = nearest > (4e-4 if bits == 8 else 1e-4)
    assert clear.float().mean() > least_clear
    assert torch.equal(found[:, :, : codes.shape[2]][clear].double(), codes[clear])
    return found, unpack_words(want_words, bits)


@pytest.mark.parametrize("bits", often((1, 2, 4, 8), 4))
def test_kv_round_keys__codes_of_the_descent(bits, device):
    found, want = assert_like_op(round_case((33, 0, 20), width=24, device=device), bits)
    assert (found != want).any(-1).float().mean() < 0.05  # tokens of which a step lay on a middle


@pytest.mark.parametrize("width", [64, 80, 96, 128])
def test_kv_round_keys__widths(width, device):
    bits = 1 if width % 32 == 0 else 2
    assert_like_op(round_case((19,), heads=1, width=width, device=device), bits)


@pytest.mark.parametrize(("block", "tokens", "sweeps"), [(8, 16, 1), (16, 64, 3), (32, 32, 0)])
def test_kv_round_keys__any_block_and_number_of_sweeps(block, tokens, sweeps, device):
    assert_like_op(
        round_case((70, 9), heads=1, width=20, device=device), 1, sweeps=sweeps, config=kernel.RoundConfig(block, tokens)
    )


def test_kv_round_keys__isotropic_queries_take_the_nearest_codes(device):
    x, order, count, moment = round_case((40, 11), heads=1, device=device)
    moment = torch.eye(32, device=device).expand_as(moment).contiguous()
    got = kernel.kv_round_keys(x, order, count, moment, 2, 0.9, 0.3, 2)
    for a, b in zip(got, pack_op.reference(x, order, count, 2, "channel", 0.9, False), strict=True):
        assert torch.equal(a, b) if device.type == "cpu" else (a != b).float().mean() < 1e-3


def test_kv_round_keys__scores_are_nearer_than_with_nearest_codes(device):
    x, order, count, moment = round_case((90,), heads=1, dtype=torch.float32, device=device)
    k = pack_op.chosen(x, order)

    def error(words, scale, offset):
        e = unpack_words(words, 1)[:, :, :90] * scale + offset - k
        return float(((e @ moment) * e).sum())

    near = error(*pack_op.reference(x, order, count, 1, "channel", 0.6, False))
    assert error(*kernel.kv_round_keys(x, order, count, moment, 1, 0.6, 0.3, 2)) < 0.5 * near


def test_kv_round_keys__one_value_and_none(device):
    x, order, count, moment = round_case((20, 5), device=device)
    flat = torch.full_like(x, 2.5)
    words, scale, offset = kernel.kv_round_keys(flat, order, count, moment, 1, 0.6, 0.3, 2)
    assert torch.equal(unpack_words(words, 1)[0, :, :20] * scale[0] + offset[0], flat[0, :, :20].float())
    words, scale, _ = kernel.kv_round_keys(x, order[:, :0], count * 0, moment, 1, 0.6, 0.3, 2)
    assert words.numel() == 0
    assert (scale == 1).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("width", [64, 80, 96, 128, 256])
def test_kv_round_keys__every_shape(width, bits, dtype, device):
    for tokens, warps in ((16, 1), (32, 2), (64, 4)):
        config = kernel.RoundConfig(16, tokens, warps)
        assert_like_op(round_case((700, 33), width=width, dtype=dtype, device=device), bits, least_clear=0.2, config=config)


def test_kv_round_keys__on_cuda_takes_the_kernel_where_it_can(monkeypatch, device):
    on_cuda = pytest.importorskip("mmqc.kernels.kv_on_cuda")
    x, order, count, moment = round_case((9, 4), heads=1, device=device)
    rest = (order, count, moment, 2, 0.9, 0.3, 2)
    strided = torch.stack((x, x), -1)[..., 0]  # channels that are not contiguous are copied
    asked = []
    monkeypatch.setattr(kernel, "weighting", lambda *args: asked.append(args) or op.weighting(*args))
    found = on_cuda.kv_round_keys(strided, *rest)
    assert len(asked) == 1
    assert all(torch.equal(a, b) for a, b in zip(found, kernel.kv_round_keys(x, *rest), strict=True))
    wide = on_cuda.kv_round_keys(x.double(), *rest)
    assert len(asked) == 2
    assert all(torch.equal(a, b) for a, b in zip(wide, op.reference(x.double(), *rest), strict=True))


def test_kv_round_keys__says_what_it_cannot_do(device):
    x, order, count, moment = round_case((4,), device=device)
    assert "x is fp16, bf16 or fp32" in kernel.kv_round_keys(x.double(), order, count, moment, 1, 0.6, 0.3, 2).reason
    assert "order is contiguous int64" in kernel.kv_round_keys(x, order.int(), count, moment, 1, 0.6, 0.3, 2).reason


OFFLINE = """
import sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from mmqc.kernels.kv.kv_round_keys import RoundConfig, kv_round_keys_kernel as kernel

arch, bits, width = map(int, sys.argv[1:])
c = RoundConfig()
shape = dict(BITS=bits, D=width, DP=max(16, 1 << (width - 1).bit_length()), C=c.block, BN=c.tokens, BK=16)
kinds = {"x_ptr": "*bf16", "order_ptr": "*i64", "count_ptr": "*i32", "bytes_ptr": "*i8"}
types = {n: "constexpr" if n in shape else kinds.get(n, "*fp32" if n.endswith("_ptr") else "i32") for n in kernel.arg_names}
wide = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(types) if n.endswith("_ptr")}
options = {"num_warps": c.warps, "num_stages": 1, "maxnreg": c.registers, "enable_fp_fusion": False}
made = triton.compile(ASTSource(kernel, types, shape, wide), target=GPUTarget("cuda", arch, 32), options=options)
ptx = made.asm["ptx"]
print(ptx.count("mma.sync"), ptx.count("cp.async"), ptx.count(".local"))
"""


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize(("bits", "width"), [(1, 128), (2, 80), (8, 256)])
def test_kv_round_keys__compiles_without_a_gpu(bits, width, arch):
    """Three products for one of float32, and no load ahead of the stores that it must see."""
    bare = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", OFFLINE, *map(str, (arch, bits, width))]
    done = subprocess.run(command, env=bare, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    products, copies, local = map(int, done.stdout.split())
    assert products == 3 * 2 * (128 if width == 80 else width) // 8  # of 16 tokens, 8 channels, 8 terms; two for 16 channels
    assert not copies
    assert not local
