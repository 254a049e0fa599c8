"""What a module of ours must be told to exist again without its values, as JSON; and its rebirth on the meta device.

module_spec(module) = spec        build_module(spec) has the same state_dict keys, shapes and dtypes
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mmqc.config import KVRounding
from mmqc.experts.call import ExpertCall
from mmqc.experts.modules import QuantExperts, QuantStack
from mmqc.experts.pointwise import Pointwise
from mmqc.kv.query_moment import QueryMoment
from mmqc.kv.rounding import KVRounder
from mmqc.nn.linear import HadamardLinear, QuantLinear, RMSNorm
from mmqc.nn.mixed_linear import MixedLinear
from mmqc.nn.rotated_norm import RotatedNorm

Spec = dict[str, Any]


def dtype_name(dtype: torch.dtype) -> str:
    """E.g. "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def _length(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.shape[0]


def _integer_scales(t: Tensor | None) -> bool | str:
    """Whether there are integer scales; "int8" of those that codes can be multiplied with in 8 bits."""
    return "int8" if t is not None and t.dtype == torch.int8 else t is not None


def _describe_integer_weight(module: QuantLinear | QuantStack) -> Spec:
    """What a linear and a stack of linears have in common."""
    return {
        "in": module.in_features,
        "out": module.out_features,
        "weight_bits": module.weight_bits,
        "activation_bits": module.activation_bits,
        "group_size": module.group_size,
        "hadamard": module.hadamard,
        "bias": module.bias is not None,
    }


def _describe_quant_linear(module: QuantLinear) -> Spec:
    return {
        **_describe_integer_weight(module),
        "integer_scales": _integer_scales(module.group_scale),
        "input_scales": _length(module.input_scale),
        "outliers": _length(module.outlier_index),
        "zero": module.weight_zero is not None,
        "float8": module.float8,
        "modality": module.modality is not None,
        "dtype": dtype_name(module.float_dtype),
    }


def _build_quant_linear(spec: Spec, dtype: torch.dtype) -> QuantLinear:
    return QuantLinear.empty(
        spec["in"],
        spec["out"],
        weight_bits=spec["weight_bits"],
        activation_bits=spec["activation_bits"],
        group_size=spec["group_size"],
        integer_scales=spec.get("integer_scales", False),  # models saved before there were any lack it
        hadamard=spec["hadamard"],
        bias=spec["bias"],
        input_scales=spec["input_scales"],
        outliers=spec["outliers"],
        zero=spec.get("zero", False),
        float8=spec.get("float8", False),
        dtype=dtype,
        device="meta",
    )


def _describe_rms_norm(module: RMSNorm) -> Spec:
    parts = [part for part in (module.weight, module.bias) if part is not None]
    return {
        "size": module.width,
        "eps": module.eps,
        "weight": module.weight is not None,
        "bias": module.bias is not None,
        "dtype": dtype_name(parts[0].dtype) if parts else None,
    }


def _build_rms_norm(spec: Spec, dtype: torch.dtype) -> RMSNorm:
    parts = {name: torch.empty(spec["size"], dtype=dtype, device="meta") if spec[name] else None for name in ("weight", "bias")}
    return RMSNorm(spec["size"], eps=spec["eps"], **parts)


def _describe_hadamard_linear(module: HadamardLinear) -> Spec:
    return {
        "in": module.in_features,
        "out": module.out_features,
        "bias": module.bias is not None,
        "dtype": dtype_name(module.weight.dtype),
    }


def _build_hadamard_linear(spec: Spec, dtype: torch.dtype) -> HadamardLinear:
    return HadamardLinear(spec["in"], spec["out"], bias=spec["bias"], dtype=dtype, device="meta")


def _describe_rotated_norm(module: RotatedNorm) -> Spec:
    return {
        "size": module.in_features,
        "eps": module.eps,
        "centre": module.centre,
        "bias": module.bias is not None,
        "seed": module.seed,
        "before": module.before,
        "after": module.after,
        "dtype": dtype_name(module.weight.dtype),
    }


def _build_rotated_norm(spec: Spec, dtype: torch.dtype) -> RotatedNorm:
    parts = {
        name: torch.empty(spec["size"], dtype=dtype, device="meta") if there else None
        for name, there in (("weight", True), ("bias", spec["bias"]))
    }
    norm = nn.LayerNorm(spec["size"], spec["eps"], bias=spec["bias"], dtype=dtype, device="meta")
    plain = norm if spec["centre"] else RMSNorm(spec["size"], spec["eps"], **parts)
    return RotatedNorm(plain, seed=spec["seed"], before=spec["before"], after=spec["after"])


def _describe_stack(stack: QuantStack) -> Spec:
    scales = 0 if stack.input_scale is None else stack.input_scale.shape[1]
    return {**_describe_integer_weight(stack), "input_scales": scales, "zero": stack.weight_zero is not None}


