"""What to quantize and how: the schemes of the three towers and the rewrites in front of them.

A ``QuantConfig`` is a value: frozen, comparable, and equal to its own JSON (``to_dict`` / ``from_dict``).
Granularities are torchao's.  Layers get their scheme by graph position (tower and role), so there is no list of
layer names here except ``keep``.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import nn
from torchao.core.config import AOBaseConfig
from torchao.quantization.granularity import Granularity, PerGroup, PerRow, PerTensor, PerToken
from torchao.quantization.transform_module import register_quantize_module_handler

from mmqc.specs import (
    BLOCKS,
    ActivationSpec,
    Amplifier,
    Bases,
    ChannelScales,
    Clip,
    ConfigError,
    DynamicSpec,
    Float4,
    KVRounding,
    KVSpec,
    Observer,
    Search,
    Solver,
    WeightSpec,
    ZeroPoint,
    require,
    require_types,
)

__all__ = [
    "HEAD",
    "ROLES",
    "TOWERS",
    "VERSION",
    "ActivationSpec",
    "Amplifier",
    "Bases",
    "ChannelScales",
    "Clip",
    "ConfigError",
    "DynamicSpec",
    "KVRounding",
    "KVSpec",
    "Observer",
    "QuantConfig",
    "Rewrites",
    "Scheme",
    "Search",
    "Solver",
    "WeightSpec",
    "ZeroPoint",
]

VERSION = 1
TOWERS = ("vision", "projector", "language")
ROLES = ("head", "down")  # that may have a scheme of their own
HEAD = "lm_head"  # in ``keep``, the output head, whatever it is called


@dataclass(frozen=True)
class Scheme:
    """The scheme of every linear of one tower: static or dynamic activations, or neither: weight-only."""

    weight: WeightSpec = field(default_factory=WeightSpec)
    activation: ActivationSpec | None = None
    dynamic: DynamicSpec | None = None

    def __post_init__(self) -> None:
        require_types(self)
        if self.dynamic is not None:
            plain = self.activation is None and self.weight.symmetric and not self.weight.group_size
            require(plain, "Scheme.dynamic", self.dynamic, "None beside static activations, zero points or groups")
            require(self.weight.solver != "learned", "WeightSpec.solver", "learned", "another one beside dynamic activations")
        alone = not self.weight.float4 or (self.activation is None and self.dynamic is None)
        require(alone, "WeightSpec.type", self.weight.type, "'int' or 'float' beside quantized activations")
        symmetric = self.weight.symmetric or self.activation is None
        require(symmetric, "WeightSpec.symmetric", self.weight.symmetric, "True beside quantized activations")
        floats = self.float8
        alike = self.weight.type != "float" if not floats else self.weight.bits <= 4 or self.weight.type == "float"
        allowed = "'float' beside activations of type 'float', and there only 'int' to 4 bits, whose codes are exact as floats"
        require(alike, "WeightSpec.type", self.weight.type, allowed)
        grouped = self.weight.granularity
        apart = not floats or not self.weight.group_size or self.by_token
        require(apart, "WeightSpec.granularity", grouped, "PerRow() beside static activations of type 'float'")
        integer = self.weight.amplifier is not None
        require(
            not integer or self.static,
            "Scheme.activation",
            self.activation,
            "a static ActivationSpec where weight.amplifier is set: integer scales multiply sums of integer products",
        )

    @property
    def float8(self) -> bool:
        """Whether activations are float8 codes, and weights of 8 bits with them."""
        return self.activation is not None and self.activation.type == "float"

    @property
    def static(self) -> bool:
        """Whether activations have scales that calibration finds."""
        return self.activation is not None and self.activation.static

    @property
    def by_token(self) -> bool:
        """Whether activations have symmetric scales that are found token by token."""
        return self.activation is not None and not self.activation.static

    def __str__(self) -> str:
        """The field's shorthand, e.g. W4A8, W8A8-token, W4A16-g128-asym or, with integer scales, W4A8-g128-i1024.

        ``-asym-float``: zero points between the codes.
        """
        if (d := self.dynamic) is not None:
            share = f" + {d.high_fraction:g} at {d.high_bits}" if d.high_fraction else ""
            share += f" + {d.lowest_fraction:g} at {d.lowest_bits}" if d.lowest_fraction else ""
            return f"W{self.weight.bits}A{d.bits}{share}{'' if d.packed else ', weights in int8'}"
        if self.weight.float4:
            return f"W4A16-{self.weight.type}"
        group = f"-g{self.weight.group_size}" if self.weight.group_size else ""
        group += f"-i{self.weight.amplifier}" if self.weight.amplifier is not None else ""
        group += "" if self.weight.symmetric else "-asym-float" if self.weight.float_zero else "-asym"
        group += "-fp8" if self.float8 else ""
        group += "-token" if self.by_token else ""
        return f"W{self.weight.bits}A{self.activation.bits if self.activation else 16}{group}"


@dataclass(frozen=True)
class Rewrites:
    """Which rewrites run before quantization; all but ``suppress`` leave the model's function unchanged.

    Attributes:
        fold_norms: norm gains, biases and means go into the neighbouring weights (LayerNorm becomes RMSNorm).
        keep_means: means stay, and with them LayerNorms, whose streams are rotated by matrices that keep the mean.
        rotate: residual streams and V/O spaces are rotated by a randomized Hadamard matrix.
        hadamard: an online Hadamard in front of linears that read a non-linearity (down_proj, fc2).
        hadamard_everywhere: also in front of linears that read a stream which no rotation passes (sandwich and post norms);
            about two more online transforms a layer.
        tensor_parallel: in how many blocks along the diagonal the online Hadamards of the language model are, so that ranks
            that share its linears each transform their own channels: as many ranks as divide it.
        suppress: MQuant's rotation magnitude suppression (section 4.3) behind each online Hadamard.
        seed: of the random signs.
        scales: AWQ's factors per channel go from norms and linears into the linears behind them; needs calibration.
        bases: rotated spaces are rotated on, into ResQ's principal bases; needs calibration.
        smooth: SmoothQuant's strength alpha: factors per channel from the largest inputs and weights; needs calibration.
    """

    fold_norms: bool = False
    rotate: bool = False
    hadamard: bool = False
    hadamard_everywhere: bool = False
    suppress: bool = False
    seed: int = 0
    scales: ChannelScales | None = None
    bases: Bases | None = None
    smooth: float | None = None
    keep_means: bool = False
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        require_types(self)
        require(self.tensor_parallel >= 1, "Rewrites.tensor_parallel", self.tensor_parallel, "at least 1")
        blocks = self.hadamard or self.tensor_parallel == 1
        require(blocks, "Rewrites.tensor_parallel", self.tensor_parallel, "1 where hadamard is False")
        require(self.fold_norms or not self.keep_means, "Rewrites.keep_means", self.keep_means, "False where fold_norms is False")
        require(self.bases is None or not self.keep_means, "Rewrites.keep_means", self.keep_means, "False beside bases")
        require(self.rotate or self.bases is None, "Rewrites.rotate", self.rotate, "True where there are bases")
        require(self.smooth is None or 0 < self.smooth < 1, "Rewrites.smooth", self.smooth, "in (0, 1), or None")
        both = self.scales is not None and self.smooth is not None
        require(not both, "Rewrites.smooth", self.smooth, "None beside scales")
        require(self.fold_norms or not self.rotate, "Rewrites.fold_norms", self.fold_norms, "True where rotate is True")
        for name in ("suppress", "hadamard_everywhere"):
            needed = self.hadamard or not getattr(self, name)
            require(needed, "Rewrites.hadamard", self.hadamard, f"True where {name} is True")


@dataclass(frozen=True)
class QuantConfig(AOBaseConfig):
    """A whole recipe: one scheme per tower (``None``: left in floating point), the rewrites, and what to keep.

    Attributes:
        vision, projector, language: the schemes.
        rewrites: see ``Rewrites``.
        keep: patterns (``fnmatch``) of module FQNs that stay in floating point; each must match something.
        statistics: what calibration measured, by FQN; filled in ``QuantReport.config`` so that
            ``torch.compile(..., options={"config": report.config})`` repeats ``quantize_`` on an untouched model.
        head: the output head's own scheme, whatever ``keep`` says of ``lm_head``; None leaves it to ``keep``.
        down: the scheme of the language model's linears that read a non-linearity and write the residual stream (what Llama
            calls down_proj), if ``language`` has one; None: as the rest.
        kv: how the visual tokens of the KV cache are stored; None leaves the cache alone.
        kv_rounding: of the decoder's keys and values; None leaves them as they are.
    """

    quant_method: ClassVar[str] = "mmqc"  # by which transformers finds the quantizer

    vision: Scheme | None = None
    projector: Scheme | None = None
    language: Scheme | None = None
    rewrites: Rewrites = field(default_factory=Rewrites)
    keep: tuple[str, ...] = (HEAD,)
    statistics: Mapping[str, Any] | None = field(default=None, hash=False, repr=False)  # of every linear: far too long to print
    head: Scheme | None = None
    down: Scheme | None = None
    kv: KVSpec | None = None
    kv_rounding: KVRounding | None = None

    def __post_init__(self) -> None:
        require_types(self)
        patterns = not isinstance(self.keep, str) and all(isinstance(pattern, str) for pattern in self.keep)
        require(patterns, "QuantConfig.keep", self.keep, "a tuple of patterns")
        both = self.kv is not None and self.kv_rounding is not None
        require(not both, "QuantConfig.kv_rounding", self.kv_rounding, "None beside kv: one attention function reads the cache")
        exact = not self.rewrites.suppress or not any(s.weight.float_zero for s in self.schemes.values())
        allowed = "False beside zero points of type 'float': weights of channels that are kept apart have to be exactly 0"
        require(exact, "Rewrites.suppress", self.rewrites.suppress, allowed)

    def __or__(self, other: QuantConfig) -> QuantConfig:
        """A recipe for the weights and one for the KV cache, as one config.

        Raises:
            ConfigError: both say something about the same.
        """
        for a, b in ((self, other), (other, self)):
            if b.kv is not None and a.kv is None and b.replace(kv=None) == QuantConfig():
                return a.replace(kv=b.kv)
        raise ConfigError("a | b takes one config without kv and one with nothing but kv, e.g. mquant() | calibquant(bits=2)")

    def scheme(self, tower: str, role: str = "") -> Scheme | None:
        """The scheme of a linear of ``tower`` (vision, projector or language); the output head has the role "head"."""
        if role == "down" and tower == "language" and self.down is not None and self.language is not None:
            return self.down
        return self.head if role == "head" and self.head is not None else getattr(self, tower)

    def keeps(self, role: str) -> tuple[str, ...]:
        """The patterns that may keep a linear of this role in floating point."""
        return tuple(p for p in self.keep if p != HEAD) if role == "head" and self.head is not None else self.keep

    @property
    def schemes(self) -> dict[str, Scheme]:
        """The towers that are quantized at all, and the head and the down projections if they have schemes of their own."""
        return {place: s for place in (*TOWERS, *ROLES) if (s := getattr(self, place)) is not None}

    @property
    def needs_calibration(self) -> bool:
        """Whether some scale, solver or tau depends on data that ``statistics`` and ``kv`` do not already hold."""
        if self.kv_rounding is not None or (self.kv is not None and self.kv.needs_data):
            return True
        if self.rewrites.bases is not None or self.rewrites.smooth is not None:
            return bool(self.schemes)  # no statistics hold what these measure
        if any(s.dynamic is not None and s.dynamic.high == "outliers" for s in self.schemes.values()):
            return True
        if self.statistics is not None:
            return any(s.weight.needs_hessian for s in self.schemes.values())
        places = self.schemes.values()
        measured = any(s.static or s.dynamic is not None or s.weight.needs_hessian for s in places)
        return measured or (self.rewrites.scales is not None and bool(self.schemes))

    def replace(self, **changes: Any) -> QuantConfig:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def with_integer_scales(self, amplifier: Amplifier | None = 1024) -> QuantConfig:
        """A copy with integer group scales (see ``WeightSpec``) wherever a scheme has groups and quantized activations.

        Raises:
            ConfigError: no scheme has both, so that nothing would change.
        """
        changed = {
            place: dataclasses.replace(s, weight=dataclasses.replace(s.weight, amplifier=amplifier))
            for place, s in self.schemes.items()
            if s.weight.group_size and s.static
        }
        allowed = "schemes with PerGroup(g) weights and static activations"
        require(bool(changed), "QuantConfig", list(map(str, self.schemes.values())), allowed)
        return self.replace(**changed)

    def with_towers(self, *towers: str) -> QuantConfig:
        """A copy that quantizes these towers alone; the rewrites stay, which leave what the others compute as it was.

        Without the language model the output head and the down projections stay in floating point too, and so do keys and values.

        Args:
            towers: "vision", "projector", "language".

        Raises:
            ConfigError: there is no such tower, or nothing would be quantized.
        """
        require(bool(towers) and {*towers} <= {*TOWERS}, "towers", towers, f"some of {TOWERS}")
        gone: dict[str, Any] = {place: None for place in TOWERS if place not in towers}
        if "language" in gone:
            gone |= {"head": None, "down": None, "kv": None, "kv_rounding": None}
        new = self.replace(**gone)
        quantizes = bool(new.schemes) or new.kv is not None or new.kv_rounding is not None
        require(
            quantizes, "towers", towers, f"some of {tuple(p for p in TOWERS if getattr(self, p) is not None)}, which this quantizes"
        )
        return new

    def with_float8(self) -> QuantConfig:
        """A copy that computes in float8_e4m3fn wherever activations are static, or symmetric by token.

        8-bit weights become floats too, rounded to nearest whatever the solver was; integers to 4 bits stay what they are, for
        their codes are exact as floats.  Ada and Hopper multiply both.

        Raises:
            ConfigError: no scheme has static activations, or one has weights in groups.
        """
        changed = {
            place: dataclasses.replace(
                s,
                weight=dataclasses.replace(s.weight, type="float", solver="rtn") if s.weight.bits == 8 else s.weight,
                activation=dataclasses.replace(s.activation, type="float"),
            )
            for place, s in self.schemes.items()
            if s.activation is not None
        }
        require(bool(changed), "QuantConfig", list(map(str, self.schemes.values())), "schemes with quantized activations")
        return self.replace(**changed)

    def with_float4(self, form: Float4) -> QuantConfig:
        """A copy whose weights are floats of 4 bits (e2m1) wherever schemes are weight-only and of 4 bits.

        Solvers stay what they are.  A block's scale is the best of those that the format has, by what the solver minimises.

        Args:
            form: "mxfp4", a power of two per 32 input channels (OCP Microscaling Formats 1.0): 4.25 bits a weight; "nvfp4", a
                float8_e4m3fn per 16 and a float32 for the tensor: 4.5 bits, and the smaller error.

        Raises:
            ConfigError: no scheme has weights of 4 bits and floating-point activations, or one's solver is "learned".
        """
        require(form in BLOCKS, "form", form, tuple(BLOCKS))
        changed = {
            place: dataclasses.replace(
                s,
                weight=dataclasses.replace(
                    s.weight,
                    type=form,
                    granularity=PerGroup(BLOCKS[form]),
                    symmetric=True,
                    zero_point="int",
                    static_groups=True,
                ),
            )
            for place, s in self.schemes.items()
            if s.weight.bits == 4 and s.activation is None and s.dynamic is None
        }
        allowed = "schemes with weights of 4 bits alone, e.g. recipes.gptq()"
        require(bool(changed), "QuantConfig", list(map(str, self.schemes.values())), allowed)
        return self.replace(**changed)

    def with_token_scales(self) -> QuantConfig:
        """A copy with one activation scale per token, found as it comes, wherever calibration would find scales.

        A scale per token follows a token as closely as a scale per modality does all tokens of its kind.  Integer group scales
        become floats.

        Raises:
            ConfigError: no scheme has static activations.
        """
        changed = {
            place: Scheme(
                dataclasses.replace(s.weight, amplifier=None),
                ActivationSpec(s.activation.bits, PerToken(), type=s.activation.type),
            )
            for place, s in self.schemes.items()
            if s.activation is not None and s.static
        }
        require(bool(changed), "QuantConfig", list(map(str, self.schemes.values())), "schemes with static activations")
        return self.replace(**changed)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data; ``from_dict`` gives the equal config back."""
        return {
            "version": VERSION,
            **{f.name: _encode(getattr(self, f.name)) for f in dataclasses.fields(self) if f.name != "version"},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> QuantConfig:
        """The config that ``to_dict`` wrote.

        Raises:
            ConfigError: an unknown key, another version, or a value that is not supported.
        """
        data = dict(data)
        version = data.pop("version", VERSION)
        require(version == VERSION, "version", version, (VERSION,))
        for place in (*TOWERS, *ROLES):
            if data.get(place) is not None:
                data[place] = _decode(Scheme, data[place], place)
        if "rewrites" in data:
            data["rewrites"] = _decode(Rewrites, data["rewrites"], "rewrites")
        if data.get("kv") is not None:
            data["kv"] = _decode(KVSpec, data["kv"], "kv")
        if data.get("kv_rounding") is not None:
            data["kv_rounding"] = _decode(KVRounding, data["kv_rounding"], "kv_rounding")
        data["keep"] = tuple(data.get("keep", (HEAD,)))
        return _decode(cls, data, "QuantConfig")


_GRANULARITIES = {"per_row": PerRow, "per_tensor": PerTensor, "per_token": PerToken, "per_group": PerGroup}


def _encode(value: Any) -> Any:
    if isinstance(value, Granularity):
        name = next(n for n, c in _GRANULARITIES.items() if isinstance(value, c))
        return {"per_group": value.group_size} if isinstance(value, PerGroup) else name
    if dataclasses.is_dataclass(value):
        return {f.name: _encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {k: _encode(v) for k, v in value.items()}
    return [_encode(v) for v in value] if isinstance(value, tuple) else value


_NESTED = {"weight": WeightSpec, "activation": ActivationSpec, "dynamic": DynamicSpec, "scales": ChannelScales, "bases": Bases}


def _granularity(value: Any) -> Granularity:
    if isinstance(value, dict) and set(value) == {"per_group"}:
        return PerGroup(value["per_group"])
    named = ("per_row", "per_tensor", "per_token")
    require(value in named, "granularity", value, (*named, {"per_group": "g"}))
    return _GRANULARITIES[str(value)]()


def _decode(cls: type, data: Any, where: str) -> Any:
    if isinstance(data, cls):
        return data
    known = {f.name for f in dataclasses.fields(cls)}
    unknown = sorted(set(data) - known)
    if unknown:
        raise ConfigError(f"unknown key {unknown[0]!r} in {where}; known keys: {sorted(known)}")
    values = dict(data)
    for key in values:
        if key in _NESTED and cls in (Scheme, Rewrites) and values[key] is not None:
            values[key] = _decode(_NESTED[key], values[key], f"{where}.{key}")
        elif key == "granularity" and not isinstance(values[key], Granularity):
            values[key] = _granularity(values[key])
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


@register_quantize_module_handler(QuantConfig)
def _for_torchao(module: nn.Module, config: QuantConfig) -> nn.Module:
    """What ``torchao.quantization.quantize_`` calls; imported when it is, since solvers and modules lie above this file."""
    return importlib.import_module("mmqc.checkpoint.torchao_handler").quantize_module(module, config)
