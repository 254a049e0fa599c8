"""The parts of a config: how weights, activations, keys and values are rounded, and what the measured rewrites do.

Each is a value: frozen, comparable, checked when it is made.  ``config.py`` puts them together.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_type_hints

from torchao.quantization.granularity import Granularity, PerGroup, PerRow, PerTensor, PerToken

from mmqc.errors import MmqcError

Solver = Literal["rtn", "mse_clip", "awq_clip", "gptq", "learned"]
Clip = Literal["best", "inputs", "weights", "none"]
Observer = Literal["minmax", "percentile"]
Amplifier = int | Literal["heuristic", "progressive"]
Search = Literal["none", "model", "layer"]
Number = Literal["int", "float"]
ZeroPoint = Literal["int", "float"]
KV_BITS = (1, 2, 4, 8)  # of packed keys and values
Float4 = Literal["mxfp4", "nvfp4"]
WeightType = Literal[Number, Float4]
BLOCKS: dict[str, int] = {"mxfp4": 32, "nvfp4": 16}  # weights of 4 bits that are floats: input channels per scale


class ConfigError(MmqcError, ValueError):
    """A configuration that cannot be: names the field, the value and what is allowed."""


def require(ok: bool, where: str, value: object, allowed: object) -> None:
    """Raise a ConfigError unless ``ok``."""
    if not ok:
        raise ConfigError(f"{where} = {value!r} is not supported; allowed: {allowed}")


def is_a(value: object, classes: tuple[type, ...]) -> bool:
    """``isinstance``, where True and False are no numbers."""
    return isinstance(value, classes) and (bool in classes or not isinstance(value, bool))


@cache
def _classes(spec: type) -> dict[str, tuple[type, ...]]:
    """What the value of each field of a dataclass is an instance of; fields that declare more than classes are not named."""
    fields = {}
    for name, declared in get_type_hints(spec).items():
        some = get_args(declared) if isinstance(declared, UnionType) else (declared,)
        if all(isinstance(one, type) and one is not Granularity for one in some):  # of which each spec takes some
            fields[name] = (*some, int) if float in some else some
    return fields


def require_types(spec: Any) -> None:
    """Raise a ConfigError where a field of this dataclass is none of the classes that it declares; True is no number."""
    for name, classes in _classes(type(spec)).items():
        value = getattr(spec, name)
        words = " or ".join("None" if one is NoneType else one.__name__ for one in classes)
        require(is_a(value, classes), f"{type(spec).__name__}.{name}", value, words)


@dataclass(frozen=True)
class WeightSpec:
    """Weights of few bits, rounded by ``solver``.

    Attributes:
        bits: 2, 3, 4 or 8.
        granularity: ``PerRow()``, one scale per output channel, or ``PerGroup(g)``, one per g input channels (the last
            group is short where g does not divide the width).
        solver: ``rtn``, ``mse_clip`` (clip that minimises the error's 2.4-norm), ``awq_clip`` (clip that minimises the
            output's error, AWQ's), ``gptq``, or ``learned``: gptq's codes and scales, then gradients of the output of each
            block that can be run by itself (calibration/learn.py); elsewhere, and in stacked experts, gptq.  The last three
            need calibration.
        symmetric: False: every scale has a zero point beside it (weight-only schemes).
        act_order: gptq takes input channels in order of falling magnitude.
        static_groups: gptq fits the groups' scales to the untouched weight; False: when their turn comes, which takes the
            channels' own order.
        damping: gptq adds this part of its mean diagonal to the second moment.
        amplifier: integer group scales round(s amplifier), a power of two, or "heuristic": the smallest one that lifts every
            scale of a layer to 1 (Integer Scale, arXiv:2405.14597, section 4.1).  "progressive": a step for every output channel,
            so that codes times integer scales are 8-bit integers and a product needs no pass per group (QServe,
            arXiv:2405.04532, section 4.1); to 4 bits.  None: float scales.
        type: "int"; "float": float8_e4m3fn, 8 bits, rounded to nearest with one scale per output channel; "mxfp4" or "nvfp4":
            e2m1, 4 bits, with a scale of 8 bits per 32 or 16 input channels (ops/float4.py), weight-only.
        clip: gptq's, of grids.  ``best``: of several sweeps each row keeps the one whose output error is least, and its codes and
            scales then descend on that error.  ``inputs``: one sweep, by what each rounding costs in it, zero points with it;
            ``weights``: by the weights' own error, as QuaRot, MQuant and ResQ do behind rotations; ``none`` (solvers/gptq.py).
            None: the first, but for 8 bits, which lose nothing, the second.
        steps: learned's, of gradients for each block.
        clip_scores: awq_clip clips linears that make queries and keys as well, which the authors' code leaves as they are.
        zero_point: where zero lies on a grid that is not symmetric.  "int": on a code, stored as int8.  "float": between the codes
            or outside of them, stored as float16 (HQQ, Badri & Shaji 2023): a grid fits both ends of its group, and no weight is
            exactly 0 but by chance.
    """

    bits: int = 4
    granularity: Granularity = field(default_factory=PerRow)
    solver: Solver = "rtn"
    symmetric: bool = True
    act_order: bool = True
    static_groups: bool = True
    damping: float = 0.01
    amplifier: Amplifier | None = None
    type: WeightType = "int"
    clip: Clip | None = None
    clip_scores: bool = False
    steps: int = 200
    zero_point: ZeroPoint = "int"

    def __post_init__(self) -> None:
        require_types(self)
        require(self.bits in (2, 3, 4, 8), "WeightSpec.bits", self.bits, (2, 3, 4, 8))
        types = ("int", "float", *BLOCKS)
        require(self.type in types, "WeightSpec.type", self.type, types)
        plain = self.bits == 8 and self.solver == "rtn" and self.symmetric and not self.group_size
        allowed = "'int', or 'float' for 8 bits a channel, symmetric, by rtn"
        require(plain or self.type != "float", "WeightSpec.type", self.type, allowed)
        self._check_float4()
        self._check_zero_point()
        allowed = "PerRow(), PerGroup(g) with g = 1, 2, ..."
        size = getattr(self.granularity, "group_size", 1)
        known = isinstance(self.granularity, PerRow | PerGroup) and isinstance(size, int) and size is not True and size > 0
        require(known, "WeightSpec.granularity", self.granularity, allowed)
        require(self.solver in get_args(Solver), "WeightSpec.solver", self.solver, get_args(Solver))
        ordered = self.act_order and not self.static_groups and self.group_size and self.solver in ("gptq", "learned")
        require(not ordered, "WeightSpec.act_order", self.act_order, "False for groups that are not static")
        require(self.clip in (None, *get_args(Clip)), "WeightSpec.clip", self.clip, (*get_args(Clip), None))
        require(0 < self.damping < 1, "WeightSpec.damping", self.damping, "(0, 1)")
        require(type(self.steps) is int and self.steps >= 0, "WeightSpec.steps", self.steps, "an integer of at least 0")
        floats = self.amplifier is None or self.solver != "learned"
        require(floats, "WeightSpec.amplifier", self.amplifier, "None where solver is 'learned'")
        if self.amplifier is not None:
            power = type(self.amplifier) is int and self.amplifier > 0 and not self.amplifier & (self.amplifier - 1)
            allowed = "a power of two, 'heuristic', 'progressive', None"
            named = self.amplifier in ("heuristic", "progressive")
            require(power or named, "WeightSpec.amplifier", self.amplifier, allowed)
            fits = self.amplifier != "progressive" or self.bits <= 4
            require(fits, "WeightSpec.bits", self.bits, "2, 3 or 4 where amplifier is 'progressive'")
            grouped = isinstance(self.granularity, PerGroup)
            require(grouped, "WeightSpec.granularity", self.granularity, "PerGroup(g) where amplifier is set")

    def _check_float4(self) -> None:
        if self.type not in BLOCKS:
            return
        require(self.bits == 4, "WeightSpec.bits", self.bits, f"4 where type is {self.type!r}")
        block = BLOCKS[self.type]
        fits = self.group_size == block
        require(fits, "WeightSpec.granularity", self.granularity, f"PerGroup({block}) where type is {self.type!r}")
        require(self.symmetric, "WeightSpec.symmetric", self.symmetric, f"True where type is {self.type!r}")
        require(self.amplifier is None, "WeightSpec.amplifier", self.amplifier, f"None where type is {self.type!r}")
        known = self.solver != "learned"
        require(known, "WeightSpec.solver", self.solver, f"rtn, mse_clip, awq_clip or gptq where type is {self.type!r}")
        require(self.static_groups, "WeightSpec.static_groups", self.static_groups, f"True where type is {self.type!r}")

    def _check_zero_point(self) -> None:
        require(self.zero_point in get_args(ZeroPoint), "WeightSpec.zero_point", self.zero_point, get_args(ZeroPoint))
        plain = not self.symmetric and self.type == "int" and self.amplifier is None
        allowed = "'int', or 'float' where symmetric is False, type is 'int' and amplifier is None"
        require(plain or self.zero_point == "int", "WeightSpec.zero_point", self.zero_point, allowed)

    @property
    def float4(self) -> bool:
        """Whether weights are floats of 4 bits."""
        return self.type in BLOCKS

    @property
    def bits_with_scales(self) -> float:
        """Bits that a weight takes with its part of its group's scale and zero point; what rows and tensors have is not counted."""
        if not self.group_size:
            return self.bits
        return self.bits + (8 if self.float4 else 32 + self.zero_bits) / self.group_size

    @property
    def zero_bits(self) -> int:
        """Bits of a zero point; 0 where there is none."""
        return 0 if self.symmetric else 16 if self.float_zero else 8

    @property
    def float_zero(self) -> bool:
        """Whether zero may lie between the codes."""
        return self.zero_point == "float"

    @property
    def needs_hessian(self) -> bool:
        """Whether the solver wants the second moment of the layer's inputs."""
        return self.solver in ("gptq", "awq_clip", "learned")

    @property
    def how_to_clip(self) -> Clip:
        """``clip``, or what None means."""
        return self.clip or ("inputs" if self.bits == 8 else "best")

    @property
    def group_size(self) -> int:
        """Input channels per scale; 0 means the whole row."""
        return self.granularity.group_size if isinstance(self.granularity, PerGroup) else 0


