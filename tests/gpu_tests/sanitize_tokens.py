"""Calls of sanitize.py: quantization by token, the linear in two precisions, GPTQ's block, the packed cache; and what all share."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/support")]

from tolerance import assert_close  # noqa: E402

from mmqc.kernels.hadamard import basis_quantize_per_token, hadamard_quantize  # noqa: E402
from mmqc.kernels.hadamard.hadamard_plan import hadamard_plan  # noqa: E402
from mmqc.kernels.hadamard.hadamard_tiles import Written  # noqa: E402
from mmqc.kernels.kv.kv_round_keys import kv_round_keys  # noqa: E402
from mmqc.kernels.kv.kv_rows_attention import kv_rows_attention  # noqa: E402
from mmqc.kernels.kv.kv_token_attention import TokenConfig, kv_token_attention  # noqa: E402
from mmqc.kernels.matmul.configs import MatmulConfig as Tile  # noqa: E402
from mmqc.kernels.matmul.mixed_matmul import Weight, mixed_matmul  # noqa: E402
from mmqc.kernels.rows import norm_quantize_per_token, quantize_per_token  # noqa: E402
from mmqc.kernels.rows.norm_quantize import Norm  # noqa: E402
from mmqc.kernels.rows.power_clip import power_clip  # noqa: E402
from mmqc.kernels.shared.plan import rows_like  # noqa: E402
from mmqc.kernels.shared.row_scale import Rows  # noqa: E402
from mmqc.kernels.solvers.gptq_block import gptq_block  # noqa: E402
from mmqc.ops import gptq_block as gptq_block_op  # noqa: E402
from mmqc.ops import kv_round_keys as keys_op  # noqa: E402
from mmqc.ops import kv_rows_attention as rows_op  # noqa: E402
from mmqc.ops import kv_token_attention as text_op  # noqa: E402
from mmqc.ops import mixed_matmul as mixed_op  # noqa: E402
from mmqc.ops import norm_quantize_per_token as norm_op  # noqa: E402
from mmqc.ops import power_clip as power_clip_op  # noqa: E402
from mmqc.ops import quantize_per_token as per_token_op  # noqa: E402
from mmqc.ops.kv_rows import to_rows  # noqa: E402
from mmqc.ops.kv_words import unpack_words  # noqa: E402
from mmqc.ops.pack import pack_int4  # noqa: E402


class Place(NamedTuple):
    """Where the kernels run, and in which float type."""

    device: torch.device
    dtype: torch.dtype


def integers(low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, dtype=torch.int8)


def assert_codes(got: Tensor, want: Tensor, rate: float) -> None:
    """Codes differ by one at most, and only at the given rate: where a quotient lies on a rounding boundary."""
    off = (got.cpu().int() - want.round().clamp(-128, 127).int()).abs()
    assert off.max() <= 1, f"codes off by up to {off.max()}"
    assert (off > 0).double().mean() <= rate + 1.5 / off.numel(), f"{(off > 0).double().mean():.1e} of the codes off by one"


def there(place: Place, **given: Tensor | None) -> dict[str, Any]:
    """Arguments of a launcher, on the device."""
    return {name: t.detach().to(place.device) for name, t in given.items() if t is not None}


def poison(place: Place, m: int, n: int) -> Tensor:
    return torch.full((m, n), float("nan"), dtype=place.dtype).to(place.device)


SMALL = Tile(64, 64, 64, 4, 3, variant="nested")


def mixed(place: Place, widths: list[int], packed: bool, n: int = 101, tile: Tile = SMALL) -> None:
    bits = [4, 8][: len(widths)]
    x = torch.randn(70, sum(widths)).to(place.dtype)
    got = quantize_per_token.plan(x.to(place.device), widths, bits).run()
    want = per_token_op.reference(x, None, widths, bits)
    assert torch.equal(got.q.cpu(), want[0]), "codes differ"
    assert torch.equal(got.scale.cpu(), want[1]), "scales differ"
    codes = [integers(-(2 ** (b - 1)), 2 ** (b - 1), n, w) for w, b in zip(widths, bits, strict=True)]
    scale, sums = torch.rand(n, len(bits)) * 0.01 + 0.01, torch.stack([c.sum(1, dtype=torch.int32) for c in codes], 1)
    stored = [pack_int4(codes[0]), *codes[1:]]
    low, *high = [c.to(place.device) for c in ([stored[0], *codes[1:]] if packed else codes)]
    weight = Weight(low, high[0] if high else None, scale.to(place.device), sums.to(place.device))
    out = poison(place, 70, n)
    mixed_matmul(got, weight, out=out, out_dtype=place.dtype, config=tile)
    assert_close(out.cpu(), mixed_op.reference(*want, stored, scale, sums, None, widths, bits, torch.float64))


def fused(place: Place) -> None:
    """Per-token quantization behind a norm, a transform and a basis."""
    widths, bits = [100, 208, 48], [2, 4, 8]
    x, r = (torch.randn(37, 356).to(place.dtype) for _ in "xr")
    order = torch.randperm(356)
    given = there(place, x=x, r=r, order=order)
    norm = Norm(1e-6, residual=given["r"])
    got, total = norm_quantize_per_token.plan(given["x"], norm, given["order"], widths, bits).run()
    want = norm_op.reference(x, r, None, None, 1e-6, False, order, widths, bits)
    assert_codes(got.q, want[0].double(), 0.05)
    assert total is not None
    assert torch.equal(total.cpu(), want[3]), "x + r differs"
    x, up = torch.randn(5, 2368).to(place.dtype), torch.randn(5, 2368).to(place.dtype)
    x, up = x.to(place.device), up.to(place.device)
    matrices, got, whole = hadamard_plan(2368, x.device, x.dtype), Rows.new(rows_like(x), 2368, 1), Written(torch.empty_like(x))
    for written in (whole, Written(got.q, None, got.scale, got.offset, 4)):
        hadamard_quantize.rows_launch(x, up, written, matrices, programs=2).run()
    y = whole.y.cpu()
    assert torch.equal(got.q.cpu(), per_token_op.reference(y, None, [2368], [4])[0]), "codes differ"
    x, basis = torch.randn(70, 80).to(place.dtype), torch.eye(80)[torch.randperm(80)].to(place.dtype)
    got = basis_quantize_per_token.plan(x.to(place.device), basis.to(place.device), [70, 10], [4, 8]).run()
    assert torch.equal(got.q.cpu(), per_token_op.reference(x @ basis, None, [70, 10], [4, 8])[0]), "codes differ"


def sweep(place: Place, shape: tuple[int, int], asymmetric: bool) -> None:
    size, n = shape  # halves of small integers: no sum rounds, so that codes and errors are equal
    w, scale = integers(-60, 61, size, n) / 2.0, torch.ones(size, n)
    u = torch.eye(size) + torch.diag_embed(torch.full((size - 1,), 0.5), 1)
    zero = integers(-3, 4, size, n).float() if asymmetric else None
    codes, errors = gptq_block(*there(place, w=w, u=u, s=scale).values(), None if zero is None else zero.to(place.device), 4)
    want = gptq_block_op.reference(w, u, scale, zero, 4)
    assert torch.equal(codes.cpu(), want[0])
    assert_close(errors.cpu(), want[1])


def clips(place: Place, shape: tuple[int, int, int], asymmetric: bool) -> None:
    w, scale = torch.randn(shape), torch.rand(*shape[:2], 1) + 0.2
    zero = integers(-3, 4, *shape[:2], 1).float() if asymmetric else None
    given = (w, scale, zero, torch.rand(shape[1:]) if asymmetric else None)
    found = power_clip(*(None if t is None else t.to(place.device) for t in given), [1.0, 0.8, 0.4], 2.4, 4)
    assert (found.cpu() == power_clip_op.reference(*given, [1.0, 0.8, 0.4], 2.4, 4)).float().mean() > 0.9, "clips differ"


def rounded_text(place: Place, bits: int, width: int, block: int) -> None:
    x = [torch.randn(2, 1, 72, width).to(place.dtype) for _ in range(2)]
    parts = [t for kind in x for t in text_op.quantize_tokens(kind, bits, block)]
    q, count = torch.randn(2, 3, 1, width).to(place.dtype), torch.tensor([70, 9], dtype=torch.int32)
    args = [t.to(place.device) for t in (q, *(t[:, :, 1:] for t in parts), count)]
    y, lse = kv_token_attention(*args, bits, width**-0.5, config=TokenConfig(per_sm=1))
    want, want_lse = text_op.reference(q.double(), *(t[:, :, 1:] for t in parts), count, bits, width**-0.5)
    assert_close(y.cpu(), want)
    assert_close(lse.cpu(), want_lse, place.dtype)


def rows_of_bytes(place: Place, widths: list[int], bits: list[int]) -> None:
    d = sum(widths)
    parts = [per_token_op.reference(torch.randn(2, 1, 71, d), None, widths, bits) for _ in range(2)]
    k, v = (to_rows(*codes, widths, bits)[:, :, :70] for codes in parts)
    q = torch.randn(2, 3, 1, d).to(place.dtype)
    given = there(place, q=q, k_rows=k, v_rows=v)
    y = kv_rows_attention(*given.values(), widths, bits, d**-0.5, config=TokenConfig(per_sm=1))
    assert_close(y.cpu(), rows_op.reference(q.double(), k, v, widths, bits, d**-0.5))


def rounded_keys(place: Place, bits: int, width: int) -> None:
    x, count = torch.randn(2, 1, 45, width).to(place.dtype), torch.tensor([40, 9], dtype=torch.int32)
    order, q = torch.stack([torch.randperm(45)[:40] for _ in range(2)]), torch.randn(1, 64, width)
    args = (x, order, count, q.mT @ q / 64)
    found = kv_round_keys(*(t.to(place.device) for t in args), bits, 0.6, 0.3, 2)
    codes, want = (unpack_words(w.cpu(), bits) for w in (found[0], keys_op.reference(*args, bits, 0.6, 0.3, 2)[0]))
    # A step on the middle between two codes may fall on the other side, and then its token goes its own way.
    assert (codes != want).any(-1).float().mean() < 0.1, "codes differ"
