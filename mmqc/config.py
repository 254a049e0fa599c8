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
from typing import Any, ClassVar, Literal, get_args

from torch import nn
from torchao.core.config import AOBaseConfig
from torchao.quantization.granularity import Granularity, PerGroup, PerRow, PerTensor
from torchao.quantization.transform_module import register_quantize_module_handler

VERSION = 1
TOWERS = ("vision", "projector", "language")
ROLES = ("head", "down")  # that may have a scheme of their own
HEAD = "lm_head"  # in ``keep``, the output head, whatever it is called
Solver = Literal["rtn", "mse_clip", "awq_clip", "gptq"]
Observer = Literal["minmax", "percentile"]
Amplifier = int | Literal["heuristic"]
Search = Literal["none", "model", "layer"]


class ConfigError(ValueError):
    """A configuration that cannot be: names the field, the value and what is allowed."""


def _require(ok: bool, where: str, value: object, allowed: object) -> None:
    if not ok:
        raise ConfigError(f"{where} = {value!r} is not supported; allowed: {allowed}")


@dataclass(frozen=True)
class WeightSpec:
    """Integer weights, rounded by ``solver``.

    Attributes:
        bits: 2, 3, 4 or 8.
        granularity: ``PerRow()``, one scale per output channel, or ``PerGroup(g)``, one per g input channels (the last
            group is short where g does not divide the width).
        solver: ``rtn``, ``mse_clip`` (clip that minimises the error's 2.4-norm), ``awq_clip`` (clip that minimises the
            output's error, AWQ's) or ``gptq``; the last two need calibration.
        symmetric: False: every scale has a zero point beside it (weight-only schemes).
        act_order: gptq takes input channels in order of falling magnitude.
        static_groups: gptq fits the groups' scales to the untouched weight; False: when their turn comes, which takes the
            channels' own order.
        damping: gptq adds this part of its mean diagonal to the second moment.
        amplifier: integer group scales round(s amplifier), a power of two, or "heuristic": the smallest one that lifts every
            scale of a layer to 1 (Integer Scale, arXiv:2405.14597, section 4.1).  None: float scales.
    """

    bits: int = 4
    granularity: Granularity = field(default_factory=PerRow)
    solver: Solver = "rtn"
    symmetric: bool = True
    act_order: bool = True
    static_groups: bool = True
    damping: float = 0.01
    amplifier: Amplifier | None = None

    def __post_init__(self) -> None:
        _require(self.bits in (2, 3, 4, 8), "WeightSpec.bits", self.bits, (2, 3, 4, 8))
        _require(
            isinstance(self.granularity, PerRow | PerGroup),
            "WeightSpec.granularity",
            self.granularity,
            "PerRow(), PerGroup(g)",
        )
        _require(self.solver in get_args(Solver), "WeightSpec.solver", self.solver, get_args(Solver))
        ordered = self.act_order and not self.static_groups and self.group_size and self.solver == "gptq"
        _require(not ordered, "WeightSpec.act_order", self.act_order, "False for groups that are not static")
        _require(0 < self.damping < 1, "WeightSpec.damping", self.damping, "(0, 1)")
        if self.amplifier is not None:
            power = type(self.amplifier) is int and self.amplifier > 0 and not self.amplifier & (self.amplifier - 1)
            allowed = "a power of two, 'heuristic', None"
            _require(power or self.amplifier == "heuristic", "WeightSpec.amplifier", self.amplifier, allowed)
            grouped = isinstance(self.granularity, PerGroup)
            _require(grouped, "WeightSpec.granularity", self.granularity, "PerGroup(g) where amplifier is set")

    @property
    def needs_hessian(self) -> bool:
        """Whether the solver wants the second moment of the layer's inputs."""
        return self.solver in ("gptq", "awq_clip")

    @property
    def group_size(self) -> int:
        """Input channels per scale; 0 means the whole row."""
        return self.granularity.group_size if isinstance(self.granularity, PerGroup) else 0


