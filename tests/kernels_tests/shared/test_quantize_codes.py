"""Floats next to 1.5 * 2^23 as codes: all that there are between two of them, and what lies outside."""

import offline
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmqc.kernels.shared.launch import Launch
from mmqc.kernels.shared.quantize_codes import NEAR, byte_of, clamped_byte

BLOCK = 64
same_device = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@triton.jit
def clamped_kernel(x_ptr, y_ptr, LOW: tl.constexpr, HIGH: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y_ptr + at, clamped_byte(tl.load(x_ptr + at) + NEAR, LOW, HIGH))


@triton.jit
def byte_kernel(x_ptr, y_ptr, FIRST: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y_ptr + at, byte_of(tl.load(x_ptr + at), FIRST))


def made(width: str):
    """A warp's launch, for offline.py."""
    n = int(width)
    constants = dict(LOW=-128.0, HIGH=127.0, N=n)
    return Launch(
        clamped_kernel, (1,), dict(x_ptr=torch.zeros(n), y_ptr=torch.zeros(n, dtype=torch.int8)), constants, ("y_ptr",), 1, 1
    )


def codes(kernel, x, *constants):
    y = torch.full(x.shape, 99, dtype=torch.int8, device=x.device)
    kernel[(1,)](x, y, *constants, x.numel())
    return y


@same_device
@given(
    values=st.lists(st.floats(allow_nan=False, width=32), min_size=BLOCK, max_size=BLOCK),
    bits=st.integers(2, 8),
)
def test_clamped_byte__is_rounded_and_cut_off(values, bits, device):
    """Infinities and numbers that are larger than the one added, too."""
    x, low, high = torch.tensor(values, device=device), -(2.0 ** (bits - 1)), 2.0 ** (bits - 1) - 1
    assert torch.equal(codes(clamped_kernel, x, low, high), x.round().clamp(low, high).to(torch.int8))


@same_device
@given(halves=st.lists(st.integers(0, 510), min_size=BLOCK, max_size=BLOCK), below=st.booleans())
def test_byte_of__rounds_once(halves, below, device):
    """Halves and the numbers right beneath them: what is added must not move one to the other."""
    x = torch.tensor(halves, device=device) / 2
    x = torch.nextafter(x, torch.zeros_like(x)) if below else x
    assert torch.equal(codes(byte_kernel, x, -128.0), (x.round() - 128).to(torch.int8))


@pytest.mark.parametrize("width", [255, 1111])
def test_clamped_byte__is_cut_off_where_codes_are_stored_one_by_one(width):
    """No conversion of the float that has one in its low byte, which saturates."""
    code = offline.instructions("test_norm_quantize", width, False)
    assert "STG" in code
    assert "F2IP" not in code


def test_clamped_byte__costs_no_operation_of_its_own():
    """Of 64 codes a lane two integer comparisons each, in place of the floats', and no sum: they took a tenth of a norm's time."""
    code = offline.instructions("test_quantize_codes", 2048)
    assert code.count(" VIMNMX ") + code.count(" IMNMX ") == 2 * 64
    assert code.count(" IADD3 ") + code.count(" VIADD ") < 16
