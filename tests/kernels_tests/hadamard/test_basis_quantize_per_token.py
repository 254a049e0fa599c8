"""The kernel against the plain-torch op."""

import device_facts
import offline
import pytest
import torch
from poison import poisoned
from tolerance import assert_close

from mmqc.ops.basis_quantize_per_token import reference

kernel = pytest.importorskip("mmqc.kernels.hadamard.basis_quantize_per_token")
DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16)}
PARTS = [([14, 2], [4, 8]), ([56, 8], [4, 8]), ([112, 16], [4, 8]), ([70, 10], [3, 8]), ([16], [4]), ([33], [8]), ([1], [4])]


def basis_quantize_per_token(x, basis, widths, bits):
    return kernel.plan(x, basis, widths, bits, poisoned(x)).run()


def assert_like_op(m, widths, bits, dtype, device):
    """Sums in another order: a code in fifty may be another one, by one."""
    width = sum(widths)
    x = (torch.randn(m, width, device=device) + 0.2).to(dtype)
    basis = torch.linalg.qr(torch.randn(width, width, device=device))[0].to(dtype)
    x[0] = 0
    out = basis_quantize_per_token(x, basis, widths, bits)
    q, s, o = reference(x, basis, widths, bits)
    off = (out.q.int() - q.int()).abs()
    assert off.max() <= 1
    assert (off > 0).float().mean() <= 0.02 + 1.5 / off.numel()
    assert_close(out.scale, s, dtype)
    assert_close(out.offset, o, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("widths", "bits"), PARTS)
def test_basis_quantize_per_token_kernel__equals_the_op(widths, bits, dtype, device):
    assert_like_op(5, widths, bits, dtype, device)


def test_basis_quantize_per_token_kernel__codes_where_the_product_is_exact(device):
    """A permutation of channels: no sum rounds, so the codes are those of the unfused path."""
    x = torch.randn(77, 80, device=device)
    basis = torch.eye(80, device=device)[torch.randperm(80, device=device)]
    out = basis_quantize_per_token(x, basis, [70, 10], [4, 8])
    q, s, o = reference(x, basis, [70, 10], [4, 8])
    assert torch.equal(out.q, q)
    assert torch.equal(out.scale, s)
    assert_close(out.offset, o)


@pytest.mark.gpu
@pytest.mark.parametrize(("widths", "bits"), [([112, 16], [4, 8]), ([56, 8], [4, 8]), ([224, 32], [4, 8])])
def test_basis_quantize_per_token_kernel__bfloat16(widths, bits, device):
    if device.type == "cpu":
        pytest.skip("the interpreter computes bfloat16 wrongly")
    assert_like_op(1030, widths, bits, torch.bfloat16, device)


def test_basis_quantize_per_token_kernel__refuses(device):
    x, basis = torch.randn(2, 64, device=device), torch.eye(64, device=device)
    with pytest.raises(ValueError, match="one or two parts"):
        basis_quantize_per_token(x, basis, [32, 16, 16], [2, 4, 8])
    with pytest.raises(ValueError, match="a row of 320 does not fit"):
        basis_quantize_per_token(torch.randn(2, 320, device=device), basis, [320], [4])
    with pytest.raises(ValueError, match=r"basis is torch.float32 \[64, 64\]"):
        basis_quantize_per_token(x, basis.half(), [64], [4])
    assert basis_quantize_per_token(x[:0], basis, [64], [4]).q.shape == (0, 64)


@pytest.mark.parametrize("room", [99 << 10, 20_000])
def test_basis_quantize_per_token_kernel__in_steps(room, device, monkeypatch):
    """As where shared memory is less."""
    monkeypatch.setattr(kernel, "shared_bytes", lambda _: room)
    assert_like_op(70, [224, 32], [4, 8], torch.float32, device)


def made(architecture, dtype, tokens):
    """The widest head on another device, for offline.py."""
    with device_facts.pretending(int(architecture), why_not_here=lambda *_: None):
        x = torch.empty(int(tokens), kernel.MAX_WIDTH, dtype=DTYPES[dtype])
        basis = torch.empty(kernel.MAX_WIDTH, kernel.MAX_WIDTH, dtype=x.dtype)
        [launch] = kernel.plan(x, basis, [240, 16], [4, 8]).launches
        return launch


@pytest.mark.parametrize("tokens", [5, 794])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("architecture", device_facts.SHARED)
def test_plan__fits_the_shared_memory_of_every_device(architecture, dtype, tokens):
    found = offline.shared_memory(architecture, "test_basis_quantize_per_token", architecture, dtype, tokens)
    assert found <= device_facts.SHARED[architecture]
