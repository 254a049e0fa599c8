"""Ready-made configurations: one function per published method, plus plain baselines."""

from __future__ import annotations

import dataclasses
from typing import Literal

from torchao.quantization.granularity import PerGroup, PerRow, PerToken

from mmqc.config import (
    ActivationSpec,
    Amplifier,
    Bases,
    ChannelScales,
    Clip,
    ConfigError,
    DynamicSpec,
    KVRounding,
    QuantConfig,
    Rewrites,
    Scheme,
    Solver,
    WeightSpec,
    ZeroPoint,
)
from mmqc.engines.limits import for_engine as for_engine
from mmqc.recipes.cache import calibquant as calibquant
from mmqc.recipes.cache import global_range as global_range
from mmqc.recipes.cache import kivi as kivi


def rotate(*, online: bool = True, everywhere: bool = False, seed: int = 0, tensor_parallel: int = 1) -> QuantConfig:
    """Exact rewrites only: norms folded, residual streams and V/O rotated, Hadamards inserted; nothing is quantized.

    The model computes the same function and its parameters keep their names (QuaRot, arXiv:2404.00456, section 4).

    Args:
        online: transforms at run time in front of linears that read a non-linearity; without them rotations cost nothing.
        everywhere: transforms also in front of linears whose stream cannot be rotated (Gemma 3, GLM-4, OLMo 2).
        seed: of the random signs.
        tensor_parallel: as in ``mquant``.
    """
    rewrites = Rewrites(
        fold_norms=True, rotate=True, hadamard=online, hadamard_everywhere=everywhere, seed=seed, tensor_parallel=tensor_parallel
    )
    return QuantConfig(rewrites=rewrites)


def rtn(
    weight_bits: int = 8,
    activation_bits: int | None = None,
    group_size: int | None = None,
    *,
    symmetric: bool = True,
    solver: Literal["rtn", "mse_clip"] = "rtn",
    head_bits: int | None = None,
    zero_point: ZeroPoint = "int",
) -> QuantConfig:
    """Round to nearest, no rewrites, weights without calibration; activations, if any, with ONE static scale per tensor.

    Args:
        weight_bits: 2, 3, 4 or 8; few bits need groups (``group_size``).
        activation_bits: 8, or None for weight-only.
        group_size: input channels per weight scale; None means one scale per output channel.
        symmetric: False: a zero point beside every weight scale (weight-only).
        solver: of weights: ``rtn``, from the least to the largest, or ``mse_clip``, the range whose error is least.
        head_bits: of the output head's weight, the largest of a small model; None leaves the head in floating point.
        zero_point: "float", beside ``symmetric=False``: between the codes, as HQQ has them (Badri & Shaji 2023); with
            ``solver="mse_clip"`` each end of a group has a clip of its own.

    Raises:
        ConfigError: weights with zero points beside activations of few bits.
    """
    granularity = PerGroup(group_size) if group_size else PerRow()
    activation = ActivationSpec(bits=activation_bits) if activation_bits else None
    scheme = Scheme(WeightSpec(weight_bits, granularity, solver, symmetric, zero_point=zero_point), activation)
    return QuantConfig(vision=scheme, projector=scheme, language=scheme, head=_head(head_bits))


