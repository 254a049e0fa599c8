import math

import pytest
import torch
from torch import Tensor
from torchao.quantization.granularity import PerGroup

from mmqc.config import WeightSpec
from mmqc.solvers import Quantized, integer_scale, solve
from mmqc.solvers.integer_scale import heuristic_amplifier, overflow_bound, with_integer_scales


def spec(amplifier: object = 1024, bits: int = 4, group: int = 16) -> WeightSpec:
    return WeightSpec(bits, PerGroup(group), amplifier=amplifier)  # type: ignore[arg-type]


def weight(n: int = 9, k: int = 64) -> Tensor:
    g = torch.Generator().manual_seed(n * k)
    return torch.randn(n, k, generator=g) * torch.rand(n, k // 16, generator=g).repeat_interleave(16, 1)


@pytest.mark.parametrize("amplifier", [1, 128, 1024, 8192])
@pytest.mark.parametrize("bits", [4, 8])
def test_integer_scale__the_papers_form_rounds_the_scales_alone(amplifier: int, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integer_scale, "ROUND_AGAIN", False)
    w = weight()
    plain, made = solve(w, WeightSpec(bits, PerGroup(16))), solve(w, spec(amplifier, bits))
    integer, channel = made.integer_scales()
    assert made.amplifier == amplifier
    assert integer.dtype == torch.int32
    assert torch.equal(channel, torch.full((9,), 1 / amplifier))
    assert torch.equal(made.codes, plain.codes)
    for n in range(9):
        for j in range(4):
            t = max(1, round(plain.scale[n, j].item() * amplifier))  # Python's round, ties to even
            assert integer[n, j] == t
            assert made.scale[n, j].item() == t / amplifier


def best(values: list[float], wanted: float, top: int) -> tuple[float, set[int]]:
    """The least squared error in units of 1 / amplifier that an integer step next to ``wanted`` leaves, and the steps."""
    errors = {}
    for t in {max(1, math.floor(wanted)), max(1, math.ceil(wanted))}:
        codes = [min(max(round(v / t), -top), top - 1) for v in values]
        errors[t] = sum((v - q * t) ** 2 for v, q in zip(values, codes, strict=True))
    least = min(errors.values())
    return least, {t for t, e in errors.items() if e == least}


@pytest.mark.parametrize("amplifier", [8, 128, 1024])
@pytest.mark.parametrize("bits", [4, 8])
def test_integer_scale__codes_are_rounded_to_the_step(amplifier: int, bits: int) -> None:
    w = weight()
    plain, made = solve(w, WeightSpec(bits, PerGroup(16))), solve(w, spec(amplifier, bits))
    integer = made.integer_scales()[0]
    for n in range(9):
        for j in range(4):
            wanted = plain.scale[n, j].item() * amplifier
            values = [q * wanted for q in plain.codes[n, 16 * j : 16 * j + 16].tolist()]
            least, steps = best(values, wanted, 2 ** (bits - 1))
            assert integer[n, j].item() in steps
            part = made.codes[n, 16 * j : 16 * j + 16].tolist()
            error = sum((v - q * integer[n, j].item()) ** 2 for v, q in zip(values, part, strict=True))
            assert error == pytest.approx(least)
    assert integer.min() >= 1


def test_integer_scale__large_steps_keep_the_codes() -> None:
    plain, made = solve(weight(), WeightSpec(4, PerGroup(16))), solve(weight(), spec(2**16))
    assert torch.equal(made.codes, plain.codes)
    assert torch.equal(made.integer_scales()[0], (plain.scale.double() * 2**16).round().int())


def test_integer_scale__heuristic_is_the_papers_listing() -> None:
    for smallest in (3.0, 1.0, 0.999, 0.01, 2.0**-10, 0.9 * 2.0**-10):
        scale, amplifier = torch.tensor([[smallest, 5.0], [0.0, -7.0]]), 1
        while smallest * amplifier < 1:
            amplifier *= 2
        assert heuristic_amplifier(scale) == amplifier
    made = solve(weight(), spec("heuristic"))
    smallest = solve(weight(), WeightSpec(4, PerGroup(16))).scale.min().item()
    assert smallest * made.amplifier >= 1 > smallest * made.amplifier / 2
    assert heuristic_amplifier(torch.zeros(2, 2)) == 1


def worst_sum(codes: Tensor, integer: Tensor, group: int) -> int:
    """The largest |sum| that chosen 8-bit inputs reach, where each group's inputs may aim at either sign."""
    found = 0
    for q_row, t_row in zip(codes.tolist(), integer.tolist(), strict=True):
        total = 0
        for j, t in enumerate(t_row):
            part = q_row[group * j : group * (j + 1)]
            ends = [sum((127 if sign * q > 0 else -128) * q for q in part) for sign in (1, -1)]
            total += max(map(abs, ends)) * abs(t)
        found = max(found, total)
    return found


@pytest.mark.parametrize("bits", [4, 8])
def test_integer_scale__bound_is_what_inputs_can_reach(bits: int) -> None:
    top = 2 ** (bits - 1)
    codes = torch.randint(-top, top, (7, 40), dtype=torch.int8)
    integer = torch.randint(-900, 1000, (7, 3))
    assert overflow_bound(codes, integer, 16) == worst_sum(codes, integer, 16)
    # reached: one sign throughout, inputs at the end of their range
    full = torch.full((2, 32), -top, dtype=torch.int8)
    x = torch.full((32,), -128, dtype=torch.int64)
    reached = (x * full[0]).reshape(2, 16).sum(1) @ torch.tensor([3, 5])
    assert overflow_bound(full, torch.tensor([[3, 5], [1, 1]]), 16) == reached


def test_integer_scale__a_layer_that_could_overflow_keeps_float_scales() -> None:
    codes = torch.full((3, 64), -8, dtype=torch.int8)
    per_unit = 128 * 8 * 64  # of the sum, per unit of the scales
    limit = 2**31 // per_unit  # the smallest scale that is too large
    for t, fits in ((limit - 1, True), (limit, False)):
        scale = torch.ones(3, 4)
        scale[1] = t
        made = with_integer_scales(Quantized(codes, scale), spec(1))
        assert (made.amplifier == 1) == fits
        assert ("could overflow" in made.note) != fits
        assert torch.equal(made.scale, scale)
    for values, why in ((torch.zeros_like(codes), "beyond 24 bits"), (codes, "a sum can reach 1.9")):
        huge = with_integer_scales(Quantized(values, torch.full((3, 4), 3.0e30)), spec(1))
        assert huge.amplifier == 0
        assert why in huge.note


def test_integer_scale__small_negative_and_zero_scales() -> None:
    codes = torch.tensor([[7, -8, 3, 1, 7, -8, 3, 1, 7, -8, 3, 1]], dtype=torch.int8)
    scale = torch.tensor([[0.3 / 1024, -5.0 / 1024, 0.0]])
    made = with_integer_scales(Quantized(codes, scale, "before", group_size=4), spec(1024, group=4))
    assert made.integer_scales()[0].tolist() == [[1, -5, 0]]
    assert made.codes.tolist()[0][:8] == [2, -2, 1, 0, 7, -8, 3, 1]  # the first group times 0.3, rounded
    assert made.note.startswith("before; integer scales: amplifier 1024")
    assert "1 of 3 scales are below 1/2048" in made.note
    wanted = Quantized(codes, scale, group_size=4).dequantize()
    assert ((made.dequantize() - wanted).abs() <= 0.5 / 1024).all()


def test_integer_scale__last_group_may_be_short() -> None:
    codes = torch.randint(-8, 8, (5, 20), dtype=torch.int8)
    made = with_integer_scales(Quantized(codes, torch.tensor([[0.5, 1e-9]]).repeat(5, 1)), spec(4))
    assert made.codes.shape == codes.shape
    assert made.codes[:, 16:].abs().max() == 0
    assert torch.equal(made.codes[:, :16], codes[:, :16])


def test_integer_scale__refuses() -> None:
    codes = torch.zeros(2, 16, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"a\.weight: integer scales need group scales"):
        with_integer_scales(Quantized(codes, torch.ones(2)), spec(), name="a.weight")
    with pytest.raises(ValueError, match="NaN or infinite"):
        with_integer_scales(Quantized(codes, torch.full((2, 1), torch.nan)), spec())
    with pytest.raises(ValueError, match="asks for no integer scales"):
        with_integer_scales(Quantized(codes, torch.ones(2, 1)), WeightSpec(4, PerGroup(16)))


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_progressive__rows_have_a_step_and_products_fit_8_bits(bits: int, sign: float) -> None:
    w, top, most = weight(), 2 ** (bits - 1), {2: 63, 3: 31, 4: 15}[bits]
    plain = solve(w, WeightSpec(bits, PerGroup(16)))
    plain = Quantized(plain.codes, sign * plain.scale, group_size=16)
    made = with_integer_scales(plain, spec("progressive", bits))
    t, step = made.integer_scales()
    assert (made.integer, made.amplifier, t.dtype, step.dtype) == (True, 0, torch.int8, torch.float32)
    assert "up to" in made.note
    for n in range(9):
        largest = max(abs(s) for s in plain.scale[n].tolist())
        assert step[n].item() == pytest.approx(largest / most, rel=2**-23)
        for j in range(4):
            wanted = plain.scale[n, j].item() / step[n].item()
            values = [q * abs(wanted) for q in plain.codes[n, 16 * j : 16 * j + 16].tolist()]
            least, steps = best(values, abs(wanted), top)
            got = abs(t[n, j].item())
            assert got in steps or abs(got - wanted) < 1e-5
            assert sum(
                (v - q * got) ** 2 for v, q in zip(values, made.codes[n, 16 * j : 16 * j + 16].tolist(), strict=True)
            ) == pytest.approx(least, rel=1e-4, abs=1e-9)
    products = made.codes.int() * t.int().repeat_interleave(16, 1)
    assert products.abs().max() <= 127
    assert t.abs().max() == most
    assert torch.equal(made.dequantize(), made.codes * made.by_channel((t.double() * step.double()[:, None]).float()))


def test_progressive__zero_rows_and_rows_that_could_overflow() -> None:
    codes = torch.full((2, 32), 7, dtype=torch.int8)
    made = with_integer_scales(Quantized(codes, torch.tensor([[0.0, 0.0], [1e-3, 2e-3]])), spec("progressive"))
    assert made.integer_scales()[0].tolist() == [[0, 0], [8, 15]]
    assert made.integer_scales()[1][0] == 1
    wide = Quantized(torch.full((1, 2**18), 7, dtype=torch.int8), torch.ones(1, 2**14))
    kept = with_integer_scales(wide, spec("progressive"))
    assert not kept.integer
    assert "could overflow" in kept.note
