"""Text and generated tokens of one layer of the cache: as they are, or all but the most recent in 8 or 4 bits.

    window   keys, values [B, H, 1 + W, D] in the model's dtype: the last W of a sequence's n tokens, token p at 1 + (p - 1) mod W
    older    codes, scales and offsets [B, H, 1 + T, ...] of token p = 1 ... n - W at p (ops/kv_token_attention.py)

    a token is rounded once, when the W-th one after it arrives; place 0 takes what is not stored

Why:     attention does not depend on the order of its keys, so a ring needs no turning.  Places follow from counts that are
         tensors: a decode step is the same graph at any length.
Source:  KIVI's residual (arXiv:2402.02750, section 3.2), here without its jumps: always the last W tokens, not W to 2 W.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmqc.ops.kv_token_attention import dequantize_tokens, quantize_tokens


@dataclass
class OlderText:
    """Rounded tokens; ``bits`` and ``block`` as in ``KVSpec``."""

    bits: int
    block: int
    k_codes: Tensor
    k_scale: Tensor
    k_offset: Tensor
    v_codes: Tensor
    v_scale: Tensor
    v_offset: Tensor

    @classmethod
    def like(cls, k: Tensor, v: Tensor, bits: int, block: int) -> OlderText:
        """With place 0 alone, for tokens like k and v [B, H, L, D]."""
        nothing = (t.new_zeros((*t.shape[:2], 1, t.shape[3])) for t in (k, v))
        k_parts, v_parts = (quantize_tokens(t, bits, block) for t in nothing)
        return cls(bits, block, *k_parts, *v_parts)

    def tensors(self) -> dict[str, Tensor]:
        """By name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("bits", "block")}

    @property
    def room(self) -> int:
        """Tokens of a sequence for which there are places."""
        return self.k_codes.shape[2] - 1

    def grow(self, more: int) -> None:
        """Places for ``more`` tokens."""
        for name, tensor in self.tensors().items():
            setattr(self, name, pad(tensor, (0, 0, 0, more)))

    def write(self, place: Tensor, k: Tensor, v: Tensor) -> None:
        """Round tokens [B, H, L, D] into their places [B, L]."""
        at = place[:, None, :, None]
        for kind, x in (("k", k), ("v", v)):
            for part, value in zip(("codes", "scale", "offset"), quantize_tokens(x, self.bits, self.block), strict=True):
                getattr(self, f"{kind}_{part}").scatter_(2, at.expand_as(value), value)

    def read(self, place: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
        """The tokens [B, H, L, D] at ``place`` [B, L]."""
        parts = [getattr(self, f"{kind}_{part}") for part in ("codes", "scale", "offset")]
        found = [t.gather(2, place[:, None, :, None].expand(-1, t.shape[1], -1, t.shape[3])) for t in parts]
        return dequantize_tokens(found[0], found[1], found[2], self.bits, torch.float32).to(dtype)


def last_in_slot(count: Tensor, window: int) -> Tensor:
    """int64 [B, W]: which token, from 1, each slot of the window holds when ``count`` [B] have come; 0 or less: none."""
    slot = torch.arange(1, window + 1, device=count.device)
    n = count.long()[:, None]
    return n - (n - slot) % window


def slot_of(token: Tensor, window: int) -> Tensor:
    """Where in the window token p >= 1 goes, from 1; 0 for p = 0."""
    return torch.where(token > 0, (token - 1) % window + 1, 0)


def push(keys: Tensor, values: Tensor, older: OlderText, before: Tensor, place: Tensor, k: Tensor, v: Tensor) -> None:
    """Store new text tokens.

    Args:
        keys: the window [B, H, 1 + W, D], changed in place, as are ``values`` and ``older``.
        values: [B, H, 1 + W, D_v].
        older: where what leaves the window goes.
        before: int [B], tokens that were there.
        place: int64 [B, L], which token from 1 on each new one is, ``before`` included; 0: it is none.
        k: [B, H, L, D].
        v: [B, H, L, D_v].
    """
    window = keys.shape[2] - 1
    gone = torch.maximum(place.amax(1), before.long()) - window  # tokens 1 ... gone do not fit into the window
    if place.shape[1] == 1:  # one leaves its slot to the one that comes
        slot = slot_of(place, window)
        leaving = (place - window).clamp(min=0)
        at = slot[:, None, :, None]
        held = (t.gather(2, at.expand(-1, t.shape[1], -1, t.shape[3])) for t in (keys, values))
    else:
        held = (t[:, :, 1:] for t in (keys, values))
        leaving = last_in_slot(before, window)
        leaving = torch.where(leaving <= gone[:, None], leaving, 0).clamp(min=0)
    older.write(leaving, *held)
    if place.shape[1] > 1:
        older.write(torch.where(place <= gone[:, None], place, 0), k, v)
    kept = slot_of(torch.where(place > gone[:, None], place, 0), window)[:, None, :, None]
    keys.scatter_(2, kept.expand_as(k), k)
    values.scatter_(2, kept.expand_as(v), v)


def refill(keys: Tensor, values: Tensor, older: OlderText, before: Tensor, after: Tensor) -> None:
    """The window when of ``before`` [B] tokens ``after`` [B] are left: those that come back keep their rounding."""
    window = keys.shape[2] - 1
    was, now = last_in_slot(before, window), last_in_slot(after, window)
    back = (now != was) & (now > 0)
    place = torch.where(back, now, 0)
    for kind, held in (("k", keys), ("v", values)):
        inside = held[:, :, 1:]
        inside.copy_(torch.where(back[:, None, :, None], older.read(place, kind, held.dtype), inside))