@dataclass(frozen=True)
class ActivationSpec:
    """Symmetric activations: static, one scale per tensor or, with ``per_modality``, one per tensor and modality (MSQ); or dynamic.

    Attributes:
        bits: 8.
        granularity: ``PerTensor()``, static, or ``PerToken()``: one scale per token, found as it comes (ops/token_matmul.py).
        per_modality: MQuant's modality-specific quantization (section 4.1): visual and text rows have their own scale.
        observer: ``minmax``: s = max(|min| / 128, |max| / 127); ``percentile``: the same of a percentile of |x|.
        percentile: in (0, 1], used by the percentile observer.
        type: "int", or "float": float8_e4m3fn with s = max|x| / 448.
    """

    bits: int = 8
    granularity: Granularity = field(default_factory=PerTensor)
    per_modality: bool = False
    observer: Observer = "minmax"
    percentile: float = 0.99999
    type: Number = "int"

    def __post_init__(self) -> None:
        require_types(self)
        require(self.type in get_args(Number), "ActivationSpec.type", self.type, get_args(Number))
        require(self.bits == 8, "ActivationSpec.bits", self.bits, (8,))
        allowed = "PerTensor(), PerToken()"
        require(isinstance(self.granularity, PerTensor | PerToken), "ActivationSpec.granularity", self.granularity, allowed)
        static = isinstance(self.granularity, PerTensor)
        require(static or not self.per_modality, "ActivationSpec.per_modality", self.per_modality, "False beside PerToken()")
        require(self.observer in get_args(Observer), "ActivationSpec.observer", self.observer, get_args(Observer))
        require(0 < self.percentile <= 1, "ActivationSpec.percentile", self.percentile, "(0, 1]")

    @property
    def static(self) -> bool:
        """Whether calibration finds the scale."""
        return isinstance(self.granularity, PerTensor)


