"""What ``quantize_`` is asked for: its arguments, read once, and refused before anything is touched."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from mmqc.calibration.calibrate import EQUAL, TEXT, VISUAL, CalibrationError, RowWeights, is_few_bits
from mmqc.calibration.sequential import Inputs
from mmqc.config import ConfigError, KVSpec, QuantConfig, Rewrites
from mmqc.graph.hooks import global_hooks
from mmqc.graph.runner import check_trace
from mmqc.kv.cache import check_spec, decoder_config
from mmqc.nn.adapted_linear import AdaptedLinear
from mmqc.nn.integer_weight import IntegerWeight
from mmqc.nn.modality import visual_token_ids
from mmqc.quantization import convert
from mmqc.quantization.balanced_weights import balanced_weights

Batch = Mapping[str, Any]
Filter = Callable[[nn.Module, str], bool]


@dataclass(frozen=True, eq=False)
class Request:
    """The arguments of ``quantize_``, which says what they mean.

    Attributes:
        config: what becomes of the weights; its ``kv`` is None.
        kv: what becomes of the cache, if anything.
        batches: the calibration batches; None if none were given.
        row_weights: what a row of each modality counts.
    """

    model: nn.Module
    config: QuantConfig
    kv: KVSpec | None
    batches: tuple[Batch, ...] | None
    filter_fn: Filter | None
    progress: bool
    resume_dir: str | None
    inputs: Inputs
    device: Any
    spool: str | None
    generate_tokens: int
    row_weights: RowWeights
    allow_nothing: bool

    @classmethod
    def read(
        cls,
        model: nn.Module,
        config: QuantConfig,
        calibration: Iterable[Batch] | None,
        filter_fn: Filter | None,
        progress: bool,
        resume_dir: str | None,
        inputs: Inputs,
        device: Any,
        spool: str | None,
        generate_tokens: int,
        modality_weights: Mapping[str, float] | Literal["auto", "balanced"] | None,
        allow_nothing: bool = False,
    ) -> Request:
        """Take in the arguments; ``calibration`` is iterated once.

        Raises:
            ConfigError, CalibrationError, ValueError: as ``quantize_`` says, for what can be refused beforehand.
        """
        if not isinstance(config, QuantConfig):
            raise ConfigError(f"config is a {type(config).__name__}; pass a mmqc.QuantConfig, e.g. mmqc.recipes.mquant()")
        batches = None if calibration is None else _batches(calibration)
        weights, kv = config.replace(kv=None), config.kv
        few = any(is_few_bits(scheme.weight) for scheme in config.schemes.values())
        rows = _row_weights(model, batches or (), None if modality_weights == "auto" and not few else modality_weights)
        given = (filter_fn, progress, resume_dir, inputs, device, spool, generate_tokens, rows, allow_nothing)
        request = cls(model, weights, kv, batches, *given)
        request.check()
        return request

    @property
    def changes_weights(self) -> bool:
        """Whether there is more to do than to pack the cache."""
        config = self.config
        return self.kv is None or bool(config.schemes) or config.rewrites != Rewrites() or config.kv_rounding is not None

    @property
    def needs_batches(self) -> bool:
        """Whether the weights cannot be quantized without data."""
        compares = self.inputs == "asymmetric"
        return self.changes_weights and (self.config.rewrites != Rewrites() or self.config.needs_calibration or compares)

    @property
    def records(self) -> bool:
        """Whether the model is recorded: batches were given, and there is more to do than to pack the cache."""
        return self.changes_weights and self.batches is not None

    def check(self) -> None:
        """Raise for what cannot be done, before anything is touched."""
        if self.kv is not None:
            check_spec(self.kv, decoder_config(self.model))
            if self.kv.needs_data and not self.batches:
                raise CalibrationError(
                    "calibration is empty, but this kv config searches for tau or the layers' bits, or rounds keys by queries: "
                    "pass batches with images and answers, or search='none', rounding='nearest' and no by_layer"
                )
        if self.changes_weights:
            _check_model(self.model)
            _warn_of_global_hooks()
        _check_options(self)
        check_trace()
        if self.needs_batches or self.records:
            _check_batches(self)


def _batches(calibration: Any) -> tuple[Batch, ...]:
    """The batches as dicts of their own.

    Raises:
        CalibrationError: it is something else than an iterable of keyword batches.
    """
    what = "must be an iterable of keyword batches for the model's forward, e.g. [processor(...), ...]"
    if isinstance(calibration, Mapping | str | bytes | Tensor) or not isinstance(calibration, Iterable):
        hint = "put the one batch into a list, [batch]" if isinstance(calibration, Mapping) else "pass a list of dicts"
        raise CalibrationError(f"calibration is of type {type(calibration).__name__}; it {what}; {hint}")
    batches = []
    for i, batch in enumerate(calibration):
        if not isinstance(batch, Mapping) or not all(isinstance(name, str) for name in batch):
            keys = f", with the keys {[*batch][:3]}" if isinstance(batch, Mapping) else ""
            given = f"calibration batch {i} is of type {type(batch).__name__}{keys}"
            raise CalibrationError(f"{given}; calibration {what}; name the parts of a batch, e.g. dict(input_ids=ids)")
        batches.append(dict(batch))
    return tuple(batches)


def _row_weights(model: nn.Module, batches: Iterable[Batch], given: Mapping[str, float] | str | None) -> RowWeights:
    if given == "auto":
        even = balanced_weights(model, batches)
        return RowWeights(EQUAL if isinstance(even, str) else {**EQUAL, **even})
    if given == "balanced":
        even = balanced_weights(model, batches)
        if isinstance(even, str):
            raise CalibrationError(f"modality_weights='balanced': {even}; leave it out")
        given = even
    if isinstance(given, str):
        raise ConfigError(f"modality_weights = {given!r}: 'auto', 'balanced', or a dict")
    wrong = [m for m, w in (given or {}).items() if m not in (TEXT, VISUAL) or not 0 < w < float("inf")]
    if wrong:
        raise ConfigError(
            f"modality_weights = {dict(given or {})}: {wrong[0]!r} is no modality, or its weight is not positive; "
            f'pass {{"{VISUAL}": a, "{TEXT}": b}} with positive numbers'
        )
    weights = {**EQUAL, **(given or {})}
    return RowWeights(weights, weights)


def _check_options(request: Request) -> None:
    if request.inputs not in get_args(Inputs):
        raise ConfigError(f"inputs = {request.inputs!r} is not supported; allowed: {get_args(Inputs)}")
    count = request.generate_tokens
    if not isinstance(count, int) or count < 0:
        raise ConfigError(f"generate_tokens = {count!r}: how many tokens to append to each batch, 0 or more")


def _check_model(model: nn.Module) -> None:
    if any(isinstance(m, IntegerWeight) for m in model.modules()):
        raise ValueError("this model is quantized already; load the original weights to quantize it anew")
    adapted = next((name for name, m in model.named_modules() if isinstance(m, AdaptedLinear)), None)
    if adapted is not None:
        raise ValueError(f"{adapted} has an adapter beside it: mmqc.unload_adapter(model), or merge it into the float model first")
    empty = next((name for name, p in model.named_parameters() if p.is_meta), None)
    if empty is not None:
        raise ValueError(
            f"{empty} is on the meta device, without values: load the model's weights, without offloading, and quantize then; "
            "mmqc.plan tells what would be done with a model that has none"
        )
    bad = convert.first_bad_weight(model)
    if bad is not None:
        raise ValueError(f"{bad} holds NaN or infinite values; repair the checkpoint before quantizing (nothing was changed)")


def _warn_of_global_hooks() -> None:
    """They run for our modules as well, but may ask for a class by ``isinstance``, which says no from now on."""
    if words := global_hooks():
        warnings.warn(
            f"there is a {words[0]} (torch.nn.modules.module.register_module_...): it goes on for every module, and linears are "
            "mmqc.nn.linear.QuantLinear from now on, which is no nn.Linear; remove it, or let it ask for both",
            UserWarning,
            stacklevel=4,
        )


def _check_batches(request: Request) -> None:
    batches = request.batches
    if not batches:
        given = "None" if batches is None else "empty"
        raise CalibrationError(
            f"calibration is {given}, but this config needs data: pass an iterable of keyword batches for the model's forward "
            "(input_ids, pixel_values, ...); rewrites need one batch, static scales and gptq some dozens"
        )
    for i, batch in enumerate(batches):
        for name, value in batch.items():
            if isinstance(value, Tensor) and value.is_floating_point() and not bool(torch.isfinite(value).all()):
                raise CalibrationError(f"calibration batch {i}: {name} holds NaN or infinite values")
    wants = any(s.activation is not None and s.activation.per_modality for s in request.config.schemes.values())
    ids = torch.tensor(visual_token_ids(request.model))
    if wants and len(ids) and not any(_has_visual(b, ids) for b in batches):
        raise CalibrationError(
            "no calibration batch has an image, but the recipe has one activation scale per modality: pass batches with "
            "pixel_values and image tokens, or use msq=False"
        )


def _has_visual(batch: Batch, ids: Tensor) -> bool:
    """Whether a batch has visual tokens, and features of an image or video to put there."""
    tokens, kinds = batch.get("input_ids"), batch.get("mm_token_type_ids")
    places = bool(torch.isin(tokens.cpu(), ids).any()) if tokens is not None else kinds is not None and bool((kinds > 0).any())
    given = (v for name, v in batch.items() if isinstance(v, Tensor) and name not in ("inputs_embeds", "attention_mask"))
    return places and any(v.is_floating_point() for v in given)
