"""How close two floating-point results must be: the only tolerances in the tests (a literal rtol= or atol= is an error).

``assert_close(actual, expected)`` compares in the wider dtype relative to the largest entry of ``expected``: a Hadamard transform
and a matmul mix all channels, so an entry near zero inherits the rounding of the large ones.
"""

import torch

TOLERANCE: dict[torch.dtype, tuple[float, float]] = {  # (rtol, atol), atol in units of the largest entry
    torch.float64: (1e-12, 1e-12),  # eps 2e-16: sums of some thousand terms in another order
    torch.float32: (1e-5, 1e-5),  # eps 1.2e-7: the same, and libm against vectorised exp in the activations
    torch.bfloat16: (8e-3, 4e-3),  # eps 7.8e-3: one rounding of a float32 result that may fall on either side
    torch.float16: (1e-3, 5e-4),  # eps 9.8e-4: as above
}


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype | None = None) -> None:
    """Assert that ``actual`` equals ``expected`` to the tolerance of ``dtype`` (default: that of ``actual``)."""
    rtol, atol = TOLERANCE[dtype or actual.dtype]
    actual, expected = actual.detach().double(), expected.detach().double()
    largest = expected.abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol * largest)


def few_differ(got: torch.Tensor, want: torch.Tensor, most: float) -> None:
    """Assert that integer codes differ by one at most, in ``most`` of them (and one more): a last bit moved what was rounded."""
    off = (got.int() - want.int()).abs()
    far = (off > 1).nonzero()
    assert not len(far), f"{len(far)} of {off.numel()}, as at {(at := far[0].tolist())}: {got[tuple(at)]} for {want[tuple(at)]}"
    assert (off > 0).double().mean() <= most + 1.5 / off.numel()


def assert_codes_of(y: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor, dtype: torch.dtype) -> None:
    """Assert that codes [M, N] with scales and offsets [M, 1] are those of y, but for what ``dtype`` loses of it on the way."""
    rtol, atol = TOLERANCE[dtype]
    y, step = y.double(), scale.double()
    far = (q.double() * step + offset.double() - y).abs() - 0.5 * step - rtol * y.abs() - atol * y.abs().max()
    assert far.max() <= 0, f"{far.max().item()} further than half a step, at {divmod(int(far.argmax()), y.shape[1])}"
