"""Keys and values rounded per head, in ResQ's two precisions, inside attention: the accuracy of a 4-bit cache.

    k' = Q(k U_C)     q' = q U_C     v' = Q(v)        attention(q', k', v')        q' k'ᵀ = q kᵀ without Q, for U_C is orthogonal

Shapes:  q [B, H, T, D]   k, v [B, H_kv, T, D], behind RoPE   U_C [D, D], one for the heads of a layer
         Q: quantize_per_token of every head and token, the last r coordinates in ``high_bits``, dequantized at once
Why:     U_C cannot be folded: RoPE stands between it and the weights (arXiv:2412.14363, section 4.3).  U_B is in the weights.
With any cache of the model's dtype a token is rounded whenever attention reads it, always to the same codes: they follow from that
token alone.  ``rounded.RoundedCache`` stores these, once, and a decode step attends to what it stores.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import mmqc.ops  # noqa: F401  (defines torch.ops.mmqc)
from mmqc.calibration.moments import add_second_moment, mirror_
from mmqc.calibration.observe import observe
from mmqc.config import ConfigError, KVRounding
from mmqc.kv.attention_calls import AttentionCalls
from mmqc.ops.rotate import random_hadamard, rotation_matrix
from mmqc.ops.straight_through import gradient_of
from mmqc.solvers.principal_basis import high_width, peak_basis, principal_basis

NAME, CHILD = "mmqc_kv_rounding", "kv_rounding"


class KVRounder(nn.Module):
    """What a layer's attention does to its keys and values; a child of the attention module.

    ``basis`` is U_C; None until it is known, when only second moments are taken.
    """

    basis: Tensor | None

    def __init__(self, size: int, spec: KVRounding, inner: str, device: Any = None) -> None:
        super().__init__()
        high = high_width(size, spec.high_fraction)
        self.size, self.spec, self.inner = size, spec, inner
        self.widths, self.bits = ([size - high, high], [spec.bits, spec.high_bits]) if high else ([size], [spec.bits])
        self.register_buffer("basis", torch.empty(size, size, device=device))

    def to_spec(self) -> dict[str, Any]:
        """What ``from_spec`` builds the module from, without its values."""
        dtype = None if self.basis is None else self.basis.dtype
        return {"size": self.size, "inner": self.inner, "spec": dataclasses.asdict(self.spec), "dtype": dtype}

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> KVRounder:
        """On the meta device."""
        return cls(spec["size"], KVRounding(**spec["spec"]), spec["inner"], device="meta").to(spec["dtype"])

    def turned(self, x: Tensor) -> Tensor:
        """X U_C, of queries and of keys behind RoPE; q kᵀ does not change."""
        assert self.basis is not None
        return x @ self.basis.to(x.dtype)

    def codes(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(q int8 [..., D], s, o float32 [..., P]) of turned keys or of values, ``widths[p]`` of them in ``bits[p]``.

        A token's follow from that token alone: it is what a cache would store.
        """
        return torch.ops.mmqc.quantize_per_token(x, None, self.widths, self.bits)

    def key_codes(self, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``codes`` of ``turned`` keys [..., D], in one operation."""
        assert self.basis is not None
        return torch.ops.mmqc.basis_quantize_per_token(k, self.basis.to(k.dtype), self.widths, self.bits)

    def values(self, q: Tensor, s: Tensor, o: Tensor, dtype: torch.dtype) -> Tensor:
        """What ``codes`` stand for."""
        parts = q.to(s.dtype).split(self.widths, -1)
        return torch.cat([p * s[..., i, None] + o[..., i, None] for i, p in enumerate(parts)], -1).to(dtype)

    def rounded(self, x: Tensor) -> Tensor:
        """Q(x) in x's dtype."""
        return self.values(*self.codes(x), x.dtype)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(q', k', v')."""
        keys, values = self.values(*self.key_codes(k), k.dtype), self.rounded(v)
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            keys, values = gradient_of(keys, self.turned(k)), gradient_of(values, v)
        return self.turned(q), keys, values


class Arriving(NamedTuple):
    """New keys or values [B, H_kv, L, D] on their way from a cache of codes to the attention function, which knows U_C."""

    layer: Any
    states: Tensor


@dataclass
class KeyMoments:
    """KᵀK float64 [D, D] by attention module; of ``peaks``, max |k| of every channel, float64 [D]."""

    peaks: bool
    found: dict[nn.Module, Tensor] = field(default_factory=dict)

    def update(self, module: nn.Module, query: Tensor, key: Tensor, scaling: float) -> None:
        """Take in the keys of one call."""
        rows, before = key.detach().reshape(-1, key.shape[-1]), self.found.get(module)
        if self.peaks:
            largest = rows.abs().amax(0).double()
            self.found[module] = largest if before is None else torch.maximum(before, largest)
        else:
            self.found[module] = add_second_moment(before, rows)


def reads_rows(rounder: KVRounder, query: Tensor, mask: Tensor | None, options: Mapping[str, Any]) -> bool:
    """Whether ``kv_rows_attention`` computes this step: one query a sequence, which sees every token, and no gradients."""
    plain = mask is None and options.get("position_bias") is None and not options.get("dropout")
    return plain and query.shape[2] == 1 and not query.requires_grad and min(rounder.bits) >= 4


def attend(module: nn.Module, query: Tensor, key: Any, value: Any, mask: Tensor | None, **kwargs: Any) -> Any:
    """The attention interface of transformers: round, then attend as the model did before."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    rounder = getattr(module, CHILD)
    if isinstance(key, Arriving):
        query, layer = rounder.turned(query), key.layer
        layer.append(rounder, key.states, value.states)
        if reads_rows(rounder, query, mask, kwargs):
            scaling = kwargs.get("scaling") or query.shape[-1] ** -0.5
            rows = (layer.keys, layer.values, rounder.widths, rounder.bits)
            return torch.ops.mmqc.kv_rows_attention(query, *rows, scaling).transpose(1, 2), None
        key, value = layer.written_out(rounder, key.states.dtype)
    else:
        query, key, value = rounder(query, key, value)
    return ALL_ATTENTION_FUNCTIONS[rounder.inner](module, query, key, value, mask, **kwargs)


def register() -> bool:
    """Make the function, and sdpa's masks for it, known to transformers, if that is imported."""
    if "transformers.modeling_utils" not in sys.modules:
        return False
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    if NAME not in AttentionInterface._global_mapping:
        AttentionInterface.register(NAME, attend)
        AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    return True


def decoder_config(model: nn.Module) -> Any:
    """The config whose attention has a cache."""
    config = getattr(model, "config", None)
    get = getattr(config, "get_text_config", None)
    found = get(decoder=True) if get is not None else None
    if found is None or not hasattr(found, "_attn_implementation") or not register():
        raise ConfigError(f"{type(model).__name__} has no decoder config of transformers: its keys and values cannot be rounded")
    return found


@contextmanager
def observed(model: nn.Module, spec: KVRounding) -> Iterator[dict[nn.Module, Tensor]]:
    """KᵀK of every decoder layer that forwards of ``model`` come through, float64, on and below the diagonal blocks.

    For a basis by ``peaks`` max |k| of every channel, float64 [D].

    Raises:
        ConfigError: the model is none of transformers', or its attention is not sdpa.
    """
    config = decoder_config(model)
    if config._attn_implementation != "sdpa":
        raise ConfigError(
            f"keys and values are rounded in front of sdpa, but the model attends by {config._attn_implementation!r}; load it "
            "with attn_implementation='sdpa'"
        )
    seen = KeyMoments(spec.basis == "peaks")
    with observe(model, {AttentionCalls("sdpa"): seen}):
        yield seen.found


@torch.no_grad()
def round_keys_and_values(
    model: nn.Module, spec: KVRounding, moments: Mapping[nn.Module, Tensor], seed: int, journal: Any
) -> list[str]:
    """Give every attention module of the decoder a ``KVRounder``; returns their names.

    Args:
        model: whose decoder it is.
        spec: bits and basis.
        moments: of their keys, as ``observed`` has them.
        seed: of everything random.
        journal: notes what is to be undone after an error.

    Raises:
        ConfigError: attention does not go through transformers' interface.
    """
    config = decoder_config(model)
    found = {module: seen if seen.dim() == 1 else mirror_(seen) for module, seen in moments.items()}
    names = {module: name for name, module in model.named_modules()}
    if not found:
        raise ConfigError(f"{type(model).__name__} does not attend through transformers' interface: no keys were seen")
    for module, moment in found.items():
        rounder = KVRounder(len(moment), spec, "sdpa", moment.device)
        rounder.basis = basis_of(moment, spec, seed).to(next(module.parameters(), moment).dtype)
        journal.child(names[module], CHILD, rounder)
    journal.attribute(config, "_attn_implementation", NAME)
    return [names[module] for module in found]


def basis_of(moment: Tensor, spec: KVRounding, seed: int) -> Tensor:
    """U_C float64 [D, D] of a layer's keys, from KᵀK, or from max |k| for a basis by peaks."""
    n = len(moment)
    if spec.basis == "peaks":
        return peak_basis(moment, high_width(n, spec.high_fraction), seed)
    if spec.basis == "principal":
        return principal_basis(moment, high_width(n, spec.high_fraction), seed)
    if spec.basis == "hadamard":
        return rotation_matrix(*random_hadamard(n, seed)).to(moment.device)
    return torch.eye(n, dtype=torch.float64, device=moment.device)
