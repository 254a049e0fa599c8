"""Ready-made configurations of the KV cache; ``mmqc.recipes`` has them beside those of weights."""

from __future__ import annotations

from typing import Any

from mmqc.config import KVSpec, QuantConfig, Search


def calibquant(
    bits: int = 1,
    *,
    values: str = "channel",
    search: Search | None = None,
    tau: tuple[tuple[float, float], ...] = (),
    shrink_keys: float | None = None,
    shrink_values: float | None = None,
    rounding: str | None = None,
    text_bits: int = 16,
    text_window: int = 128,
    by_layer: bool = False,
    layer_bits: tuple[int, ...] = (),
) -> QuantConfig:
    """The visual part of the KV cache in 8 to 1 bits, by CalibQuant (arXiv:2502.14882); ``|`` composes it with a weight recipe.

    Args:
        bits: 1, 2, 4 or 8; with ``by_layer`` any number from 1 to 8.
        values: "channel" as in section 4.1, or "token" or "tensor" for its ablation.
        search: the grid search over {0, 1, 2, 3}^2 of section 4.2: one pair for the "model", one per "layer", or "none".
            None is "model" for 1 and 2 bits, as in the authors' code, unless ``tau`` is given, and "none" above and where layers
            differ.
        tau: pairs (tau1, tau2), known beforehand.
        shrink_keys: see ``KVSpec``; None is 0.6 at 1 bit, whose two levels would otherwise be the extremes, and 1 above.
            (The authors' code has 0.5 for keys and 0.3 for values, towards zero instead of the centre.)
        shrink_values: likewise.
        rounding: of keys, "nearest" or by the calibration's "queries" (ops/kv_round_keys.py, not in the paper).  None is the
            latter at 1 bit where there is a search, and so calibration data, and with ``by_layer``.
        text_bits: of text and generated tokens: 16, the model's dtype, or 8 or 4 ...
        text_window: ... but for the last so many.
        by_layer: calibration gives each layer 1, 2, 4 or 8 bits, ``bits`` at most on average (kv/layer_bits.py, not in the paper).
        layer_bits: those of each layer, known beforehand.
    """
    differ = by_layer or bool(layer_bits)
    found: Search = search or ("none" if tau or bits > 2 or differ else "model")
    shrink = [given or (0.6 if bits == 1 or differ else 1.0) for given in (shrink_keys, shrink_values)]
    rounding = rounding or ("queries" if by_layer or (bits == 1 and found != "none") else "nearest")
    ranges: dict[str, Any] = {"shrink_keys": shrink[0], "shrink_values": shrink[1], "rounding": rounding}
    text: dict[str, Any] = {"text_bits": text_bits, "text_window": text_window}
    text |= {"by_layer": by_layer, "layer_bits": layer_bits}
    return QuantConfig(kv=KVSpec(bits, "channel", values, search=found, tau=tau, **ranges, **text))


def kivi(bits: int = 2) -> QuantConfig:
    """A baseline in the manner of KIVI (arXiv:2402.02750): visual keys per channel, values per token, no calibration."""
    return QuantConfig(kv=KVSpec(bits, "channel", "token"))


def global_range(bits: int = 2) -> QuantConfig:
    """A baseline: visual keys and values with one range each a sequence (CalibQuant, section 4: "global statistics")."""
    return QuantConfig(kv=KVSpec(bits, "tensor", "tensor"))