@dataclass(frozen=True)
class DynamicSpec:
    """Activations quantized as they come: asymmetric, one scale per token and part of the channels.

    Attributes:
        bits: 2 to 8, of the channels' low part.
        high_bits: 2, 3, 4 or 8, of the activations and the weights of the high part.
        high_fraction: in [0, 1/2], how many of its channels a linear has in the high part; 0: one part.
        high: the high part is ``basis``, the last coordinates of a principal basis (ResQ; a linear that reads none has one
            part), or ``outliers``, the channels of the largest magnitudes that calibration saw (QUIK).
        lowest_bits: 2 to 8, of the activations and 2, 3, 4 or 8, of the weights of a third part, ResQ's first coordinates.
        lowest_fraction: in [0, 1/2], how many channels that part has; 0: there is none.
        packed: weights of 4 bits and fewer are stored in 4 bits, and written out in every call; False: in int8, which needs
            twice the memory and spares the writing.
    """

    bits: int = 4
    high_bits: int = 8
    high_fraction: float = 0.0
    high: Literal["basis", "outliers"] = "basis"
    lowest_bits: int = 2
    lowest_fraction: float = 0.0
    packed: bool = True

    def __post_init__(self) -> None:
        require_types(self)
        require(self.lowest_bits in (2, 3, 4, 8), "DynamicSpec.lowest_bits", self.lowest_bits, (2, 3, 4, 8))
        require(0 <= self.lowest_fraction <= 0.5, "DynamicSpec.lowest_fraction", self.lowest_fraction, "[0, 1/2]")
        fits = not self.lowest_fraction or (self.high_fraction and self.high == "basis")
        require(bool(fits), "DynamicSpec.lowest_fraction", self.lowest_fraction, "0 without a high part in a principal basis")
        require(2 <= self.bits <= 8, "DynamicSpec.bits", self.bits, "2 to 8")
        require(self.high_bits in (2, 3, 4, 8), "DynamicSpec.high_bits", self.high_bits, (2, 3, 4, 8))
        require(0 <= self.high_fraction <= 0.5, "DynamicSpec.high_fraction", self.high_fraction, "[0, 1/2]")
        require(self.high in ("basis", "outliers"), "DynamicSpec.high", self.high, ("basis", "outliers"))