def gptq(
    weight_bits: int = 4,
    group_size: int | None = None,
    *,
    symmetric: bool = True,
    act_order: bool = True,
    static_groups: bool = True,
    damping: float = 0.01,
    clip: Clip | None = None,
    head_bits: int | None = None,
    activation_bits: int | None = None,
    zero_point: ZeroPoint = "int",
) -> QuantConfig:
    """GPTQ (arXiv:2210.17323, Algorithm 1): each rounding error of a weight is made up for by the channels after it.

    Args:
        weight_bits: 2, 3, 4 or 8.
        group_size: input channels per weight scale; None means one scale per output channel.
        symmetric: False: a zero point beside every scale.
        act_order: input channels in order of falling magnitude.
        static_groups: groups' scales are fitted before the sweep; False, when their turn comes, needs ``act_order=False``.
        damping: this part of its mean diagonal is added to the inputs' second moment.
        clip: of grids, see ``WeightSpec``; None: the best of several sweeps. ``weights`` is QuaRot's, ``none`` the paper's.
        head_bits: of the output head's weight; None leaves the head in floating point.
        activation_bits: static, one scale a tensor, beside symmetric weights; None, weight-only.
        zero_point: "float", beside ``symmetric=False``: between the codes, as in ``rtn``.
    """
    granularity = PerGroup(group_size) if group_size else PerRow()
    weight = WeightSpec(
        weight_bits, granularity, "gptq", symmetric, act_order, static_groups, damping, clip=clip, zero_point=zero_point
    )
    scheme = Scheme(weight, ActivationSpec(activation_bits) if activation_bits else None)
    return QuantConfig(vision=scheme, projector=scheme, language=scheme, head=_head(head_bits))


def learned(
    weight_bits: int = 2,
    group_size: int | None = 64,
    *,
    symmetric: bool = True,
    steps: int = 200,
    at_most: float | None = 0.5,
    head_bits: int | None = None,
    zero_point: ZeroPoint = "int",
) -> QuantConfig:
    """GPTQ, then gradients: rounding and scales of each block, learned from the block's output (AutoRound, arXiv:2309.05516).

    For 2 and 3 bits.  Gradients cannot help a group whose largest weights are not the important ones: AWQ's factors
    (arXiv:2306.00978) go in front where inputs have such outliers; everywhere, it is ``awq(..., solver="learned")``.

    Args:
        weight_bits: 2, 3, 4 or 8.
        group_size: input channels per weight scale; None means one scale per output channel.
        symmetric: False: a zero point beside every scale.
        steps: of gradients for each block, each of 8 calibration batches.
        at_most: AWQ's factors are taken where they leave at most this part of the error of rounding to nearest; None: nowhere.
        head_bits: of the output head's weight, rounded by gptq; None leaves the head in floating point.
        zero_point: "float", beside ``symmetric=False``: between the codes, as in ``rtn``; gptq finds it, gradients leave it.
    """
    granularity = PerGroup(group_size) if group_size else PerRow()
    scheme = Scheme(WeightSpec(weight_bits, granularity, "learned", symmetric, steps=steps, zero_point=zero_point))
    rewrites = Rewrites(scales=ChannelScales(at_most=at_most) if at_most is not None else None)
    return QuantConfig(vision=scheme, projector=scheme, language=scheme, head=_head(head_bits), rewrites=rewrites)


def awq(
    weight_bits: int = 4,
    group_size: int | None = 128,
    *,
    symmetric: bool = True,
    solver: Solver = "awq_clip",
    duo: bool = False,
    shared_heads: Literal["average", "skip"] = "average",
    loss: Literal["layer", "block"] = "layer",
    clip_scores: bool = False,
    head_bits: int | None = None,
    activation_bits: int | None = None,
    zero_point: ZeroPoint = "int",
) -> QuantConfig:
    """AWQ (arXiv:2306.00978, section 3.2): channels of large inputs get large weights before rounding.

    Both towers and the projector; a factor goes from a norm or a linear into the linears behind it wherever that is exact.

    Args:
        weight_bits: 2, 3, 4 or 8.
        group_size: input channels per weight scale; None means one scale per output channel.
        symmetric: False: a zero point beside every scale, as in the authors' code.
        solver: ``awq_clip``, the authors' clip; ``gptq``: AWQ and GPTQ together, for 2 bits (Table 9); ``rtn``: no search.
        duo: weigh the inputs' magnitudes against the weights'.
        shared_heads: ``average`` over the query heads that share a value head, or ``skip``, as in the authors' code.
        loss: ``layer``, the scaled linears' own output error, or ``block``, the attention's or the MLP's, as in the authors'
            code: every exponent is then tried by running it.
        clip_scores: ``awq_clip`` clips linears that make queries and keys as well, which the authors' code leaves as they are.
        head_bits: of the output head's weight; None leaves the head in floating point.
        activation_bits: static, one scale a tensor, beside symmetric weights, not seen by the search; None, weight-only.
        zero_point: "float", beside ``symmetric=False``: between the codes, as in ``rtn``.
    """
    granularity = PerGroup(group_size) if group_size else PerRow()
    activation = ActivationSpec(activation_bits) if activation_bits else None
    weight = WeightSpec(weight_bits, granularity, solver, symmetric, clip_scores=clip_scores, zero_point=zero_point)
    scheme = Scheme(weight, activation)
    rewrites = Rewrites(scales=ChannelScales(duo=duo, shared_heads=shared_heads, loss=loss))
    return QuantConfig(vision=scheme, projector=scheme, language=scheme, head=_head(head_bits), rewrites=rewrites)


