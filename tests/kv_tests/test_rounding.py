"""Keys and values rounded inside attention, and the moments of keys that their bases come from."""

import pytest
import torch
from float64 import relative_error
from models import tiny_qwen2_vl
from small_vlm import Small, logits, quantize
from tolerance import assert_close

import mmqc
from mmqc.config import ConfigError, KVRounding, QuantConfig
from mmqc.kv.rounding import KeyMoments, KVRounder, basis_of, observed
from mmqc.recipes import resq


def rounders(model: torch.nn.Module) -> list[KVRounder]:
    return [m for m in model.modules() if isinstance(m, KVRounder)]


@pytest.mark.parametrize("peaks", [False, True])
def test_key_moments__by_module_over_all_calls(peaks: bool) -> None:
    seen, modules = KeyMoments(peaks), [torch.nn.Module(), torch.nn.Module()]
    keys = [torch.randn(2, 3, n, 4, dtype=torch.float64) for n in (5, 6)]
    for module in modules:
        for k in keys:
            seen.update(module, k, k * (2 if module is modules[1] else 1), 0.5)
    rows = torch.cat([k.reshape(-1, 4) for k in keys])
    one, two = (seen.found[module] for module in modules)
    if peaks:
        assert torch.equal(one, rows.abs().amax(0))
        assert torch.equal(two, 2 * one)
    else:
        assert_close(one.tril(), (rows.T @ rows).tril())
        assert_close(two, 4 * one)


def test_observed__refuses_attention_that_is_not_sdpa() -> None:
    model, _ = tiny_qwen2_vl()
    model.set_attn_implementation("eager")
    with pytest.raises(ConfigError, match="attends by 'eager'"), observed(model, KVRounding(basis="principal")):
        pass


@pytest.mark.parametrize("basis", ["principal", "peaks", "hadamard", "none"])
def test_basis__is_orthogonal_and_puts_the_high_part_last(basis: str) -> None:
    spec = KVRounding(4, 8, 1 / 8, basis)  # type: ignore[arg-type]
    loud = torch.ones(16, dtype=torch.float64).index_fill(0, torch.tensor([3, 9]), 100.0)
    u = basis_of(loud if basis == "peaks" else loud.diag(), spec, 0)
    assert_close(u.T @ u, torch.eye(16, dtype=torch.float64))
    high = u[[3, 9], 14:].norm()
    assert (float(high) == pytest.approx(2**0.5)) == (basis in ("principal", "peaks"))


def test_kv_rounding__exact_without_rounding_and_per_head() -> None:
    """U_C cancels in q kᵀ; a head's token is rounded alone, its high coordinates more finely."""
    spec = KVRounding(4, 8, 1 / 8, "principal")
    g = torch.Generator().manual_seed(0)
    k = torch.randn(2, 3, 50, 16, generator=g, dtype=torch.float64) * torch.logspace(0, -2, 16, dtype=torch.float64)
    q, v = torch.randn(2, 3, 7, 16, generator=g, dtype=torch.float64), torch.randn(2, 3, 50, 16, generator=g)
    rows = k.reshape(-1, 16)
    rounder = KVRounder(16, spec, "sdpa")
    rounder.basis = basis_of(rows.T @ rows, spec, 0)
    q_u, k_u, v_q = rounder(q, k, v)
    codes, step, offset = rounder.codes(rounder.turned(k)[:, :, 5:9])  # as a cache would have them, token by token
    assert codes.dtype == torch.int8
    assert codes[..., :14].abs().max() <= 8
    assert torch.equal(rounder.values(codes, step, offset, k.dtype), k_u[:, :, 5:9])
    assert float((q_u @ (k @ rounder.basis).transpose(2, 3) - q @ k.transpose(2, 3)).abs().max()) < 1e-12
    assert_close(k_u[1, 2, 5], rounder(q, k[1:, 2:, 5:6], v)[1][0, 0, 0])
    error = (v_q - v).abs().amax((0, 1, 2))
    assert float(error[14:].max()) < 0.05 < float(error[:14].max())
    plain = KVRounder(16, KVRounding(4), "sdpa")
    plain.basis = torch.eye(16, dtype=torch.float64)
    assert float((k_u - k @ rounder.basis).norm()) < float((plain(q, k, v)[1] - k).norm())


def test_kv_rounding__in_the_model_saved_and_loaded(tmp_path) -> None:
    model, inputs = tiny_qwen2_vl()
    expected = logits(model, inputs)
    config = QuantConfig(kv_rounding=KVRounding(8, 8, 1 / 8, "principal"))
    mmqc.quantize_(model, config, [inputs], progress=False)
    got = logits(model, inputs)
    assert len(rounders(model)) == model.config.text_config.num_hidden_layers
    assert 0 < relative_error(got, expected) < 0.05
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert torch.equal(logits(loaded, inputs), got)
    tokens = model.generate(**inputs, max_new_tokens=3, do_sample=False)
    assert torch.equal(loaded.generate(**inputs, max_new_tokens=3, do_sample=False), tokens)


def test_kv_rounding__refuses_what_does_not_attend_through_transformers() -> None:
    model = Small().eval()
    with pytest.raises(ConfigError, match="no decoder config"):
        quantize(model, resq())
    assert not rounders(model)


def test_kv_rounding__gradients_are_those_without_rounding() -> None:
    rounder = KVRounder(16, KVRounding(4, 8, 1 / 8, "hadamard"), "sdpa")
    rounder.basis = basis_of(torch.eye(16, dtype=torch.float64), KVRounding(4, 8, 1 / 8, "hadamard"), 0).float()
    states = [torch.randn(1, 2, 5, 16, requires_grad=True) for _ in range(3)]
    upstream = [torch.randn(1, 2, 5, 16) for _ in range(3)]
    out = rounder(*states)
    with torch.no_grad():
        assert all(torch.equal(a, b) for a, b in zip(out, rounder(*states), strict=True))
    grads = torch.autograd.grad(out, states, upstream)
    for grad, expected in zip(grads, [upstream[0] @ rounder.basis.T, upstream[1] @ rounder.basis.T, upstream[2]], strict=True):
        assert_close(grad, expected)
