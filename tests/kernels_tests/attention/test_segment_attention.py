"""Attention within segments against the same in float64, segment by segment, on a Hopper GPU; what needs none of it anywhere."""

import math
from itertools import pairwise

import pytest
import torch
from tolerance import assert_close

from mmqc.kernels.attention import variable_length as op

kernel = pytest.importorskip("mmqc.kernels.attention.segment_attention")
hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="warpgroup products are Hopper's"
)


@pytest.mark.parametrize(
    ("d", "want"),
    [
        (16, (16, 0)),
        (64, (64, 0)),
        (72, (64, 16)),
        (80, (64, 16)),
        (88, (64, 32)),
        (96, (64, 32)),
        (112, (128, 0)),
        (128, (128, 0)),
    ],
)
def test_widths__cover_a_head(d, want):
    assert kernel.widths(d) == want


def test_why_not__a_cpu_has_no_such_kernels():
    q = torch.zeros(1, 2, 8, 64, dtype=torch.bfloat16)
    assert kernel.why_not(q, q, q, torch.tensor([0, 8])) == "warpgroup products are Hopper's"
    with pytest.raises(ValueError, match="segment_attention: warpgroup products"):
        kernel.segment_attention(q, q, q, torch.tensor([0, 8]))


def test_heads__that_the_kernel_takes_are_known_without_operands():
    assert [kernel.why_not_heads(torch.bfloat16, d) for d in (16, 72, 80, 128)] == [None] * 4
    assert "not torch.float32" in kernel.why_not_heads(torch.float32, 80)
    assert all("a multiple of 8" in kernel.why_not_heads(torch.float16, d) for d in (8, 84, 136))


def test_prepare__compiles_what_any_image_takes(monkeypatch):
    """One kernel for every number of rows and of segments, asked for once."""
    asked = []
    monkeypatch.setattr(kernel, "has_warpgroup_products", lambda device: True)
    monkeypatch.setattr(kernel, "ahead", lambda launches, device: asked.extend(launches))
    kernel._prepare.cache_clear()
    for rows in (400, 3600):
        q = torch.zeros(1, 4, rows, 80, dtype=torch.bfloat16)
        kernel.prepare(q, q[:, :2], torch.tensor([0, rows]))
    kernel._prepare.cache_clear()
    assert len(asked) == 1
    for rows, segments in ((8192, 1), (8200, 2), (25_600, 16), (9001, 17)):
        q, k = (torch.empty(1, heads, rows, 80, dtype=torch.bfloat16, device="meta") for heads in (4, 2))
        ends = torch.empty(segments + 1, dtype=torch.int64, device="meta")
        assert kernel.launch(q, k, k, ends, q.transpose(1, 2), None, kernel.workspace).specialisation() == asked[0].specialisation()