def mquant(
    weight_bits: int = 4,
    activation_bits: int = 8,
    vision_weight_bits: int | None = None,
    *,
    msq: bool = True,
    rotate: bool = True,
    suppress: bool = True,
    solver: Solver = "gptq",
    head_bits: int | None = None,
    group_size: int | None = None,
    tensor_parallel: int = 1,
) -> QuantConfig:
    """MQuant (arXiv:2502.00425): static per-modality activation scales and rotations for both towers and the projector.

    Args:
        weight_bits: of the language model (and of the vision side, unless given).
        activation_bits: 8.
        vision_weight_bits: of the vision tower and the projector; None means ``weight_bits``.
        msq: one activation scale per modality (section 4.1) instead of one per tensor.
        rotate: LayerNorm to RMSNorm (section 4.2), rotations and online Hadamards.
        suppress: rotation magnitude suppression (section 4.3); without ``rotate`` there is nothing to suppress.
        solver: ``gptq`` as in the paper's Algorithm 1, ``mse_clip`` or ``rtn``.
        head_bits: of the output head's weight; None leaves the head in floating point, as the paper does.
        group_size: input channels per weight scale; None means one scale per output channel, as the paper does.
        tensor_parallel: how many ranks may share the model: each online Hadamard of the language model is in so many blocks,
            one rank's channels in each, which spreads an outlier over fewer channels; with 1 ranks gather in front of it.
    """
    activation = ActivationSpec(activation_bits, per_modality=msq)
    granularity = PerGroup(group_size) if group_size else PerRow()
    language = Scheme(WeightSpec(weight_bits, granularity, solver, clip="weights"), activation)
    vision = Scheme(WeightSpec(vision_weight_bits or weight_bits, granularity, solver, clip="weights"), activation)
    rewrites = Rewrites(
        fold_norms=rotate, rotate=rotate, hadamard=rotate, suppress=suppress and rotate, tensor_parallel=tensor_parallel
    )
    return QuantConfig(vision=vision, projector=vision, language=language, head=_head(head_bits), rewrites=rewrites)


