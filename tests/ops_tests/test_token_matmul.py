import pytest
import torch
from tolerance import assert_close

import mmqc.ops  # noqa: F401
from mmqc.ops.pack import FLOAT8, pack

token_matmul = torch.ops.mmqc.token_matmul


def operands(n: int, k: int, bits: int, group: int, code: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(stored weight, scale, dense float64 weight)."""
    top = 2 ** (bits - 1)
    codes = torch.randint(-top, top, (n, k), dtype=torch.int8)
    scale = torch.rand(n, -(-k // group)) + 0.1 if group else torch.rand(n) + 0.1
    spread = scale.repeat_interleave(group, 1)[:, :k] if group else scale[:, None]
    if bits == 8 and code == FLOAT8:
        floats = codes.float().to(FLOAT8)
        return floats, scale, floats.double() * spread.double()
    return codes if bits == 8 else pack(codes, bits), scale, codes.double() * spread.double()


def rounded(x: torch.Tensor, code: torch.dtype) -> torch.Tensor:
    """What the inputs stand for once they are quantized, by the formula, in float64."""
    top = 448.0 if code == FLOAT8 else 127.0
    scale = x.abs().amax(-1, keepdim=True) / top
    q = (x / scale).float().to(FLOAT8).double() if code == FLOAT8 else torch.round(x / scale)
    return q * scale


@pytest.mark.parametrize("code", [torch.int8, FLOAT8])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("n", "k", "group"), [(17, 63, 0), (63, 256, 32), (1, 17, 4), (5, 257, 128)])
def test_token_matmul__is_the_linear_of_rounded_inputs(code: torch.dtype, bits: int, n: int, k: int, group: int) -> None:
    if code == FLOAT8 and bits == 8 and group:
        pytest.skip("float8 weights have no groups")
    stored, scale, dense = operands(n, k, bits, group, code)
    x, bias = torch.randn(2, 3, k, dtype=torch.float64), torch.randn(n, dtype=torch.float64)
    x[0, 1] *= 1000  # a token of another size changes no other
    got = token_matmul(x, stored, scale, bias, bits, group, code)
    assert_close(got, rounded(x, code) @ dense.T + bias)
    assert torch.equal(token_matmul(x[1:], stored, scale, bias, bits, group, code), got[1:])
    if stored.dtype != FLOAT8:  # of which opcheck can make no second one
        torch.library.opcheck(token_matmul.default, (x.float(), stored, scale, bias.float(), bits, group, code))


def test_token_matmul__a_token_of_zeros_gives_the_bias() -> None:
    stored, scale, _ = operands(5, 12, 8, 0, torch.int8)
    x, bias = torch.zeros(2, 12), torch.randn(5)
    assert torch.equal(token_matmul(x, stored, scale, bias, 8, 0), bias.expand(2, 5))


def test_token_matmul__refuses_operands_that_do_not_fit() -> None:
    stored, scale, _ = operands(5, 12, 8, 0, FLOAT8)
    with pytest.raises(ValueError, match="float8 weights are multiplied with float8 inputs"):
        token_matmul(torch.randn(2, 12), stored, scale, None, 8, 0)
    with pytest.raises(ValueError, match="stored in 4 or 8 bits"):
        token_matmul(torch.randn(2, 12), stored, scale, None, 2, 0)
    with pytest.raises(ValueError, match=r"group_size 4 has shape \[5, 3\]"):
        token_matmul(torch.randn(2, 12), stored, scale, None, 8, 4, FLOAT8)
