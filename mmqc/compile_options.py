"""What ``torch.compile(..., backend="mmqc", mode=..., options={...})`` may say.

config       a QuantConfig, or its dict: the backend quantizes the graphs itself
token_order  "sequence" or "auto"
mode         as torch.compile's mode, for use together with other options (torch.compile takes one or the other)
anything in torch._inductor.config, dotted: passed through
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TOKEN_ORDERS = ("auto", "sequence")
OWN_KEYS = ("config", "mode", "token_order")


@dataclass(frozen=True)
class CompileOptions:
    """The validated request."""

    mode: str | None = None
    config: Any = None
    token_order: str = "auto"
    inductor: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, mode: str | None, options: Mapping[str, Any] | None) -> CompileOptions:
        """Split torch.compile's ``options``; Inductor's keys are checked later, by ``check_inductor_keys``."""
        given = dict(options or {})
        mode = given.pop("mode", None) or mode
        order = given.pop("token_order", "auto")
        if order == "modality":
            raise ValueError('token_order = "modality" is not available yet; allowed: "sequence", "auto"')
        if order not in TOKEN_ORDERS:
            raise ValueError(f'token_order = {order!r} is unknown; allowed: "sequence", "auto"')
        config = given.pop("config", None)
        if isinstance(config, Mapping):
            from mmqc.config import QuantConfig

            config = QuantConfig.from_dict(dict(config))
        inductor = {key.replace("-", "_"): value for key, value in given.items()}
        return cls(None if mode == "default" else mode, config, order, inductor)

    def check_inductor_keys(self, known: set[str]) -> None:
        """Raise on a key that neither mmqc nor Inductor knows."""
        unknown = sorted(set(self.inductor) - known)
        if unknown:
            raise ValueError(
                f"unknown option {', '.join(map(repr, unknown))} for backend 'mmqc'; valid keys: {', '.join(OWN_KEYS)}, "
                f"and those of torch._inductor.config: {', '.join(sorted(k for k in known if not k.startswith('_')))}"
            )