def integer_scale(
    weight_bits: int = 4,
    activation_bits: int = 8,
    group_size: int = 128,
    amplifier: Amplifier | None = 1024,
    *,
    solver: Solver = "rtn",
    per_modality: bool = False,
    preset: Literal["llama3"] | None = None,
) -> QuantConfig:
    """Integer Scale (arXiv:2405.14597): group scales as integers, so that a product is one int32 sum.

    Activations have static scales here; the paper's are dynamic, per token.  ``QuantConfig.with_integer_scales``
    does the same to any recipe.

    Args:
        weight_bits: 2, 3, 4 or 8.
        activation_bits: 8.
        group_size: input channels per weight scale.
        amplifier: a power of two (the paper's default is 1024: section 6.1), "heuristic" (listing 1), "progressive"
            (``WeightSpec``), or None for float scales.
        solver: of the weights.
        per_modality: one activation scale per modality, as MQuant's.
        preset: "llama3", section 5.6: QuaRot's rotations, 8 bits in groups for the language model's linears behind a
            non-linearity, and 8192 where ``amplifier`` is 1024.
    """
    llama3 = preset == "llama3"
    if preset is not None and not llama3:
        raise ConfigError(f"preset = {preset!r} is not supported; allowed: 'llama3', None")
    amplifier = 8192 if llama3 and amplifier == 1024 else amplifier
    activation = ActivationSpec(activation_bits, per_modality=per_modality)
    scheme = Scheme(WeightSpec(weight_bits, PerGroup(group_size), solver, amplifier=amplifier), activation)
    down = Scheme(dataclasses.replace(scheme.weight, bits=8), activation) if llama3 else None
    rewrites = Rewrites(fold_norms=True, rotate=True, hadamard=True) if llama3 else Rewrites()
    return QuantConfig(vision=scheme, projector=scheme, language=scheme, down=down, rewrites=rewrites)


def per_token(
    weight_bits: int = 4,
    activation_bits: int = 4,
    *,
    symmetric: bool = False,
    group_size: int | None = None,
    kv_bits: int | None = None,
    solver: Solver = "gptq",
) -> QuantConfig:
    """Activations as they come, one scale per token; no rewrites: the baselines RTN and GPTQ of low-bit activations.

    ``per_token(8, 8, symmetric=True, solver="rtn")`` is what compressed-tensors calls dynamic W8A8, and
    ``per_token(4, 8, symmetric=True, group_size=128)`` its int4 with dynamic activations; vLLM runs both.

    Args:
        weight_bits: 2, 3, 4 or 8.
        activation_bits: 2 to 8; 8 where they are symmetric.
        symmetric: of activations; False: a zero point beside each token's scale.
        group_size: input channels per weight scale, beside symmetric activations; None means one scale per output channel.
        kv_bits: of the decoder's keys and values, rounded per head; None leaves them as they are.
        solver: ``rtn``, ``mse_clip`` or ``gptq``.

    Raises:
        ConfigError: symmetric activations of less than 8 bits, or groups beside asymmetric ones.
    """
    return _dynamic(weight_bits, _activations(activation_bits, symmetric), solver, Rewrites(), _kv(kv_bits), group_size)


def smoothquant(
    weight_bits: int = 4,
    activation_bits: int = 4,
    *,
    alpha: float = 0.5,
    symmetric: bool = False,
    kv_bits: int | None = None,
    solver: Solver = "gptq",
) -> QuantConfig:
    """SmoothQuant (arXiv:2211.10438, equation 4) with dynamic activations; with GPTQ it is what ResQ calls SmoothQuant+.

    Args:
        weight_bits: 2, 3, 4 or 8, one scale per output channel.
        activation_bits: 2 to 8; 8 where they are symmetric, as the authors' are.
        alpha: in (0, 1), how much of the inputs' range goes into the weights.
        symmetric: of activations, as in ``per_token``.
        kv_bits: of the decoder's keys and values, rounded per head; None leaves them as they are.
        solver: as in ``per_token``.

    Raises:
        ConfigError: symmetric activations of less than 8 bits.
    """
    return _dynamic(weight_bits, _activations(activation_bits, symmetric), solver, Rewrites(smooth=alpha), _kv(kv_bits))


def quarot(
    weight_bits: int = 4, activation_bits: int = 4, *, kv_bits: int | None = None, solver: Solver = "gptq", seed: int = 0
) -> QuantConfig:
    """QuaRot (arXiv:2404.00456): randomized Hadamards in front of all linears, one precision.

    Activations are asymmetric and not clipped, as ResQ compares it; QuaRot's own are symmetric, clipped at 0.9 of the maximum.

    Args:
        weight_bits: 2, 3, 4 or 8, one scale per output channel.
        activation_bits: 2 to 8.
        kv_bits: of the decoder's keys and values, rounded per head; None leaves them as they are.
        solver: as in ``per_token``.
        seed: of the random signs.
    """
    rewrites = Rewrites(fold_norms=True, rotate=True, hadamard=True, seed=seed)
    return _dynamic(weight_bits, DynamicSpec(activation_bits), solver, rewrites, _kv(kv_bits, basis="hadamard"))


