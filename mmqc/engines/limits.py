"""A recipe within an engine's limits, so that calibration is done for what will run there.

What vLLM has no place for and becomes something else: a scale per modality or beside 4-bit weights, a scale per token; LayerNorms
made RMSNorms, LayerNorms in rotations that keep the mean; integer scales of groups, floats.  Hadamards at run time, and the
suppression behind them, are left out.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from torchao.quantization.granularity import PerGroup, PerRow, PerToken

from mmqc.config import ActivationSpec, QuantConfig, Rewrites, Scheme, require
from mmqc.engines.table import engine_version

GROUP = 128  # of int4 weights beside float8 inputs: CUTLASS's only one
HUMMING_GROUP = 32  # of int4 weights beside int8 inputs: Machete, which would leave the inputs in floating point, does not take it


def for_engine(config: QuantConfig, engine: str, *, activations: Literal["float8", "int8"] = "float8") -> QuantConfig:
    """A copy of a recipe that ``save_pretrained(model, directory, engine=...)`` can say, exactly.

    Args:
        config: from a recipe, before ``quantize_``.
        engine: "vllm==0.32" or "vllm==0.33".
        activations: of 4-bit weights: ``float8``, by token beside groups of 128, which vLLM multiplies by CUTLASS on Hopper;
            ``int8``, by token beside groups of 32, which it multiplies by Humming.

    Raises:
        EngineError: no such engine.
        ConfigError: a part of the config that the engine has no place for: names the field, and what to use.
    """
    engine_version(engine)
    require(config.kv is None, "QuantConfig.kv", config.kv, f"None for {engine}, which has no ranges by modality")
    rounding = config.kv_rounding
    require(rounding is None, "QuantConfig.kv_rounding", rounding, f"None for {engine}, which rounds no keys by head and token")
    bases = config.rewrites.bases
    require(bases is None, "Rewrites.bases", bases, f"None for {engine}, whose linears have one precision")
    require(activations in ("float8", "int8"), "activations", activations, ("float8", "int8"))
    schemes = {place: _scheme(place, s, engine, activations == "float8") for place, s in config.schemes.items()}
    return config.replace(rewrites=_rewrites(config.rewrites), **schemes)


def _rewrites(rewrites: Rewrites) -> Rewrites:
    """Nothing at run time, and norms of the kinds that the architecture has."""
    kept = rewrites.fold_norms or rewrites.keep_means
    return dataclasses.replace(
        rewrites, hadamard=False, hadamard_everywhere=False, suppress=False, keep_means=kept, tensor_parallel=1
    )


def _scheme(place: str, scheme: Scheme, engine: str, float8: bool) -> Scheme:
    weight, dynamic = dataclasses.replace(scheme.weight, amplifier=None), scheme.dynamic
    allowed = f"4 or 8 for {engine}, whose checkpoints mmqc writes in these"
    require(weight.bits in (4, 8), f"{place}.weight.bits", weight.bits, allowed)
    require(
        not weight.float_zero, f"{place}.weight.zero_point", weight.zero_point, f"'int' for {engine}, whose zero points are codes"
    )
    if dynamic is not None:
        plain = dynamic.bits == 8 and not dynamic.high_fraction and not dynamic.lowest_fraction
        require(plain, f"{place}.dynamic", dynamic, f"8 bits in one part for {engine}")
    elif scheme.activation is None:
        return dataclasses.replace(scheme, weight=weight)
    if weight.bits == 4:
        group = GROUP if float8 else HUMMING_GROUP
        weight = dataclasses.replace(weight, granularity=PerGroup(group))
        return Scheme(weight, ActivationSpec(granularity=PerToken(), type="float" if float8 else "int"))
    weight = dataclasses.replace(weight, granularity=PerRow())
    if scheme.activation is None or scheme.activation.per_modality or not scheme.activation.static:
        return Scheme(weight, ActivationSpec(granularity=PerToken(), type="float" if scheme.float8 else "int"))
    return Scheme(weight, scheme.activation)
