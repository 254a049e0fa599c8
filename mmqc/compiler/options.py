"""What ``torch.compile(..., backend="mmqc", mode=..., options={...})`` may say.

config           a QuantConfig, or its dict: the backend quantizes the graphs itself
token_order      "sequence": rows stay where they are and each has the scale of its modality; "modality": all visual rows in
                 front of all text; "auto": pipeline.py says which
attention_order  in modality order, how rows pass attention: "gather" (q, k, v go back to sequence order), "unified" (the
                 mask and the positions travel with the queries) or "auto": pipeline.py says which
collectives      "backend": sums over ranks are the process group's; "shared": they go through memory that GPUs of one host share,
                 where there is such memory, those of many rows between two (docs/adr/0039-sums-through-shared-memory.md)
regions          False: a graph is compiled as a whole; else layers that are alike are compiled once (regions.py)
recorded_sizes   how many sizes of a graph that runs on a GPU are kept as CUDA graphs when they come again (recorded_sizes.py)
layers           a number that tells apart what was compiled before and after a model's layers changed (layer_guards.py)
mode             as torch.compile's mode, for use together with other options (torch.compile takes one or the other)
anything in torch._inductor.config, dotted: passed through
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

CHOICES = {
    "token_order": ("auto", "sequence", "modality"),
    "attention_order": ("auto", "gather", "unified"),
    "collectives": ("backend", "shared"),
}
OWN_KEYS = ("attention_order", "collectives", "config", "mode", "recorded_sizes", "regions", "token_order")


@dataclass(frozen=True)
class CompileOptions:
    """The validated request."""

    mode: str | None = None
    config: Any = None
    token_order: str = "auto"
    attention_order: str = "auto"
    collectives: str = "backend"
    regions: bool = True
    recorded_sizes: int = 0
    inductor: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, mode: str | None, options: Mapping[str, Any] | None) -> CompileOptions:
        """Split torch.compile's ``options``; Inductor's keys are checked later, by ``check_inductor_keys``."""
        given = dict(options or {})
        mode = given.pop("mode", None) or mode
        chosen = {key: given.pop(key, allowed[0]) for key, allowed in CHOICES.items()}
        for key, value in chosen.items():
            if value not in CHOICES[key]:
                raise ValueError(f"{key} = {value!r} is unknown; allowed: {', '.join(map(repr, CHOICES[key]))}")
        given.pop("layers", None)  # Dynamo has compared it with that of other graphs
        regions = bool(given.pop("regions", True))
        recorded_sizes = given.pop("recorded_sizes", 0)
        if type(recorded_sizes) is not int or recorded_sizes < 0:
            raise ValueError(f"recorded_sizes = {recorded_sizes!r}: a number of sizes to keep, or 0")
        config = given.pop("config", None)
        if isinstance(config, Mapping):
            from mmqc.config import QuantConfig

            config = QuantConfig.from_dict(dict(config))
        inductor = {key.replace("-", "_"): value for key, value in given.items()}
        mode = None if mode == "default" else mode
        return cls(mode, config, **chosen, regions=regions, recorded_sizes=recorded_sizes, inductor=inductor)

    def check_inductor_keys(self, known: set[str]) -> None:
        """Raise on a key that neither mmqc nor Inductor knows."""
        unknown = sorted(set(self.inductor) - known)
        if unknown:
            raise ValueError(
                f"unknown option {', '.join(map(repr, unknown))} for backend 'mmqc'; valid keys: {', '.join(OWN_KEYS)}, "
                f"and those of torch._inductor.config: {', '.join(sorted(k for k in known if not k.startswith('_')))}"
            )