@dataclass(frozen=True)
class ChannelScales:
    """AWQ's factors per input channel (arXiv:2306.00978, section 3.2), found by calibration.

    Attributes:
        grid: exponents tried: 0, 1/grid, ...
        duo: weigh the inputs' magnitudes against the weights', as LLM Compressor does.
        shared_heads: ``average``: value heads that several query heads share get one factor for all of them; ``skip``: none,
            as in the authors' code.
        loss: what the exponent is chosen by: ``layer``, the scaled linears' own output error; ``block``, that of the attention
            or the MLP around them, as in the authors' code, for linears behind a norm.
        at_most: factors are folded in where they leave at most this part of the loss without any.
    """

    grid: int = 20
    duo: bool = False
    shared_heads: Literal["average", "skip"] = "average"
    loss: Literal["layer", "block"] = "layer"
    at_most: float = 1.0

    def __post_init__(self) -> None:
        require_types(self)
        require(self.grid >= 1, "ChannelScales.grid", self.grid, "1 or more")
        allowed = ("average", "skip")
        require(self.shared_heads in allowed, "ChannelScales.shared_heads", self.shared_heads, allowed)
        require(self.loss in ("layer", "block"), "ChannelScales.loss", self.loss, ("layer", "block"))
        require(0 < self.at_most <= 1, "ChannelScales.at_most", self.at_most, "a part: more than 0, at most 1")


