"""What a module of ours must be told to exist again without its values, as JSON.

module_spec(module) = spec        build_module(spec) has the same state_dict keys, shapes and dtypes
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from mmqc.checkpoint.checksum import CheckpointError
from mmqc.checkpoint.field_types import check_spec
from mmqc.experts.modules import QuantExperts
from mmqc.kv.query_moment import QueryMoment
from mmqc.kv.rounding import KVRounder
from mmqc.nn.adapted_linear import AdaptedLinear
from mmqc.nn.float4_linear import Float4Linear
from mmqc.nn.linear import HadamardLinear, QuantLinear, RMSNorm
from mmqc.nn.mixed_linear import MixedLinear
from mmqc.nn.plain_linear import PlainLinear
from mmqc.nn.rotated_norm import RotatedNorm
from mmqc.nn.token_linear import TokenLinear

# By their names in saved configs: a class may move or be renamed, its kind may not.
KINDS: dict[str, Any] = {
    "quant_linear": QuantLinear,
    "quant_experts": QuantExperts,
    "mixed_linear": MixedLinear,
    "token_linear": TokenLinear,
    "float4_linear": Float4Linear,
    "kv_rounder": KVRounder,
    "query_moment": QueryMoment,
    "rms_norm": RMSNorm,
    "rotated_norm": RotatedNorm,
    "hadamard_linear": HadamardLinear,
    "plain_linear": PlainLinear,
    "adapted_linear": AdaptedLinear,
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


def dtype_of(name: Any, where: str) -> torch.dtype:
    """The dtype that ``dtype_name`` gave that name.

    Raises:
        CheckpointError: torch has none of that name; ``where`` is what it was read from.
    """
    dtype = getattr(torch, name, None) if isinstance(name, str) else name
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"{where} = {name!r} is no dtype of torch's; was the checkpoint damaged or edited by hand?")
    return dtype


def build_module(
    spec: Mapping[str, Any], dtypes: Mapping[str, torch.dtype] | None = None, where: str = "the spec of a module"
) -> nn.Module:
    """The module that ``spec`` describes, without values, on the meta device.

    Args:
        spec: what ``module_spec`` returned.
        dtypes: other dtypes to use in place of the ones that the spec names.
        where: what errors call it.

    Raises:
        CheckpointError: an unknown kind, a key that is missing or unknown, as a newer version may have written, or a wrong value.
    """
    check_spec(where, spec)
    if spec.get("kind") not in KINDS:
        raise CheckpointError(f"{where}: unknown kind of module {spec.get('kind')!r}; this mmqc knows {sorted(KINDS)}, update it")
    kind: str = spec["kind"]
    name: str = spec.get("dtype") or "float32"
    dtype = (dtypes or {}).get(name) or dtype_of(name, f"{where}.dtype")
    options = {key: value for key, value in spec.items() if key != "kind"} | {"dtype": dtype}
    try:
        module: nn.Module = KINDS[kind].from_spec(options)
    except KeyError as e:
        raise CheckpointError(f"{where}: the spec of a {kind} lacks {e}; it was saved by another version of mmqc") from e
    except (TypeError, ValueError, RuntimeError, AttributeError, ArithmeticError, AssertionError) as e:
        raise CheckpointError(f"{where}: no {kind} can be built: {e}; was the checkpoint damaged or edited by hand?") from e
    if unknown := sorted(set(spec) - set(module_spec(module) or ())):
        raise CheckpointError(f"{where}: the spec of a {kind} has an unknown key {unknown[0]!r}; was it edited by hand?")
    return module