def _describe_quant_experts(module: QuantExperts) -> Spec:
    first: Any = module.up[0]
    return {
        "experts": first.experts,
        "form": module.call.form,
        "names": list(module.call.names),
        "roles": list(module.call.roles),
        "up": [_describe_stack(stack) for stack in module.up if isinstance(stack, QuantStack)],
        "gate": None if module.gate is None else module.gate.steps,
        "down": None if module.down is None else _describe_stack(module.down),
        "modality": module.modality is not None,
        "dtype": dtype_name(first.float_dtype),
    }


def _build_stack(spec: Spec, experts: int, dtype: torch.dtype) -> QuantStack:
    more = {name: value for name, value in spec.items() if name not in ("in", "out")}
    return QuantStack(experts, spec["in"], spec["out"], dtype=dtype, device="meta", **more)


def _build_quant_experts(spec: Spec, dtype: torch.dtype) -> QuantExperts:
    experts, gate, down = spec["experts"], spec["gate"], spec["down"]
    up = [_build_stack(stack, experts, dtype) for stack in spec["up"]]
    return QuantExperts(
        ExpertCall(spec["form"], tuple(spec["names"]), tuple(spec["roles"]), experts),
        up,
        None if gate is None else Pointwise(len(up), gate),
        None if down is None else _build_stack(down, experts, dtype),
    )


def _describe_mixed_linear(module: MixedLinear) -> Spec:
    return {
        "out": module.out_features,
        "widths": module.widths,
        "stored": module.stored,
        "activation": module.activation,
        "weight_bits": module.weight_bits,
        "hadamard": module.hadamard,
        "order": module.order is not None,
        "bias": module.bias is not None,
        "dtype": dtype_name(module.float_dtype),
    }


def _build_mixed_linear(spec: Spec, dtype: torch.dtype) -> MixedLinear:
    names = ("widths", "stored", "activation", "weight_bits", "hadamard", "order", "bias")
    return MixedLinear.empty_parts(spec["out"], **{name: spec[name] for name in names}, dtype=dtype, device="meta")


def _describe_kv_rounder(module: KVRounder) -> Spec:
    dtype = None if module.basis is None else dtype_name(module.basis.dtype)
    return {"size": module.size, "inner": module.inner, "spec": dataclasses.asdict(module.spec), "dtype": dtype}


def _build_kv_rounder(spec: Spec, dtype: torch.dtype) -> KVRounder:
    return KVRounder(spec["size"], KVRounding(**spec["spec"]), spec["inner"], device="meta").to(dtype)


def _describe_query_moment(module: QueryMoment) -> Spec:
    return {"heads": module.moment.shape[0], "width": module.moment.shape[1]}


def _build_query_moment(spec: Spec, dtype: torch.dtype) -> QueryMoment:
    del dtype  # float32 whatever the model is
    return QueryMoment(spec["heads"], spec["width"], device="meta")


KINDS: dict[str, tuple[type[nn.Module], Callable[[Any], Spec], Callable[[Spec, torch.dtype], nn.Module]]] = {
    "quant_linear": (QuantLinear, _describe_quant_linear, _build_quant_linear),
    "quant_experts": (QuantExperts, _describe_quant_experts, _build_quant_experts),
    "mixed_linear": (MixedLinear, _describe_mixed_linear, _build_mixed_linear),
    "kv_rounder": (KVRounder, _describe_kv_rounder, _build_kv_rounder),
    "query_moment": (QueryMoment, _describe_query_moment, _build_query_moment),
    "rms_norm": (RMSNorm, _describe_rms_norm, _build_rms_norm),
    "rotated_norm": (RotatedNorm, _describe_rotated_norm, _build_rotated_norm),
    "hadamard_linear": (HadamardLinear, _describe_hadamard_linear, _build_hadamard_linear),
}


def module_spec(module: nn.Module) -> Spec | None:
    """The spec of a module of ours as plain JSON data, with its "kind"; None for any other module."""
    for kind, (cls, describe, _) in KINDS.items():
        if type(module) is cls:
            return {"kind": kind, **describe(module)}
    return None


def build_module(spec: Mapping[str, Any], dtypes: Mapping[str, torch.dtype] | None = None) -> nn.Module:
    """The module that ``spec`` describes, without values, on the meta device.

    Args:
        spec: what ``module_spec`` returned.
        dtypes: other dtypes to use in place of the ones that the spec names.

    Raises:
        ValueError: an unknown kind or a missing key, as a newer version may have written.
    """
    if spec.get("kind") not in KINDS:
        raise ValueError(f"unknown kind of module {spec.get('kind')!r}; this mmqc knows {sorted(KINDS)}, update it")
    name: str = spec.get("dtype") or "float32"
    dtype: torch.dtype = (dtypes or {}).get(name) or getattr(torch, name)
    try:
        return KINDS[spec["kind"]][2](dict(spec), dtype)
    except KeyError as e:
        raise ValueError(f"the spec of a {spec['kind']} lacks {e}; it was saved by another version of mmqc") from e
