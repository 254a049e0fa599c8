"""How a call of ``quantize_`` gets its statistics: the arguments that are the same for every model and config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mmqc.calibration.calibrate import EQUAL
from mmqc.calibration.sequential import Inputs

Batch = Mapping[str, Any]
Last = Callable[[Callable[[dict[str, Any]], Batch]], object]


@dataclass(frozen=True)
class Options:
    """How ``quantize_`` gets its statistics; see its arguments of the same names.

    Attributes:
        then: called in the end with what puts a batch on the device that computes; all can still be undone.
    """

    inputs: Inputs = "float"
    device: Any = None
    spool: str | None = None
    generate_tokens: int = 0
    resume_dir: str | None = None
    row_weights: Mapping[str, float] = field(default_factory=lambda: dict(EQUAL))
    then: Last | None = None
