"""Ready-made configurations: one function per published method, plus plain baselines."""

from __future__ import annotations

from torchao.quantization.granularity import PerGroup, PerRow

from .config import ActivationSpec, KVSpec, QuantConfig, Rewrites, Scheme, Search, Solver, WeightSpec


def rotate(*, online: bool = True, everywhere: bool = False, seed: int = 0) -> QuantConfig:
    """Exact rewrites only: norms folded, residual streams and V/O rotated, Hadamards inserted; nothing is quantized.

    The model computes the same function and its parameters keep their names (QuaRot, arXiv:2404.00456, section 4).

    Args:
        online: transforms at run time in front of linears that read a non-linearity; without them rotations cost nothing.
        everywhere: transforms also in front of linears whose stream cannot be rotated (Gemma 3, GLM-4, OLMo 2).
        seed: of the random signs.
    """
    rewrites = Rewrites(fold_norms=True, rotate=True, hadamard=online, hadamard_everywhere=everywhere, seed=seed)
    return QuantConfig(rewrites=rewrites)


def rtn(
    weight_bits: int = 8,
    activation_bits: int | None = None,
    group_size: int | None = None,
    *,
    head_bits: int | None = None,
) -> QuantConfig:
    """Round to nearest, no rewrites; activations, if any, with ONE static scale per tensor.

    Args:
        weight_bits: 2, 3, 4 or 8; few bits need groups (``group_size``).
        activation_bits: 8, or None for weight-only.
        group_size: input channels per weight scale; None means one scale per output channel.
        head_bits: of the output head's weight, the largest of a small model; None leaves the head in floating point.
    """
    granularity = PerGroup(group_size) if group_size else PerRow()
    activation = ActivationSpec(bits=activation_bits) if activation_bits else None
    scheme = Scheme(WeightSpec(weight_bits, granularity, "rtn"), activation)
    return QuantConfig(vision=scheme, projector=scheme, language=scheme, head=_head(head_bits))


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
    """
    activation = ActivationSpec(activation_bits, per_modality=msq)
    language = Scheme(WeightSpec(weight_bits, PerRow(), solver), activation)
    vision = Scheme(WeightSpec(vision_weight_bits or weight_bits, PerRow(), solver), activation)
    rewrites = Rewrites(fold_norms=rotate, rotate=rotate, hadamard=rotate, suppress=suppress and rotate)
    return QuantConfig(vision=vision, projector=vision, language=language, head=_head(head_bits), rewrites=rewrites)


def calibquant(
    bits: int = 1,
    *,
    values: str = "channel",
    search: Search | None = None,
    tau: tuple[tuple[float, float], ...] = (),
    shrink_keys: float | None = None,
    shrink_values: float | None = None,
) -> QuantConfig:
    """The visual part of the KV cache in 8 to 1 bits, by CalibQuant (arXiv:2502.14882); ``|`` composes it with a weight recipe.

    Args:
        bits: 1, 2, 4 or 8.
        values: "channel" as in section 4.1, or "token" or "tensor" for its ablation.
        search: the grid search over {0, 1, 2, 3}^2 of section 4.2: one pair for the "model", one per "layer", or "none".
            None is "model" for 1 and 2 bits, as in the authors' code, unless ``tau`` is given, and "none" above.
        tau: pairs (tau1, tau2), known beforehand.
        shrink_keys: see ``KVSpec``; None is 0.6 at 1 bit, whose two levels would otherwise be the extremes, and 1 above.
            (The authors' code has 0.5 for keys and 0.3 for values, towards zero instead of the centre.)
        shrink_values: likewise.
    """
    found: Search = search or ("none" if tau or bits > 2 else "model")
    shrink = [given or (0.6 if bits == 1 else 1.0) for given in (shrink_keys, shrink_values)]
    return QuantConfig(
        kv=KVSpec(bits, "channel", values, shrink_keys=shrink[0], shrink_values=shrink[1], search=found, tau=tau)
    )


def kivi(bits: int = 2) -> QuantConfig:
    """A baseline in the manner of KIVI (arXiv:2402.02750): visual keys per channel, values per token, no calibration."""
    return QuantConfig(kv=KVSpec(bits, "channel", "token"))


def global_range(bits: int = 2) -> QuantConfig:
    """A baseline: visual keys and values with one range each a sequence (CalibQuant, section 4: "global statistics")."""
    return QuantConfig(kv=KVSpec(bits, "tensor", "tensor"))


def _head(bits: int | None) -> Scheme | None:
    """Weight-only and per output channel: a head has too many of them for groups to matter."""
    return None if bits is None else Scheme(WeightSpec(bits, PerRow(), "rtn"))
