"""Which linears a config quantizes when there is no data, and the quantized linear that takes one's place.

Without a recording nothing is known of towers, so all of them must have one scheme.  Three callers share this:
``quantize_`` without calibration, ``from_pretrained(..., quantization_config=...)`` and torchao's ``quantize_``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from mmqc.checkpoint.linear_like import NotLinearError, looks_linear, read_linear
from mmqc.config import HEAD, TOWERS, ConfigError, QuantConfig, Rewrites, Scheme
from mmqc.nn.float4_linear import Float4Linear
from mmqc.nn.linear import QuantLinear
from mmqc.nn.token_linear import TokenLinear
from mmqc.passes.assign_scheme import kept
from mmqc.report.report import Refusal
from mmqc.solvers import Quantized, solve


@dataclass
class Selection:
    """The linears to quantize and their schemes, by FQN, which of them store [K, N], and those that are left alone."""

    schemes: dict[str, Scheme] = field(default_factory=dict)
    transposed: set[str] = field(default_factory=set)
    refused: list[Refusal] = field(default_factory=list)


def only_scheme(config: QuantConfig, model: nn.Module | None = None) -> Scheme:
    """The scheme of every tower of a config that needs no data; of the language model, where ``model`` is nothing else.

    Raises:
        ConfigError: the config rewrites, needs calibration, or treats the towers differently: None for one of them, too.
    """
    towers = tower_schemes(config, model)
    cache = config.to_dict().get("kv")
    if config.rewrites != Rewrites() or config.needs_calibration or None in towers or len(towers) != 1 or cache:
        why = (
            "it rewrites the model, for which it has to be recorded"
            if config.rewrites != Rewrites()
            else "it needs calibration"
            if config.needs_calibration
            else "it quantizes the KV cache"
            if cache
            else "it quantizes no linear"
            if towers == {None}
            else "its towers have different schemes, or one has none, and only a recording tells towers apart"
        )
        raise ConfigError(
            f"this config cannot be applied without data: {why}; load the floating-point model and call "
            f"mmqc.quantize_(model, config, calibration=batches), or use a weight-only config, e.g. mmqc.recipes.rtn(8)"
        )
    (scheme,) = towers
    assert scheme is not None, "refused above"
    return scheme


def tower_schemes(config: QuantConfig, model: nn.Module | None = None) -> set[Scheme | None]:
    """Those of the towers, None of one that stays in floating point; of a ``model`` that reads text alone its language's."""
    text = getattr(getattr(model, "config", None), "get_text_config", None)
    if text is not None and text() is model.config and config.language is not None:  # type: ignore[union-attr]
        return {config.language}
    return {getattr(config, place) for place in TOWERS}


def select(
    model: nn.Module, config: QuantConfig, scheme: Scheme, filter_fn: Callable[[nn.Module, str], bool] | None = None
) -> Selection:
    """Every linear but those that ``keep`` names; the output head is known by ``get_output_embeddings``.

    Args:
        model: values are not read, so it may be on the meta device.
        config: its ``keep`` and ``head`` are read.
        scheme: of all other linears.
        filter_fn: as torchao's.

    Raises:
        ConfigError: a ``keep`` pattern that matches nothing.
    """
    output_head: Any = getattr(model, "get_output_embeddings", None)
    head = output_head() if output_head is not None else None
    found, used = Selection(), set()
    linears = {n: m for n, m in model.named_modules() if looks_linear(m)}
    for fqn, linear in linears.items():
        role = "head" if linear is head else ""
        chosen = config.head if role and config.head is not None else scheme
        pattern = next((p for p in config.keeps(role) if kept(p, fqn, role)), None)
        if pattern is not None:
            used.add(pattern)
            found.refused.append(Refusal(fqn, "", f"kept in floating point ({pattern})"))
        elif filter_fn is not None and not filter_fn(linear, fqn):
            found.refused.append(Refusal(fqn, "", "filter_fn leaves it out"))
        else:
            try:
                transposed = read_linear(linear).transposed
            except NotLinearError as why:
                found.refused.append(Refusal(fqn, "", str(why)))
                continue
            found.schemes[fqn] = chosen
            if transposed:
                found.transposed.add(fqn)
    unused = [p for p in config.keep if p not in used and p != HEAD]
    if unused:
        raise ConfigError(f"keep pattern {unused[0]!r} matches no linear of this model; some of its linears: {list(linears)[:5]}")
    return found


def quantized_linear(
    weight: Tensor, bias: Tensor | None, scheme: Scheme, fqn: str = "weight", solved: Quantized | None = None
) -> tuple[QuantLinear | TokenLinear | Float4Linear, Quantized]:
    """The module for a float weight [N, K] and bias [N], and what the solver found, or another process's has.

    Raises:
        ValueError: the weight holds NaN or infinity.
    """
    solved = solved or solve(weight.detach().float(), scheme.weight, name=fqn)
    options: Any = {"bias": None if bias is None else bias.detach(), "dtype": weight.dtype}
    if scheme.weight.float4:
        return Float4Linear.from_parts(solved, **options), solved
    options["weight_bits"] = scheme.weight.bits
    if scheme.by_token:
        return TokenLinear.from_parts(solved, float8=scheme.float8, **options), solved
    return QuantLinear.from_parts(solved, **options), solved
