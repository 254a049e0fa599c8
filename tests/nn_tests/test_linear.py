import copy
from typing import Any

import pytest
import torch
from simulated import simulated_products
from tolerance import assert_close
from torch import nn

from mmqc.checkpoint.module_spec import build_module, module_spec
from mmqc.nn.linear import HadamardLinear, QuantLinear, RMSNorm, rebuild_factors
from mmqc.nn.modality import ModalityContext
from mmqc.ops.hadamard import hadamard_factors
from mmqc.solvers import Quantized

N, K = 24, 60


def parts(bits: int, *, outliers: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(bits)
    top = 2 ** (bits - 1)
    codes = torch.randint(-top, top, (N, K), dtype=torch.int8, generator=g)
    made = {"codes": codes, "weight_scale": torch.rand(N, generator=g) * 0.1, "bias": torch.randn(N, generator=g)}
    if outliers:
        made["outlier_index"] = torch.randperm(K, generator=g)[:outliers]
        codes[:, made["outlier_index"]] = 0
        made["outlier_weight"] = torch.randn(N, outliers, generator=g)
    return made


def built(
    codes: torch.Tensor,
    weight_scale: torch.Tensor,
    *,
    outlier_index: torch.Tensor | None = None,
    outlier_weight: torch.Tensor | None = None,
    weight_zero: torch.Tensor | None = None,
    group_size: int = 0,
    amplifier: int = 0,
    step: torch.Tensor | None = None,
    **more: Any,
) -> QuantLinear:
    quantized = Quantized(codes, weight_scale, zero=weight_zero, group_size=group_size, amplifier=amplifier, step=step)
    outliers = None if outlier_index is None or outlier_weight is None else (outlier_index, outlier_weight)
    return QuantLinear.from_parts(quantized, outliers=outliers, **more)


def dense(factors: list[torch.Tensor]) -> torch.Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    for factor in factors:
        matrix = torch.kron(matrix, factor)
    return matrix


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("hadamard", [False, True, 4])
@pytest.mark.parametrize("outliers", [0, 2])
def test_quant_linear__is_fake_quantization(bits: int, hadamard: bool, outliers: int) -> None:
    p = parts(bits, outliers=outliers)
    scale = torch.tensor([0.03])
    linear = built(**p, weight_bits=bits, activation_bits=8, input_scale=scale, hadamard=hadamard)
    x = torch.randn(2, 5, K)
    rotated = (x.double() @ dense(hadamard_factors(K, int(hadamard))).T).float() if hadamard else x
    q = torch.clamp(torch.round(rotated / scale), -128, 127)
    assert torch.equal(torch.ops.mmqc.quantize(linear.rotated(x), scale, None, 8), q.to(torch.int8))
    w = p["codes"].double() * p["weight_scale"].double()[:, None]
    expected = (q.double() * scale.double()) @ w.T + p["bias"].double()
    if outliers:
        expected += rotated.double()[..., p["outlier_index"]] @ p["outlier_weight"].double().T
    assert_close(linear(x), expected)


@pytest.mark.parametrize("group", [0, 16])
def test_quant_linear__weight_only(group: int) -> None:
    p = parts(4)
    if group:
        p["weight_scale"] = torch.rand(N, -(-K // group))
    linear = built(**p, weight_bits=4, group_size=group)
    s = p["weight_scale"].repeat_interleave(group, 1)[:, :K] if group else p["weight_scale"][:, None]
    x = torch.randn(2, 5, K)
    assert_close(linear(x), x.double() @ (p["codes"].double() * s.double()).T + p["bias"].double())
    assert torch.equal(linear.codes(), p["codes"])


@pytest.mark.parametrize("between", [False, True])
def test_quant_linear__zero_points(between: bool) -> None:
    p = parts(4)
    p["weight_scale"] = torch.rand(len(p["codes"]), -(-p["codes"].shape[1] // 8))
    p["weight_zero"] = torch.randint(-8, 8, p["weight_scale"].shape, dtype=torch.int8)
    if between:
        p["weight_zero"] = (p["weight_zero"] + torch.rand(p["weight_scale"].shape)).half()
    linear = built(**p, weight_bits=4, group_size=8)
    shifted, scale = (t.float().repeat_interleave(8, 1)[:, : linear.in_features] for t in (p["weight_zero"], p["weight_scale"]))
    w = (p["codes"] - shifted) * scale
    assert_close(linear.weight, w)
    x = torch.randn(3, linear.in_features)
    assert_close(linear(x), torch.nn.functional.linear(x, w, p["bias"]))
    again = build_module(module_spec(linear), {}).to_empty(device="cpu")
    again.load_state_dict(linear.state_dict())
    assert torch.equal(again(x), linear(x))
    assert ("asym-float" in repr(linear)) == between


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_quant_linear__zero_points_between_the_codes_keep_their_dtype(dtype: torch.dtype) -> None:
    p = parts(4) | {"weight_zero": (torch.rand(N) * 9 - 4).half()}
    linear = built(**p, weight_bits=4).to(dtype)
    assert linear.weight_zero is not None
    assert linear.weight_zero.dtype == torch.float16
    assert torch.equal(linear.weight_zero, p["weight_zero"])
    assert linear.bias is not None
    assert linear.bias.dtype == dtype
    x = torch.randn(3, K).to(dtype)
    wanted = (p["codes"] - p["weight_zero"].double()[:, None]) * p["weight_scale"].double()[:, None]
    assert_close(linear(x), x.double() @ wanted.T + linear.bias.double(), dtype)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("amplifier", [0, 1024])
def test_quant_linear__group_scales_with_quantized_inputs(bits: int, amplifier: int) -> None:
    p = parts(bits) | {"weight_scale": torch.randint(1, 90, (N, 4)) / 1024}
    scale = torch.tensor([0.03])
    spec = {"weight_bits": bits, "activation_bits": 8, "group_size": 16}
    linear = built(**p, **spec, input_scale=scale, amplifier=amplifier)
    w = p["codes"].double() * p["weight_scale"].double().repeat_interleave(16, 1)[:, :K]
    x = torch.randn(2, 5, K)
    q = torch.clamp(torch.round(x / scale), -128, 127).double()
    assert_close(linear(x), (q * scale.double()) @ w.T + p["bias"].double())
    assert torch.equal(linear.weight.double(), w)
    shapes = {"weight_scale": (N,), "group_scale": (N, 4)} if amplifier else {"weight_scale": (N, 4)}
    state = {name: tuple(value.shape) for name, value in linear.state_dict().items() if "scale" in name}
    assert state == shapes | {"input_scale": (1,)}
    assert ("-i" in repr(linear)) == bool(amplifier)
    again = build_module(module_spec(linear)).to_empty(device="cpu")
    again.load_state_dict(linear.state_dict(), assign=True)
    assert torch.equal(again(x), linear(x))
    with simulated_products() as called:
        simulated = linear(x)
    assert called["scaled_matmul"].called
    assert torch.equal(simulated, linear(x))


def test_quant_linear__progressive_scales_are_stored_in_8_bits() -> None:
    step, t = torch.rand(N) + 0.5, torch.randint(1, 16, (N, 4))
    p = parts(4) | {"weight_scale": (t.double() * step.double()[:, None]).float()}
    spec = {"weight_bits": 4, "activation_bits": 8, "group_size": 16, "input_scale": torch.tensor([0.03])}
    linear = built(**p, **spec, step=step)
    assert torch.equal(linear.group_scale, t.to(torch.int8))
    assert torch.equal(linear.weight_scale, step)
    x = torch.randn(2, 5, K)
    floats = built(**p, **spec)
    assert_close(linear(x), floats(x).double())
    again = build_module(module_spec(linear)).to_empty(device="cpu")
    again.load_state_dict(linear.state_dict(), assign=True)
    assert again.group_scale.dtype == torch.int8
    assert torch.equal(again(x), linear(x))


@pytest.mark.parametrize("activation", [None, 8])
@pytest.mark.parametrize("group", [0, 16])
def test_quant_linear__equals_simulated_products(activation: int | None, group: int) -> None:
    p = parts(4, outliers=2) | ({"weight_scale": torch.rand(N, -(-K // group))} if group else {})
    scale = None if activation is None else torch.tensor([0.03])
    linear = built(**p, weight_bits=4, activation_bits=activation, group_size=group, input_scale=scale, hadamard=True)
    x = torch.randn(3, K)
    expected = linear(x)
    with simulated_products() as called:
        assert torch.equal(linear(x), expected)
        assert called["weight_only_matmul" if activation is None else "scaled_matmul"].called
        linear.qweight.zero_()
        assert not torch.equal(linear(x), expected)


def test_quant_linear__state_is_plain_buffers_and_loads() -> None:
    p = parts(4, outliers=2)
    linear = built(**p, weight_bits=4, activation_bits=8, input_scale=torch.ones(2), hadamard=True)
    state = linear.state_dict()
    assert {k: (v.dtype, tuple(v.shape)) for k, v in state.items()} == {
        "qweight": (torch.uint8, (N, K // 2)),
        "weight_scale": (torch.float32, (N,)),
        "bias": (torch.float32, (N,)),
        "input_scale": (torch.float32, (2,)),
        "outlier_index": (torch.int64, (2,)),
        "outlier_weight": (torch.float32, (N, 2)),
    }
    spec = {"weight_bits": 4, "activation_bits": 8, "bias": True, "input_scales": 2, "outliers": 2, "hadamard": True}
    for device in ("cpu", "meta"):
        again = QuantLinear(K, N, **spec, device=device)
        again.load_state_dict(state, assign=True)
        linear.modality = again.modality = ModalityContext()
        linear.modality.text_only = True
        x = torch.randn(3, K)
        assert torch.equal(again(x), linear(x))
    with torch.device("meta"):
        assert QuantLinear(K, N, **spec).qweight.device.type == "meta"


def test_quant_linear__repr() -> None:
    linear = QuantLinear(K, N, weight_bits=4, activation_bits=8, input_scales=2, outliers=1, hadamard=True)
    assert repr(linear) == f"QuantLinear({K}, {N}, W4A8, bias=False, input_scales=2, hadamard=True, outliers=1)"
    assert repr(QuantLinear(K, N, weight_bits=4, group_size=32)) == f"QuantLinear({K}, {N}, W4A16-g32, bias=False)"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"weight_bits": 9}, "weight_bits = 9"),
        ({"weight_bits": 8, "activation_bits": 16, "input_scales": 1}, "activation_bits = 16"),
        ({"weight_bits": 4, "group_size": -1}, "group_size = -1"),
        ({"weight_bits": 4, "zero": "int"}, "zero = 'int': False, True or 'float'"),
        ({"weight_bits": 4, "group_size": 32, "integer_scales": True}, "integer scales are those of groups"),
        ({"weight_bits": 4, "activation_bits": 8, "input_scales": 1, "integer_scales": True}, "integer scales are those of"),
        ({"weight_bits": 8, "activation_bits": 8}, "a static linear has input_scale"),
        ({"weight_bits": 8, "input_scales": 1}, "a static linear has input_scale"),
    ],
)
def test_quant_linear__refuses(spec: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QuantLinear(K, N, **spec)


def test_quant_linear__scales_survive_a_change_of_dtype() -> None:
    linear = built(**parts(8), weight_bits=8, activation_bits=8, input_scale=torch.tensor([0.0301]), hadamard=True)
    before = copy.deepcopy(linear)
    linear.bfloat16()
    assert linear.bias.dtype == torch.bfloat16
    for name in ("qweight", "weight_scale", "input_scale", "factor_0"):
        assert torch.equal(getattr(linear, name), getattr(before, name)), name
    assert linear(torch.randn(3, K).bfloat16()).dtype == torch.bfloat16


def test_quant_linear__two_scales_need_a_context() -> None:
    linear = built(**parts(8), weight_bits=8, activation_bits=8, input_scale=torch.ones(2))
    with pytest.raises(RuntimeError, match="no ModalityContext"):
        linear(torch.randn(1, 3, K))


def test_hadamard_linear__computes_the_same_function_in_float64() -> None:
    linear = nn.Linear(K, N).double()
    H = dense(hadamard_factors(K))
    x = torch.randn(5, K, dtype=torch.float64)
    rotated = HadamardLinear.from_parts(linear.weight.detach() @ H.T, linear.bias.detach())
    assert_close(rotated(x), linear(x))
    assert rotated.state_dict().keys() == linear.state_dict().keys()
    assert_close(rotated.float().double()(x), linear(x), torch.float32)
    assert rotated.factor_0.dtype == torch.float64
    assert_close(rotated.factor_0, hadamard_factors(K)[0])


def test_hadamard_linear__modules_of_one_width_share_the_factors() -> None:
    a, b = (HadamardLinear(K, n) for n in (3, 5))
    assert a.factor_0 is b.factor_0
    assert a.double().factor_0 is not b.factor_0
    assert b.factor_0.dtype == torch.float32


def test_hadamard_linear__factors_are_rebuilt_after_to_empty() -> None:
    linear = HadamardLinear(K, N, device="meta")
    assert linear.factor_0.device.type == "meta"
    linear.to_empty(device="cpu")
    assert_close(linear.factor_0, hadamard_factors(K)[0], torch.float32)
    linear.factor_0 = torch.full_like(linear.factor_0, float("nan"))  # as a loader leaves what no checkpoint holds
    rebuild_factors(linear)
    assert_close(linear.factor_0, hadamard_factors(K)[0], torch.float32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gain", [False, True])
def test_rms_norm__is_torchs(dtype: torch.dtype, gain: bool) -> None:
    weight = torch.rand(33).to(dtype) if gain else None
    x = torch.randn(2, 5, 33).to(dtype)
    norm = RMSNorm(33, eps=1e-5, weight=weight)
    wide = torch.nn.functional.rms_norm(x.double(), (33,), None if weight is None else weight.double(), 1e-5)
    assert norm(x).dtype == dtype
    assert_close(norm(x), wide)
    assert list(norm.state_dict()) == (["weight"] if gain else [])
