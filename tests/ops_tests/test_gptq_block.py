"""The op against GPTQ with an explicit inverse of what is left of H at each step."""

import pytest
import torch
from tolerance import assert_close

import mmqc.ops  # noqa: F401

op = torch.ops.mmqc.gptq_block.default


def problem(size: int, n: int, bits: int, asymmetric: bool | str, dtype: torch.dtype = torch.float64):
    g = torch.Generator().manual_seed(size)
    x = torch.randn(4 * size, size, generator=g, dtype=torch.float64) + 0.5
    h = x.T @ x + torch.eye(size, dtype=torch.float64)
    u = torch.linalg.cholesky(torch.linalg.inv(h), upper=True)
    w = torch.randn(size, n, generator=g, dtype=torch.float64)
    scale = (torch.rand(size, n, generator=g, dtype=torch.float64) + 0.5) / 2**bits
    zero = torch.randint(-2, 3, (size, n), generator=g).double() if asymmetric else None
    zero = zero + torch.rand(size, n, generator=g, dtype=torch.float64) if zero is not None and asymmetric == "between" else zero
    return h, *(None if t is None else t.to(dtype) for t in (w, u, scale, zero))


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("asymmetric", [False, True, "between"])
@pytest.mark.parametrize("size", [1, 7, 20])
def test_gptq_block__equals_surgery_with_explicit_inverses(size, asymmetric, bits):
    h, w, u, scale, zero = problem(size, 5, bits, asymmetric)
    codes, errors = op(w, u, scale, zero, bits)
    left, rest = list(range(size)), w.clone()
    for i in range(size):
        inverse = torch.linalg.inv(h[left][:, left])
        z = 0 if zero is None else zero[i]
        q = (rest[i] / scale[i] + z).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        assert torch.equal(codes[i].double(), q)
        off = rest[i] - (q - z) * scale[i]
        assert_close(errors[i], off / inverse[0, 0].sqrt())
        rest[left] -= off * inverse[0][:, None] / inverse[0, 0]
        left = left[1:]


def test_gptq_block__opcheck():
    _, w, u, scale, zero = problem(6, 5, 4, True, torch.float32)
    for z in (None, zero):
        torch.library.opcheck(op, (w, u, scale, z, 4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"u": torch.zeros(3, 3)}, r"U \[B, B\]"),
        ({"scale": torch.ones(1)}, r"s and z are \[B, N\]"),
        ({"zero": torch.ones(6, 5, dtype=torch.int8)}, "one floating-point dtype"),
        ({"bits": 9}, "2 to 8"),
    ],
)
def test_gptq_block__refuses(change, message):
    _, w, u, scale, _ = problem(6, 5, 4, False, torch.float32)
    given = {"w": w, "u": u, "scale": scale, "zero": None, "bits": 4} | change
    with pytest.raises(ValueError, match=message):
        op(*given.values())