def quik(
    bits: int = 4,
    high_bits: int = 8,
    high_fraction: float = 1 / 8,
    *,
    activation_bits: int | None = None,
    kv_bits: int | None = None,
    solver: Solver = "gptq",
) -> QuantConfig:
    """QUIK (arXiv:2310.09259): the channels of the largest magnitudes stay in more bits; no rotation.

    The high channels are a fixed fraction of a linear's inputs in 8 bits, as ResQ compares it; QUIK's own are 256 in 16 bits.

    Args:
        bits: of the other channels' weights, and of their activations unless ``activation_bits`` is given.
        high_bits: of the high channels' weights and activations.
        high_fraction: how many channels of each linear.
        activation_bits: 2 to 8.
        kv_bits: of the decoder's keys and values, rounded per head; None leaves them as they are.
        solver: as in ``per_token``.
    """
    dynamic = DynamicSpec(activation_bits or bits, high_bits, high_fraction, "outliers")
    return _dynamic(bits, dynamic, solver, Rewrites(), _kv(kv_bits))


def resq(
    bits: int = 4,
    high_bits: int = 8,
    high_fraction: float = 1 / 8,
    kv_bits: int | None = 4,
    *,
    activation_bits: int | None = None,
    vision_bits: int | None = 8,
    streams: bool = True,
    heads: bool = True,
    keys: bool = True,
    hadamard: bool = True,
    random: Literal["orthogonal", "hadamard"] = "orthogonal",
    lowest_bits: int = 2,
    lowest_fraction: float = 0.0,
    packed: bool = True,
    solver: Solver = "gptq",
    solver_batches: int | None = None,
    seed: int = 0,
) -> QuantConfig:
    """ResQ (arXiv:2412.14363): principal bases, the subspace of the largest variance in more bits.

    The paper quantizes the language model and leaves the vision tower in 16 bits; here it has ``vision_bits``: 8 cost nothing that
    450 questions show, 4 most of what ResQ loses (docs/results/docs_vqa.md).

    The paper's Table 3 by (bits, activation_bits): 4/4 is (4, 4), 4/8 is (4, 8), 3/8 is (3, 8), 2/8 is (2, 8), 3/3 is (3, 3).

    Args:
        bits: of the low subspace's weights, and of its activations unless ``activation_bits`` is given.
        high_bits: of the high subspace's weights and activations.
        high_fraction: r / d, the size of the high subspace.
        kv_bits: of the decoder's keys and values, whose high coordinates have ``high_bits``; None leaves them as they are.
        activation_bits: 2 to 8.
        vision_bits: of weights and activations of the vision tower and the projector, whose high subspace has ``high_bits`` or as
            many; None leaves them as they are.
        streams: U_A, a basis for each tower's residual stream.
        heads: U_B, a basis for each value head.
        keys: U_C, a basis for each layer's keys behind RoPE, online.
        hadamard: U_D, an online Hadamard in front of linears that read a non-linearity, which have one precision.
        random: what mixes the coordinates of a subspace.
        lowest_bits: of the weights and activations of a third subspace, that of the smallest variance.
        lowest_fraction: its size; 0: there is none.  (Keys and values have two.)
        packed: False stores weights of few bits in int8: twice the memory, and nothing to write out in a call.
        solver: as in ``per_token``.
        solver_batches: the solver sees this many batches, the bases all (the paper: 128 and 512); None: all.
        seed: of everything random.
    """
    bases = Bases(streams, heads, random, solver_batches)
    rewrites = Rewrites(fold_norms=True, rotate=True, hadamard=hadamard, seed=seed, bases=bases)
    kv = _kv(kv_bits, high_bits, high_fraction, "principal" if keys else "none")
    dynamic = DynamicSpec(
        activation_bits or bits, high_bits, high_fraction, lowest_bits=lowest_bits, lowest_fraction=lowest_fraction, packed=packed
    )
    config = _dynamic(bits, dynamic, solver, rewrites, kv)
    if vision_bits is None:
        return config.replace(vision=None, projector=None)
    most = max(high_bits, vision_bits)
    towers = _dynamic(vision_bits, DynamicSpec(vision_bits, most, high_fraction, packed=packed), solver, rewrites, kv)
    return config.replace(vision=towers.vision, projector=towers.projector)