@dataclass(frozen=True)
class Bases:
    """ResQ's principal bases (arXiv:2412.14363, section 4.2), found by calibration.

    Attributes:
        streams: U_A, of the residual streams, one for each tower.
        heads: U_B, of each key-value head's values.
        by: ``variance``, the principal components; ``peaks``, the channels of the largest magnitudes: "outlier + rotation".
        random: what spreads a subspace's coordinates: ``orthogonal`` as in the authors' code, or ``hadamard``.
        solver_batches: the weights' solver sees this many batches, the first ones; None: as many as the bases, all.  The paper has
            512 for the bases and 128 for GPTQ.
    """

    streams: bool = True
    heads: bool = True
    random: Literal["orthogonal", "hadamard"] = "orthogonal"
    solver_batches: int | None = None
    by: Literal["variance", "peaks"] = "variance"

    def __post_init__(self) -> None:
        require_types(self)
        require(self.by in ("variance", "peaks"), "Bases.by", self.by, ("variance", "peaks"))
        require(self.solver_batches is None or self.solver_batches >= 1, "Bases.solver_batches", self.solver_batches, "1 or more")
        allowed = ("orthogonal", "hadamard")
        require(self.random in allowed, "Bases.random", self.random, allowed)


@dataclass(frozen=True)
class KVRounding:
    """The decoder's keys and values rounded per head and token inside attention: the accuracy of a small cache, not its size.

    Attributes:
        bits: 2 to 8, of the low coordinates of a head.
        high_bits: 2 to 8, of the high ones.
        high_fraction: in [0, 1/2], how many of a head's coordinates are high.
        basis: of keys, behind RoPE: ``principal`` (ResQ's U_C), ``peaks`` (channels of the largest magnitudes, "outlier +
            rotation"), ``hadamard`` (QuaRot's), or ``none``.
    """

    bits: int = 4
    high_bits: int = 8
    high_fraction: float = 0.0
    basis: Literal["none", "hadamard", "principal", "peaks"] = "none"

    def __post_init__(self) -> None:
        require_types(self)
        for name in ("bits", "high_bits"):
            require(2 <= getattr(self, name) <= 8, f"KVRounding.{name}", getattr(self, name), "2 to 8")
        require(0 <= self.high_fraction <= 0.5, "KVRounding.high_fraction", self.high_fraction, "[0, 1/2]")
        allowed = ("none", "hadamard", "principal", "peaks")
        require(self.basis in allowed, "KVRounding.basis", self.basis, allowed)