@dataclass(frozen=True)
class ActivationSpec:
    """Static symmetric activations, one scale per tensor or, with ``per_modality``, one per tensor and modality (MSQ).

    Attributes:
        bits: 8.
        granularity: ``PerTensor()``.
        per_modality: MQuant's modality-specific quantization (section 4.1): visual and text rows have their own scale.
        observer: ``minmax``: s = max(|min| / 128, |max| / 127); ``percentile``: the same of a percentile of |x|.
        percentile: in (0, 1], used by the percentile observer.
    """

    bits: int = 8
    granularity: Granularity = field(default_factory=PerTensor)
    per_modality: bool = False
    observer: Observer = "minmax"
    percentile: float = 0.99999

    def __post_init__(self) -> None:
        _require(self.bits == 8, "ActivationSpec.bits", self.bits, (8,))
        _require(isinstance(self.granularity, PerTensor), "ActivationSpec.granularity", self.granularity, "PerTensor()")
        _require(self.observer in get_args(Observer), "ActivationSpec.observer", self.observer, get_args(Observer))
        _require(0 < self.percentile <= 1, "ActivationSpec.percentile", self.percentile, "(0, 1]")


@dataclass(frozen=True)
class DynamicSpec:
    """Activations quantized as they come: asymmetric, one scale per token and part of the channels.

    Attributes:
        bits: 2 to 8, of the channels' low part.
        high_bits: 2, 3, 4 or 8, of the activations and the weights of the high part.
        high_fraction: in [0, 1/2], how many of its channels a linear has in the high part; 0: one part.
        high: the high part is ``basis``, the last coordinates of a principal basis (ResQ; a linear that reads none has one
            part), or ``outliers``, the channels of the largest magnitudes that calibration saw (QUIK).
    """

    bits: int = 4
    high_bits: int = 8
    high_fraction: float = 0.0
    high: Literal["basis", "outliers"] = "basis"

    def __post_init__(self) -> None:
        _require(2 <= self.bits <= 8, "DynamicSpec.bits", self.bits, "2 to 8")
        _require(self.high_bits in (2, 3, 4, 8), "DynamicSpec.high_bits", self.high_bits, (2, 3, 4, 8))
        _require(0 <= self.high_fraction <= 0.5, "DynamicSpec.high_fraction", self.high_fraction, "[0, 1/2]")
        _require(self.high in ("basis", "outliers"), "DynamicSpec.high", self.high, ("basis", "outliers"))


@dataclass(frozen=True)
class Scheme:
    """The scheme of every linear of one tower: static or dynamic activations, or neither: weight-only."""

    weight: WeightSpec = field(default_factory=WeightSpec)
    activation: ActivationSpec | None = None
    dynamic: DynamicSpec | None = None

    def __post_init__(self) -> None:
        if self.dynamic is not None:
            plain = self.activation is None and self.weight.symmetric and not self.weight.group_size
            _require(plain, "Scheme.dynamic", self.dynamic, "None beside static activations, zero points or groups")
        symmetric = self.weight.symmetric or self.activation is None
        _require(symmetric, "WeightSpec.symmetric", self.weight.symmetric, "True beside quantized activations")
        integer = self.weight.amplifier is not None
        _require(
            not integer or self.activation is not None,
            "Scheme.activation",
            self.activation,
            "an ActivationSpec where weight.amplifier is set: integer scales multiply sums of integer products",
        )

    def __str__(self) -> str:
        """The field's shorthand, e.g. W4A8, W4A16-g128 or, with integer scales, W4A8-g128-i1024."""
        if (d := self.dynamic) is not None:
            share = f" + {d.high_fraction:g} at {d.high_bits}" if d.high_fraction else ""
            return f"W{self.weight.bits}A{d.bits}{share}"
        group = f"-g{self.weight.group_size}" if self.weight.group_size else ""
        group += f"-i{self.weight.amplifier}" if self.weight.amplifier is not None else ""
        return f"W{self.weight.bits}A{self.activation.bits if self.activation else 16}{group}"


@dataclass(frozen=True)
class ChannelScales:
    """AWQ's factors per input channel (arXiv:2306.00978, section 3.2), found by calibration.

    Attributes:
        grid: exponents tried: 0, 1/grid, ...
        duo: weigh the inputs' magnitudes against the weights', as LLM Compressor does.
        shared_heads: ``average``: value heads that several query heads share get one factor for all of them; ``skip``: none,
            as in the authors' code.
    """

    grid: int = 20
    duo: bool = False
    shared_heads: Literal["average", "skip"] = "average"

    def __post_init__(self) -> None:
        _require(self.grid >= 1, "ChannelScales.grid", self.grid, "1 or more")
        allowed = ("average", "skip")
        _require(self.shared_heads in allowed, "ChannelScales.shared_heads", self.shared_heads, allowed)