def outlier_rotation(
    bits: int = 4,
    high_bits: int = 8,
    high_fraction: float = 1 / 8,
    kv_bits: int | None = 4,
    *,
    activation_bits: int | None = None,
    vision_bits: int | None = 8,
    random: Literal["orthogonal", "hadamard"] = "orthogonal",
    solver: Solver = "gptq",
    solver_batches: int | None = None,
    seed: int = 0,
) -> QuantConfig:
    """The baseline "outlier + rotation" of ResQ's section 5.3 and Table 3: QUIK's choice of channels, QuaRot's rotations.

    The channels of a stream, of a value head and of the keys with the largest magnitudes have ``high_bits``; they and the others
    are each rotated at random.  All else is ``resq``.

    Args:
        bits: as in ``resq``, and so all other arguments.
        high_bits: of the high channels' weights and activations.
        high_fraction: how many channels.
        kv_bits: of the decoder's keys and values; None leaves them as they are.
        activation_bits: 2 to 8.
        vision_bits: of the vision tower and the projector; None leaves them as they are.
        random: what mixes the channels of a group.
        solver: as in ``per_token``.
        solver_batches: the solver sees this many batches; None: all.
        seed: of everything random.
    """
    config = resq(
        bits,
        high_bits,
        high_fraction,
        kv_bits,
        activation_bits=activation_bits,
        vision_bits=vision_bits,
        random=random,
        solver=solver,
        solver_batches=solver_batches,
        seed=seed,
    )
    assert config.rewrites.bases is not None
    rewrites = dataclasses.replace(config.rewrites, bases=dataclasses.replace(config.rewrites.bases, by="peaks"))
    return config.replace(rewrites=rewrites, kv_rounding=_kv(kv_bits, high_bits, high_fraction, "peaks"))


def _kv(
    bits: int | None,
    high_bits: int = 8,
    high_fraction: float = 0.0,
    basis: Literal["none", "hadamard", "principal", "peaks"] = "none",
) -> KVRounding | None:
    return None if bits is None else KVRounding(bits, high_bits, high_fraction, basis)


def _activations(bits: int, symmetric: bool) -> DynamicSpec | ActivationSpec:
    """With a scale per token, found as it comes."""
    return ActivationSpec(bits, PerToken()) if symmetric else DynamicSpec(bits)


def _dynamic(
    bits: int,
    activations: DynamicSpec | ActivationSpec,
    solver: Solver,
    rewrites: Rewrites,
    kv: KVRounding | None,
    group_size: int | None = None,
) -> QuantConfig:
    """All three towers; channels in their own order, as the authors of ResQ have it."""
    weight = WeightSpec(bits, PerGroup(group_size) if group_size else PerRow(), solver, act_order=False, clip="weights")
    dynamic = isinstance(activations, DynamicSpec)
    scheme = Scheme(weight, dynamic=activations) if dynamic else Scheme(weight, activations)
    return QuantConfig(vision=scheme, projector=scheme, language=scheme, rewrites=rewrites, kv_rounding=kv)


def _head(bits: int | None) -> Scheme | None:
    """Weight-only and per output channel: a head has too many of them for groups to matter."""
    return None if bits is None else Scheme(WeightSpec(bits, PerRow(), "rtn"))
