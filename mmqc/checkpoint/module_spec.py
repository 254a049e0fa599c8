"""What a module of ours must be told to exist again without its values, as JSON.

module_spec(module) = spec        build_module(spec) has the same state_dict keys, shapes and dtypes
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from mmqc.experts.modules import QuantExperts
from mmqc.kv.query_moment import QueryMoment
from mmqc.kv.rounding import KVRounder
from mmqc.nn.linear import HadamardLinear, QuantLinear, RMSNorm
from mmqc.nn.mixed_linear import MixedLinear
from mmqc.nn.plain_linear import PlainLinear
from mmqc.nn.rotated_norm import RotatedNorm

# By their names in saved configs: a class may move or be renamed, its kind may not.
KINDS: dict[str, Any] = {
    "quant_linear": QuantLinear,
    "quant_experts": QuantExperts,
    "mixed_linear": MixedLinear,
    "kv_rounder": KVRounder,
    "query_moment": QueryMoment,
    "rms_norm": RMSNorm,
    "rotated_norm": RotatedNorm,
    "hadamard_linear": HadamardLinear,
    "plain_linear": PlainLinear,
}


def dtype_name(dtype: torch.dtype) -> str:
    """E.g. "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def module_spec(module: nn.Module) -> dict[str, Any] | None:
    """The spec of a module of ours as plain JSON data, with its "kind"; None for any other module."""
    kind = next((kind for kind, cls in KINDS.items() if type(module) is cls), None)
    if kind is None:
        return None
    spec: dict[str, Any] = KINDS[kind].to_spec(module)
    return {"kind": kind} | {n: dtype_name(v) if isinstance(v, torch.dtype) else v for n, v in spec.items()}


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
    options = {key: value for key, value in spec.items() if key != "kind"} | {"dtype": dtype}
    try:
        return KINDS[spec["kind"]].from_spec(options)
    except KeyError as e:
        raise ValueError(f"the spec of a {spec['kind']} lacks {e}; it was saved by another version of mmqc") from e