@dataclass(frozen=True)
class Bases:
    """ResQ's principal bases (arXiv:2412.14363, section 4.2), found by calibration.

    Attributes:
        streams: U_A, of the residual streams, one for each tower.
        heads: U_B, of each key-value head's values.
        random: what spreads a subspace's coordinates: ``orthogonal`` as in the authors' code, or ``hadamard``.
    """

    streams: bool = True
    heads: bool = True
    random: Literal["orthogonal", "hadamard"] = "orthogonal"

    def __post_init__(self) -> None:
        allowed = ("orthogonal", "hadamard")
        _require(self.random in allowed, "Bases.random", self.random, allowed)


@dataclass(frozen=True)
class KVRounding:
    """The decoder's keys and values rounded per head and token inside attention: the accuracy of a small cache, not its size.

    Attributes:
        bits: 2 to 8, of the low coordinates of a head.
        high_bits: 2 to 8, of the high ones.
        high_fraction: in [0, 1/2], how many of a head's coordinates are high.
        basis: of keys, behind RoPE: ``principal`` (ResQ's U_C), ``hadamard`` (QuaRot's), or ``none``.
    """

    bits: int = 4
    high_bits: int = 8
    high_fraction: float = 0.0
    basis: Literal["none", "hadamard", "principal"] = "none"

    def __post_init__(self) -> None:
        for name in ("bits", "high_bits"):
            _require(2 <= getattr(self, name) <= 8, f"KVRounding.{name}", getattr(self, name), "2 to 8")
        _require(0 <= self.high_fraction <= 0.5, "KVRounding.high_fraction", self.high_fraction, "[0, 1/2]")
        allowed = ("none", "hadamard", "principal")
        _require(self.basis in allowed, "KVRounding.basis", self.basis, allowed)


