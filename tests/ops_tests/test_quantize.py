import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mmqc.ops  # noqa: F401

quantize = torch.ops.mmqc.quantize


@settings(max_examples=60)
@given(seed=st.integers(0, 2**31), bits=st.integers(2, 8), width=st.sampled_from([1, 17, 63, 100, 257]), log_scale=st.floats(-6, 4))
def test_quantize__error_is_at_most_half_a_step(seed: int, bits: int, width: int, log_scale: float) -> None:
    g = torch.Generator().manual_seed(seed)
    scale = torch.tensor([10.0**log_scale])
    top = 2 ** (bits - 1)
    x = (torch.rand(5, width, generator=g, dtype=torch.float64) * (2 * top - 1) - top) * scale.double()
    q = quantize(x, scale, None, bits)
    assert q.dtype == torch.int8
    assert q.min() >= -top
    assert q.max() <= top - 1
    assert ((q.double() * scale.double() - x).abs() <= scale.double() * (0.5 + 1e-9)).all()


def test_quantize__rounds_half_to_even_and_saturates() -> None:
    x = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, 126.6, 127.4, 500.0, -128.4, -500.0, float("inf")]])
    assert quantize(x, torch.ones(1), None, 8).tolist() == [[0, 2, 2, 0, -2, 127, 127, 127, -128, -128, 127]]
    assert quantize(x, torch.ones(1), None, 4).tolist() == [[0, 2, 2, 0, -2, 7, 7, 7, -8, -8, 7]]


def test_quantize__each_row_uses_the_scale_of_its_modality() -> None:
    x = torch.randn(2, 5, 16)
    visual = torch.tensor([[0, 1, 1, 0, 0], [1, 0, 0, 0, 1]], dtype=torch.bool)
    q = quantize(x, torch.tensor([0.01, 0.1]), visual, 8)
    for where, scale in ((visual, 0.1), (~visual, 0.01)):
        assert torch.equal(q[where], quantize(x[where], torch.tensor([scale]), None, 8))


def test_quantize__mask_broadcasts() -> None:
    x = torch.randn(2, 5, 16)
    visual = torch.tensor([[True], [False]])
    assert torch.equal(
        quantize(x, torch.tensor([0.01, 0.1]), visual, 8), quantize(x, torch.tensor([0.01, 0.1]), visual.expand(2, 5), 8)
    )


def test_quantize__low_precision_input_is_divided_in_float32() -> None:
    x = torch.randn(7, 100, dtype=torch.bfloat16)
    assert torch.equal(quantize(x, torch.tensor([0.013]), None, 8), quantize(x.float(), torch.tensor([0.013]), None, 8))


def test_quantize__strided_input_gives_contiguous_codes() -> None:
    x = torch.randn(16, 7).T
    assert quantize(x, torch.ones(1), None, 8).is_contiguous()


@pytest.mark.parametrize(
    ("scale", "visual", "message"),
    [
        (torch.ones(2), None, "needs visual mask"),
        (torch.ones(1), torch.ones(3, dtype=torch.bool), "takes no visual mask"),
        (torch.ones(3), None, r"shape \[1\], or \[2\]"),
    ],
)
def test_quantize__refuses(scale: torch.Tensor, visual: torch.Tensor | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quantize(torch.randn(3, 4), scale, visual, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_quantize__opcheck(dtype: torch.dtype) -> None:
    x, visual = torch.randn(2, 3, 10, dtype=dtype), torch.rand(2, 3) > 0.5
    torch.library.opcheck(quantize.default, (x, torch.tensor([0.1]), None, 8))
    torch.library.opcheck(quantize.default, (x, torch.tensor([0.1, 0.3]), visual, 4))
    torch.library.opcheck(quantize.default, (x.clone().requires_grad_(), torch.tensor([0.1]), None, 8))


FLOAT8 = torch.float8_e4m3fn


def test_quantize__float8_is_torchs_cast_of_the_clamped_quotient() -> None:
    x = torch.randn(9, 65, dtype=torch.bfloat16) * 40
    x[0, :3] = torch.tensor([float("inf"), -1e9, 0.0])
    q = quantize(x, torch.tensor([0.07]), None, 8, FLOAT8)
    assert q.dtype == FLOAT8
    assert torch.equal(q.float(), (x.float() / torch.tensor([0.07])).clamp(-448, 448).to(FLOAT8).float())
    assert q[0, :3].float().tolist() == [448.0, -448.0, 0.0]


def test_quantize__float8_by_modality_and_only_of_8_bits() -> None:
    x, visual = torch.randn(2, 5, 16), torch.rand(2, 5) > 0.5
    q = quantize(x, torch.tensor([0.01, 0.1]), visual, 8, FLOAT8).float()
    for where, scale in ((visual, 0.1), (~visual, 0.01)):
        assert torch.equal(q[where], quantize(x[where], torch.tensor([scale]), None, 8, FLOAT8).float())
    for bits, code in ((4, FLOAT8), (8, torch.float8_e5m2)):
        with pytest.raises(ValueError, match="codes are int8, or"):
            quantize(x, torch.ones(1), None, bits, code)
