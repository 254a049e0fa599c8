"""kv_attention against the op's reference, in float64; what no token owns is NaN."""

import pytest
import torch
from kv_cases import packed_case
from tolerance import assert_close

from mmqc.ops import kv_attention as op
from mmqc.ops.kv_words import pack_words

kernel = pytest.importorskip("mmqc.kernels.kv_attention")

RAGGED = ((70, 0, 130), (3, 20, 1))
FEW = kernel.KVConfig(per_sm=1)  # so that a program takes several steps


def floating(t) -> bool:
    return isinstance(t, torch.Tensor) and t.is_floating_point()


def check(case: dict, config=FEW) -> None:
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
    check(packed_case(*RAGGED, heads=heads, bits=bits, tau=tau, width=64, dtype=torch.float16, device=device))


@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("width", [64, 80, 96, 128])
def test_kv_attention__heads_and_widths(width, group, device):
    bits = {64: 1, 80: 2, 96: 4, 128: 8}[width]
    check(packed_case((37,), (5,), heads=1, bits=bits, width=width, group=group, dtype=torch.float16, device=device))


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
        check(case, None)
        check(case)


@pytest.mark.parametrize("tau", [(0, 0), (0, 1)])
@pytest.mark.parametrize("bits", [1, 4])
def test_kv_attention__values_by_token(bits, tau, device):
    case = packed_case(
        *RAGGED, heads=1, bits=bits, values="token", tau=tau, width=32, dtype=torch.float16, device=device
    )
    check(case)


@pytest.mark.parametrize("values", ["channel", "token"])
@pytest.mark.parametrize("bits", [1, 2])
def test_kv_attention__the_largest_score_comes_last(bits, values, device):
    """Every step has a new largest score, and the sums so far are shifted."""
    case = packed_case((450,), (1,), heads=1, bits=bits, values=values, width=64, dtype=torch.float16, device=device)
    rising = torch.linspace(0, 1, 450, device=device) > torch.rand(450, generator=torch.Generator().manual_seed(0)).to(
        device
    )
    codes = rising[None, None, :, None].expand(1, 1, 450, 64) * (2**bits - 1)
    case["k_words"] = pack_words(codes, bits)
    case["k_scale"], case["k_offset"] = torch.full_like(case["k_scale"], 0.3), torch.full_like(case["k_offset"], -0.1)
    case["q"] = case["q"].abs()
    check(case)


@pytest.mark.parametrize(("visual", "text"), [(1, 0), (0, 1), (16, 64), (2999, 130), (513, 1)])
def test_kv_attention__one_to_thousands_of_tokens(visual, text, device):
    case = packed_case((visual,), (text,), heads=1, group=4, bits=1, tau=(1, 3), width=32, device=device, room=7,
                       dtype=torch.float16)  # fmt: skip
    check(case)


@pytest.mark.gpu
def test_kv_attention__forty_thousand_tokens_in_a_captured_graph(device):
    case = packed_case(
        (40000, 7), (300, 1), heads=1, bits=2, tau=(0, 2), width=128, dtype=torch.bfloat16, device=device
    )
    kernel.kv_attention(*case.values())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, lse = kernel.kv_attention(*case.values())
    for counts in ((40000, 7), (12345, 0), (1, 4)):  # read on the device
        case["visual_count"].copy_(torch.tensor(counts))
        graph.replay()
        want, want_lse = op.reference(*case.values())
        assert_close(y, want, torch.bfloat16)
        assert_close(lse, want_lse, torch.float16)


def test_kv_attention__says_what_it_cannot_do(device):
    case = packed_case((4,), (4,), width=16, queries=2, device=device)
    with pytest.raises(ValueError, match="one query a head, not 2"):
        kernel.kv_attention(*case.values())