@dataclass(frozen=True)
class Rewrites:
    """Which rewrites run before quantization; all but ``suppress`` leave the model's function unchanged.

    Attributes:
        fold_norms: norm gains, biases and means go into the neighbouring weights (LayerNorm becomes RMSNorm).
        rotate: residual streams and V/O spaces are rotated by a randomized Hadamard matrix.
        hadamard: an online Hadamard in front of linears that read a non-linearity (down_proj, fc2).
        hadamard_everywhere: also in front of linears that read a stream which no rotation passes (sandwich and post norms);
            about two more online transforms a layer.
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

    def __post_init__(self) -> None:
        _require(self.rotate or self.bases is None, "Rewrites.rotate", self.rotate, "True where there are bases")
        _require(self.smooth is None or 0 < self.smooth < 1, "Rewrites.smooth", self.smooth, "in (0, 1), or None")
        both = self.scales is not None and self.smooth is not None
        _require(not both, "Rewrites.smooth", self.smooth, "None beside scales")
        _require(
            self.fold_norms or not self.rotate, "Rewrites.fold_norms", self.fold_norms, "True where rotate is True"
        )
        for name in ("suppress", "hadamard_everywhere"):
            needed = self.hadamard or not getattr(self, name)
            _require(needed, "Rewrites.hadamard", self.hadamard, f"True where {name} is True")


@dataclass(frozen=True)
class KVSpec:
    """How the visual tokens of the KV cache are stored (ops/kv_pack.py); text and generated tokens keep the model's dtype.

    Attributes:
        bits: 1, 2, 4 or 8.
        keys: "channel", one range per KV head and channel, or "tensor", one range for the sequence.
        values: "channel", "token", one range per KV head and token, or "tensor".
        shrink_keys, shrink_values: in (0, 1], the range is narrowed about its centre by this factor.
        search: what chooses ``tau``: "none" leaves it, "model" searches one pair for all layers, "layer" one for each.
        tau: pairs (tau1, tau2) of CalibQuant's score calibration, one for all layers or one for each; () is none of it.
            Filled in by ``quantize_`` where ``search`` asks for it.
    """

    bits: int = 1
    keys: str = "channel"
    values: str = "channel"
    shrink_keys: float = 1.0
    shrink_values: float = 1.0
    search: Search = "none"
    tau: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        _require(self.bits in (1, 2, 4, 8), "KVSpec.bits", self.bits, (1, 2, 4, 8))
        _require(self.keys in ("channel", "tensor"), "KVSpec.keys", self.keys, ("channel", "tensor"))
        allowed = ("channel", "token", "tensor")
        _require(self.values in allowed, "KVSpec.values", self.values, allowed)
        for name in ("shrink_keys", "shrink_values"):
            _require(0 < getattr(self, name) <= 1, f"KVSpec.{name}", getattr(self, name), "(0, 1]")
        _require(self.search in get_args(Search), "KVSpec.search", self.search, get_args(Search))
        pairs = all(len(pair) == 2 and min(pair) >= 0 for pair in self.tau)
        _require(pairs, "KVSpec.tau", self.tau, "pairs of numbers >= 0")
        object.__setattr__(self, "tau", tuple((float(a), float(b)) for a, b in self.tau))

    def tau_of(self, layer: int) -> tuple[float, float]:
        """The pair of one layer."""
        return (0.0, 0.0) if not self.tau else self.tau[0] if len(self.tau) == 1 else self.tau[layer]


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
    statistics: Mapping[str, Any] | None = field(default=None, hash=False)
    head: Scheme | None = None
    down: Scheme | None = None
    kv: KVSpec | None = None
    kv_rounding: KVRounding | None = None

    def __or__(self, other: QuantConfig) -> QuantConfig:
        """A recipe for the weights and one for the KV cache, as one config.

        Raises:
            ConfigError: both say something about the same.
        """
        for a, b in ((self, other), (other, self)):
            if b.kv is not None and a.kv is None and b.replace(kv=None) == QuantConfig():
                return a.replace(kv=b.kv)
        raise ConfigError(
            "a | b takes one config without kv and one with nothing but kv, e.g. mquant() | calibquant(bits=2)"
        )

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
        if self.kv_rounding is not None or (self.kv is not None and self.kv.search != "none" and not self.kv.tau):
            return True
        if self.rewrites.bases is not None or self.rewrites.smooth is not None:
            return bool(self.schemes)  # no statistics hold what these measure
        if any(s.dynamic is not None and s.dynamic.high == "outliers" for s in self.schemes.values()):
            return True
        if self.statistics is not None:
            return any(s.weight.needs_hessian for s in self.schemes.values())
        places = self.schemes.values()
        measured = any(s.activation is not None or s.dynamic is not None or s.weight.needs_hessian for s in places)
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
            if s.weight.group_size and s.activation is not None
        }
        allowed = "schemes with PerGroup(g) weights and quantized activations"
        _require(bool(changed), "QuantConfig", list(map(str, self.schemes.values())), allowed)
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
        _require(version == VERSION, "version", version, (VERSION,))
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


_GRANULARITIES = {"per_row": PerRow, "per_tensor": PerTensor, "per_group": PerGroup}


def _encode(value: Any) -> Any:
    if isinstance(value, Granularity):
        name = next(n for n, c in _GRANULARITIES.items() if isinstance(value, c))
        return {"per_group": value.group_size} if isinstance(value, PerGroup) else name
    if dataclasses.is_dataclass(value):
        return {f.name: _encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {k: _encode(v) for k, v in value.items()}
    return [_encode(v) for v in value] if isinstance(value, tuple) else value


_NESTED = {
    "weight": WeightSpec, "activation": ActivationSpec, "dynamic": DynamicSpec, "scales": ChannelScales, "bases": Bases,
}  # fmt: skip


def _granularity(value: Any) -> Granularity:
    if isinstance(value, dict) and set(value) == {"per_group"}:
        return PerGroup(value["per_group"])
    _require(value in ("per_row", "per_tensor"), "granularity", value, ("per_row", "per_tensor", {"per_group": "g"}))
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
    return cls(**values)


@register_quantize_module_handler(QuantConfig)
def _for_torchao(module: nn.Module, config: QuantConfig) -> nn.Module:
    """What ``torchao.quantization.quantize_`` calls; imported when it is, since solvers and modules lie above this file."""
    return importlib.import_module("mmqc.torchao_handler").quantize_module(module, config)