@dataclass(frozen=True)
class KVSpec:
    """How the KV cache is stored: visual tokens packed (ops/kv_pack.py), text and generated tokens in the model's dtype or rounded.

    Attributes:
        bits: 1, 2, 4 or 8; where layers differ, at most so many on average, from 1 to 8.
        by_layer: calibration gives each layer 1, 2, 4 or 8 bits of its own (kv/layer_bits.py).
        layer_bits: them, one for each of the decoder's layers; those of layers that are not packed are not read.  Filled in by
            ``quantize_`` where ``by_layer`` asks for it.
        keys: "channel", one range per KV head and channel, or "tensor", one range for the sequence.
        values: "channel", "token", one range per KV head and token, or "tensor".
        shrink_keys, shrink_values: in (0, 1], the range is narrowed about its centre by this factor; where layers differ, that of
            layers of 1 bit.
        rounding: of keys: "nearest" codes, or those that keep the scores of the "queries" that calibration saw
            (ops/kv_round_keys.py), with ranges by channel; where layers differ, in layers of 1 and 2 bits.
        search: what chooses ``tau``: "none" leaves it, "model" searches one pair for all layers, "layer" one for each.
        tau: pairs (tau1, tau2) of CalibQuant's score calibration, one for all layers or one for each; () is none of it.
            Filled in by ``quantize_`` where ``search`` asks for it.
        text_bits: of text and generated tokens: 16, the model's dtype, or 8 or 4 with a range per token, head and block of
            channels (ops/kv_token_attention.py).
        text_window: so many of a sequence's last text tokens stay in the model's dtype all the same (KIVI's residual).
        text_block: channels to a block.
    """

    bits: int = 1
    keys: str = "channel"
    values: str = "channel"
    shrink_keys: float = 1.0
    shrink_values: float = 1.0
    rounding: str = "nearest"
    search: Search = "none"
    tau: tuple[tuple[float, float], ...] = ()
    text_bits: int = 16
    text_window: int = 128
    text_block: int = 32
    by_layer: bool = False
    layer_bits: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        require_types(self)
        require(self.text_bits in (16, 8, 4), "KVSpec.text_bits", self.text_bits, (16, 8, 4))
        for name in ("text_window", "text_block"):
            require(getattr(self, name) >= 1, f"KVSpec.{name}", getattr(self, name), "1 or more")
        fits = self.bits in range(1, 9) if self.layers_differ else self.bits in KV_BITS
        require(fits, "KVSpec.bits", self.bits, "1 to 8, the mean of layers that differ" if self.layers_differ else KV_BITS)
        object.__setattr__(self, "layer_bits", tuple(self.layer_bits))
        require(all(b in KV_BITS for b in self.layer_bits), "KVSpec.layer_bits", self.layer_bits, f"each one of {KV_BITS}")
        require(self.keys in ("channel", "tensor"), "KVSpec.keys", self.keys, ("channel", "tensor"))
        allowed = ("channel", "token", "tensor")
        require(self.values in allowed, "KVSpec.values", self.values, allowed)
        for name in ("shrink_keys", "shrink_values"):
            require(0 < getattr(self, name) <= 1, f"KVSpec.{name}", getattr(self, name), "(0, 1]")
        allowed = ("nearest", "queries")
        require(self.rounding in allowed, "KVSpec.rounding", self.rounding, allowed)
        by_channel = self.rounding == "nearest" or self.keys == "channel"
        require(by_channel, "KVSpec.keys", self.keys, '"channel" where rounding is "queries"')
        require(self.search in get_args(Search), "KVSpec.search", self.search, get_args(Search))
        pairs = all(len(pair) == 2 and min(pair) >= 0 for pair in self.tau)
        require(pairs, "KVSpec.tau", self.tau, "pairs of numbers >= 0")
        object.__setattr__(self, "tau", tuple((float(a), float(b)) for a, b in self.tau))

    @property
    def searches(self) -> bool:
        """Whether tau is still to be found."""
        return self.search != "none" and not self.tau

    @property
    def layers_differ(self) -> bool:
        """Whether each layer has bits of its own, known or not."""
        return self.by_layer or bool(self.layer_bits)

    @property
    def searches_bits(self) -> bool:
        """Whether the layers' bits are still to be found."""
        return self.by_layer and not self.layer_bits

    @property
    def needs_data(self) -> bool:
        """Whether calibration batches have something to say."""
        return self.searches or self.searches_bits or self.rounding == "queries"

    def of_layer(self, layer: int) -> KVSpec:
        """How one layer is stored, as if all were stored so; ``tau_of`` says what its tau is.

        Raises:
            ConfigError: the layers' bits are still to be found.
        """
        if not self.layers_differ:
            return self
        require(not self.searches_bits, "KVSpec.layer_bits", self.layer_bits, "found: quantize_ the model with calibration=...")
        bits = self.layer_bits[layer]
        changes: dict[str, Any] = {"bits": bits, "by_layer": False, "layer_bits": ()}
        if bits > 1:
            changes |= {"shrink_keys": 1.0, "shrink_values": 1.0}
        if bits > 2:
            changes["rounding"] = "nearest"
        return dataclasses.replace(self, **changes)

    def tau_of(self, layer: int) -> tuple[float, float]:
        """The pair of one layer."""
        return (0.0, 0.0) if not self.tau else self.tau[0] if len(self.tau) == 1 else self.tau[layer]