def exact(q, k, v, ends, *, causal):
    """In float64."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    q, k, v = q.double(), k.double(), v.double()
    y = torch.zeros_like(q)
    for a, b in pairwise(ends):
        s = q[:, :, a:b] @ k[:, :, a:b].transpose(2, 3) * q.shape[3] ** -0.5
        s = s.masked_fill(~torch.ones_like(s, dtype=torch.bool).tril(), -torch.inf) if causal else s
        y[:, :, a:b] = s.softmax(-1) @ v[:, :, a:b]
    return y


@hopper
@pytest.mark.gpu
@pytest.mark.usefixtures("nan_memory")
@pytest.mark.parametrize("keys", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "of_keys", "d", "ends", "causal"),
    [
        (2, 2, 80, [0, 1], False),
        (2, 2, 80, [0, 300], False),
        (3, 3, 72, [0, 257, 515], False),
        (2, 2, 64, [0, 1, 2, 900], False),
        (2, 2, 80, [0, 64, 128, 129, 400, 400, 1000], False),
        (1, 1, 80, list(range(0, 1025, 64)), False),
        (1, 1, 96, [0, 100], False),
        (2, 2, 128, [0, 700, 1300], False),
        (4, 2, 128, [0, 700, 1300], True),
        (40, 8, 64, [0, 1111], True),
    ],
)
def test_segment_attention__is_attention_of_each_segment(heads, of_keys, d, ends, causal, dtype, keys):
    g = torch.Generator("cuda").manual_seed(len(ends) + d)
    packed = torch.randn(ends[-1], heads + 2 * of_keys, d, generator=g, device="cuda", dtype=dtype)  # as a tower projects them
    q, k, v = packed.split((heads, of_keys, of_keys), dim=1)
    q, k, v = (t.transpose(0, 1)[None] for t in (3 * q, k, v))
    config = kernel.Config(keys=keys)
    y = kernel.segment_attention(q, k, v, torch.tensor(ends, device="cuda", dtype=torch.int32), causal=causal, config=config)
    assert y.dtype == dtype
    assert_close(y, exact(q, k, v, ends, causal=causal), dtype)


@hopper
@pytest.mark.gpu
@pytest.mark.usefixtures("nan_memory")
@pytest.mark.parametrize(
    ("dtype", "above"), [(torch.bfloat16, 200), (torch.bfloat16, 90), (torch.float16, 30), (torch.float16, 12)]
)
@pytest.mark.parametrize(("ends", "causal"), [([0, 1300], False), ([0, 300, 5000, 5064], False), ([0, 1300], True)])
def test_segment_attention__where_scores_rise_far_above_those_that_come_first(ends, causal, dtype, above):
    """The first key of every segment, which comes last, has a score so many powers of two above all others, in some rows."""
    q, k, v = (torch.randn(1, 8, ends[-1], 80, device="cuda", dtype=dtype) for _ in range(3))
    rise = torch.zeros(8, ends[-1], 1, device="cuda", dtype=torch.bool)
    rise[1, 100:103] = rise[3, ::200] = rise[6, 140:] = True
    q = torch.where(rise, torch.full_like(q, 2.0), q)
    for start in ends[:-1]:
        k[:, :, start] = above * math.log(2) * 80**0.5 / 160
    y = kernel.segment_attention(q, k, v, torch.tensor(ends, device="cuda"), causal=causal)
    assert_close(y, exact(q, k, v, ends, causal=causal), dtype)


@hopper
@pytest.mark.gpu
def test_segment_attention__items_are_handed_out_in_every_launch_and_replay():
    """More of them than programs; what hands them out is at its beginning again behind each."""
    ends = [0, 3000, 3100, 9000]
    edges = torch.tensor(ends, device="cuda")
    q, k, v = (torch.randn(1, 16, ends[-1], 80, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    want = kernel.segment_attention(q, k, v, edges)
    assert_close(want[:, :2], exact(q[:, :2], k[:, :2], v[:, :2], ends, causal=False), torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = kernel.segment_attention(q, k, v, edges)
    for _ in range(20):
        y.fill_(torch.nan)
        graph.replay()
        assert torch.equal(y, want)
        assert torch.equal(kernel.segment_attention(q, k, v, edges), want)


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("ends", [[0, 1, 300, 301, 700], [0, 64, 128, 192, 256, 320], [0, 256, 1000]])
def test_segment_attention__keeps_segments_apart(ends):
    """NaN in every second segment leaves the others as they were, to the bit."""
    q, k, v = (torch.randn(1, 2, ends[-1], 80, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    edges = torch.tensor(ends, device="cuda")
    want = kernel.segment_attention(q, k, v, edges)
    for of in (0, 1):
        bad = torch.zeros(ends[-1], 1, dtype=torch.bool, device="cuda")
        for a, b in list(pairwise(ends))[of::2]:
            bad[a:b] = True
        y = kernel.segment_attention(*(t.masked_fill(bad, torch.nan) for t in (q, k, v)), edges)
        assert y.isnan().all(-1).eq(bad[:, 0]).all()
        assert torch.equal(y.masked_fill(bad, 0), want.masked_fill(bad, 0))


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda q, k, v, e: (q.float(), k, v, e), "of one type"),
        (lambda q, k, v, e: (q, k[:, :, :7], v[:, :, :7], e), "one packed sequence"),
        (lambda q, k, v, e: (q[..., :20], k[..., :20], v[..., :20], e), "a multiple of 8"),
        (lambda q, k, v, e: (q.mT.contiguous().mT, k, v, e), "multiples of 16 bytes"),
        (lambda q, k, v, e: (q, k, v, e.float()), "ends of segments"),
    ],
)
def test_segment_attention__says_why_not(change, why):
    q = torch.zeros(1, 2, 8, 64, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(ValueError, match=why):
        kernel.segment_attention(*change(q, q, q, torch.tensor([0, 8], device="cuda")))


@hopper
@pytest.mark.gpu
def test_segment_attention__is_what_the_op_runs_for_many_rows(monkeypatch):
    calls = []
    original = kernel.segment_attention
    monkeypatch.setattr(kernel, "segment_attention", lambda *a, **kw: calls.append(a) or original(*a, **kw))
    q, k, v = (torch.randn(1, 2, op.MANY, 80, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    ends = torch.tensor([0, 700, op.MANY], device="cuda", dtype=torch.int32)
    y = torch.ops.mmqc_front.scaled_dot_product_attention(q, k, v, ends, ends, None, False, op.MANY - 700)
    assert len(calls) == 1
    assert_close(y, exact(q, k, v, [0, 700, op.MANY], causal=False), torch.bfloat16)
    with op.check():
        torch.ops.mmqc_front.scaled_dot_product_attention(q, k, v, ends, ends, None, False, op.MANY - 700)
    assert len(calls) == 1


@hopper
@pytest.mark.gpu
def test_segment_attention__first_called_in_front_of_a_capture(monkeypatch):
    """What hands its items out is not of the memory that a graph of Inductor's has for itself."""
    monkeypatch.setattr("mmqc.kernels.shared.split_k._counters", {})
    q, k, v = (torch.randn(1, 2, op.MANY, 80, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    ends = torch.tensor([0, op.MANY], device="cuda", dtype=torch.int32)
    attend = torch.ops.mmqc_front.scaled_dot_product_attention
    compiled = torch.compile(lambda q: attend(q * 2, k, v, ends, ends, None, False, op.MANY) + 1, mode="reduce-overhead")
    want = attend(q * 2, k, v, ends, ends, None, False, op.MANY) + 1
    monkeypatch.setattr("mmqc.kernels.shared.split_k._counters", {})
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        assert_close(compiled(q), want, torch.bfloat16)
