"""kv_attention against the op's reference, which dequantizes nothing either; what no token owns is NaN."""

import pytest
import torch
from kv_cases import packed_case
from tolerance import assert_close

from mmqc.ops import kv_attention as op

kernel = pytest.importorskip("mmqc.kernels.kv_attention")

RAGGED = ((70, 0, 1, 33), (3, 20, 1, 0))


def check(case: dict, config=None) -> None:
    y, lse = kernel.kv_attention(*case.values(), config=config)
    want, want_lse = op.reference(*case.values())
    assert y.dtype == want.dtype
    assert_close(y, want, torch.bfloat16)  # q and p are rounded to float16 in between
    some = want_lse.isfinite()
    assert torch.equal(some, lse.isfinite())
    assert_close(lse[some], want_lse[some], torch.float16)


@pytest.mark.parametrize("tau", [(0, 0), (0, 3), (2, 1)])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_kv_attention__ragged_lengths(bits, tau, device):
    check(packed_case(*RAGGED, bits=bits, tau=tau, width=64, dtype=torch.float16, device=device))


@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("width", [64, 80, 96, 128])
def test_kv_attention__heads_and_widths(width, group, device):
    check(packed_case((37,), (5,), bits=2, width=width, group=group, dtype=torch.float16, device=device))


@pytest.mark.parametrize("bits", [1, 4])
def test_kv_attention__values_by_token(bits, device):
    check(packed_case(*RAGGED, bits=bits, values="token", tau=(0, 1), width=32, device=device))


@pytest.mark.parametrize(("visual", "text"), [(1, 0), (0, 1), (16, 64), (2999, 130), (513, 1)])
def test_kv_attention__one_to_thousands_of_tokens(visual, text, device):
    config = kernel.table(1).replace(rows=32, text=32)
    case = packed_case((visual,), (text,), heads=1, group=4, bits=1, tau=(1, 3), width=32, device=device, room=7)
    check(case, config)


def test_kv_attention__says_what_it_cannot_do(device):
    case = packed_case((4,), (4,), width=16, queries=2, device=device)
    with pytest.raises(ValueError, match="one query a head, not 2"):
        kernel.kv_attention(*case.values())
