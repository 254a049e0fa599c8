"""kv_attention against softmax attention over dequantized tokens, one sequence and head at a time, in float64."""

from typing import Any

import pytest
import torch
from kv_cases import dequantized, packed_case
from tolerance import assert_close

import mmqc.ops  # noqa: F401

ops = torch.ops.mmqc
RAGGED = ((17, 0, 5), (3, 4, 0))


def by_hand(c: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    k_all, v_all = dequantized(c)
    q = c["q"]
    group = q.shape[1] // k_all.shape[1]
    y, lse = torch.zeros_like(q), torch.full(q.shape[:3], -torch.inf)
    for b in range(q.shape[0]):
        n, m = int(c["visual_count"][b]), int(c["text_count"][b])
        for h in range(q.shape[1]):
            k, v = k_all[b, h // group, :n], v_all[b, h // group, :n]
            k_text, v_text = c["k_text"][b, h // group, :m], c["v_text"][b, h // group, :m]
            for i in range(q.shape[2]):
                x = c["scaling"] * (k @ q[b, h, i])
                if n and (c["tau1"] or c["tau2"]):
                    low, high = x.min(), x.max()
                    to = torch.stack((low - c["tau1"], torch.maximum(low - c["tau1"], high - c["tau2"])))
                    x = to[0] + (to[1] - to[0]) * ((x - low) / (high - low) if high > low else torch.zeros_like(x))
                scores = torch.cat((x, c["scaling"] * (k_text @ q[b, h, i])))
                if len(scores):
                    y[b, h, i] = scores.softmax(0) @ torch.cat((v, v_text))
                    lse[b, h, i] = scores.logsumexp(0)
    return y, lse


@pytest.mark.parametrize("tau", [(0, 0), (0, 3), (3, 0), (1, 2), (3, 3)])
@pytest.mark.parametrize("values", ["channel", "token"])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_kv_attention__is_softmax_over_dequantized_tokens(bits: int, values: str, tau: tuple[float, float]) -> None:
    c = packed_case(*RAGGED, bits=bits, values=values, tau=tau, dtype=torch.float64)
    y, lse = ops.kv_attention(*c.values())
    want, want_lse = by_hand(c)
    assert_close(y, want)
    assert_close(lse, want_lse.float())


@pytest.mark.parametrize("group", [1, 4, 8])
def test_kv_attention__grouped_queries_and_several_of_them(group: int) -> None:
    c = packed_case((33,), (6,), group=group, heads=3, queries=4, tau=(0, 2), dtype=torch.float64)
    assert_close(ops.kv_attention(*c.values())[0], by_hand(c)[0])


def test_kv_attention__an_empty_sequence_is_zero() -> None:
    c = packed_case((0, 4), (0, 2), dtype=torch.float64)
    y, lse = ops.kv_attention(*c.values())
    assert not y[0].any()
    assert (lse[0] == -torch.inf).all()
    assert lse[1].isfinite().all()


def test_kv_attention__calibration_never_turns_the_order_round() -> None:
    """With tau2 > tau1 and scores closer together than that, the paper's map has a negative slope."""
    from mmqc.ops.kv_attention import calibrate

    used = torch.ones(1, 5, dtype=torch.bool)
    x = torch.tensor([[0.1, 0.9, 0.3, 0.5, 0.2]], dtype=torch.float64)
    for tau in ((0, 3), (1, 2), (0, 1), (2, 3)):
        g = calibrate(x, used, *tau)[0]
        assert (g.argsort(stable=True)[[0, -1]] == x[0].argsort()[[0, -1]]).all() or (g == g[0]).all()
        assert (g[x[0].argsort()].diff() >= 0).all()
    wide = 10 * x
    want = (wide - 1) * (8 - 2) / 8 + 1 - 1
    assert_close(calibrate(wide, used, 1, 3), want)
    assert torch.equal(calibrate(x, used, 0, 0), x)


def test_kv_attention__opcheck_and_errors() -> None:
    c = packed_case(*RAGGED, tau=(0, 3))
    torch.library.opcheck(ops.kv_attention.default, tuple(c.values()))
    with pytest.raises(ValueError, match="do not fit"):
        ops.kv_attention(*{**c, "v_words": c["v_words"].mT}.values())
    with pytest.raises(ValueError, match="1, 2, 4 or 8 bits"):
        ops.kv_attention(*{**c, "bits": 3}.values())
