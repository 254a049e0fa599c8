"""kv_round_keys against a descent written out for one token at a time, in float64; nearest codes where queries are isotropic."""

import itertools

import pytest
import torch
from tolerance import assert_close
from torch import Tensor

import mmqc.ops  # noqa: F401
from mmqc.ops.kv_words import unpack_words

ops = torch.ops.mmqc


def case(counts: tuple[int, ...], heads: int = 2, width: int = 6) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, order, count, moment: one direction that most queries have, and some noise."""
    length = max(counts) + 3
    x = torch.randn(len(counts), heads, length, width, dtype=torch.float64) + torch.randn(width, dtype=torch.float64)
    order = torch.stack([torch.randperm(length)[: max(counts)] for _ in counts])
    q = torch.randn(heads, 40, 1, dtype=torch.float64) * torch.randn(heads, 1, width, dtype=torch.float64)
    q = q + 0.2 * torch.randn(heads, 40, width, dtype=torch.float64)
    return x, order, torch.tensor(counts, dtype=torch.int32), q.mT @ q / 40


def by_hand(k: Tensor, moment: Tensor, bits: int, shrink: float, damping: float, sweeps: int) -> tuple[Tensor, ...]:
    """Codes [N, D] of one head's tokens, their scale and offset."""
    low, high = k.amin(0), k.amax(0)
    centre, half = (low + high) / 2, (high - low) / 2 * shrink
    scale, offset = 2 * half / (2**bits - 1), centre - half
    h = moment / moment.diagonal().mean() + damping * torch.eye(k.shape[1], dtype=k.dtype)
    codes = ((k - offset) / scale).clamp(0, 2**bits - 1).round()
    for j in range(k.shape[0]):
        for c in [*range(k.shape[1])] * sweeps:

            def loss(u: int, j: int = j, c: int = c) -> float:
                e = codes[j].clone()
                e[c] = u
                e = e * scale + offset - k[j]
                return float(e @ h @ e)

            codes[j, c] = min(range(2**bits), key=loss)
    return codes, scale, offset


@pytest.mark.parametrize("bits", [1, 2])
def test_kv_round_keys__is_the_descent_token_by_token(bits: int) -> None:
    x, order, count, moment = case((7, 0, 4))
    words, scale, offset = ops.kv_round_keys(x, order, count, moment, bits, 0.7, 0.3, 2)
    codes = unpack_words(words, bits)
    for b, h in itertools.product(range(3), range(2)):
        n = int(count[b])
        if n:
            k = x[b, h, order[b, :n]]
            want, *ranges = by_hand(k, moment[h], bits, 0.7, 0.3, 2)
            assert torch.equal(codes[b, h, :n].double(), want)
            for got, expected in zip((scale, offset), ranges, strict=True):
                assert_close(got[b, h, 0], expected)
        assert not codes[b, h, n:].any()


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_kv_round_keys__isotropic_queries_take_the_nearest_codes(bits: int) -> None:
    x, order, count, moment = case((9, 5))
    identity = torch.eye(x.shape[3], dtype=x.dtype).expand_as(moment)
    got = ops.kv_round_keys(x, order, count, identity, bits, 0.6, 0.3, 2)
    for a, b in zip(got, ops.kv_pack(x, order, count, bits, "channel", 0.6, False), strict=True):
        assert torch.equal(a, b)


def test_kv_round_keys__scores_are_nearer_than_with_nearest_codes() -> None:
    x, order, count, moment = case((200,), heads=1, width=16)
    k = x.gather(2, order[:, None, :, None].expand(1, 1, -1, 16))

    def error(words: Tensor, scale: Tensor, offset: Tensor) -> float:
        e = unpack_words(words, 1)[:, :, :200] * scale + offset - k
        return float(((e @ moment) * e).sum())

    near = error(*ops.kv_pack(x, order, count, 1, "channel", 0.6, False))
    assert error(*ops.kv_round_keys(x, order, count, moment, 1, 0.6, 0.3, 2)) < 0.5 * near


def test_kv_round_keys__one_value_errors_and_opcheck() -> None:
    x, order, count, moment = case((4, 3))
    flat = torch.full_like(x, 2.5)
    words, scale, offset = ops.kv_round_keys(flat, order, count, moment, 1, 0.6, 0.3, 2)
    assert torch.equal(unpack_words(words, 1)[:, :, :3] * scale + offset, flat[:, :, :3])
    with pytest.raises(ValueError, match=r"moment is \[H, D, D\]"):
        ops.kv_round_keys(x, order, count, moment[:1], 1, 0.6, 0.3, 2)
    args = (x.float(), order, count, moment.float(), 1, 0.6, 0.3, 1)
    torch.library.opcheck(ops.kv_round_keys.default, args)
