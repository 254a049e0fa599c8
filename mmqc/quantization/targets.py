"""The linears that ``quantize_`` quantizes, and what has to be observed of each: read off the rewritten recording."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from mmqc.calibration.calibrate import InputStatistics, Watch
from mmqc.config import Scheme
from mmqc.graph.linear import operands, weight_of
from mmqc.graph.program import Program
from mmqc.quantization.job import Job
from mmqc.quantization.rewrite import Rewritten


@dataclass(frozen=True, eq=False)
class Target:
    """A linear that has a scheme.

    Attributes:
        module, weight: their FQNs.
        tower, role: where it stands in the model, as the graph says.
        scheme: what becomes of it.
        outliers: int64 indices of input channels that stay in floating point, if some do.
    """

    module: str
    tower: str
    role: str
    scheme: Scheme
    outliers: Tensor | None

    @property
    def weight(self) -> str:
        """FQN of its weight."""
        return f"{self.module}.weight"

    @property
    def language(self) -> bool:
        """Whether the rows of its input are the language model's tokens."""
        return self.tower == "language"

    def statistics(self, seen: InputStatistics) -> dict[str, Any]:
        """What ``report.config`` carries of it: its place, and the scale of what was seen."""
        spec = self.scheme.activation
        return {
            "tower": self.tower,
            "role": self.role,
            "input_scale": seen.scales(spec, self.language) if spec is not None and spec.static else None,
            "outliers": [] if self.outliers is None else self.outliers.tolist(),
        }


@dataclass(frozen=True, eq=False)
class Targets:
    """What is quantized and what is observed.

    Attributes:
        linears: by weight FQN, in the model's order.
        watches: what to observe of each linear that needs data, by module FQN.
        token_embeddings: weights that are looked up with the token ids themselves.
    """

    linears: Mapping[str, Target]
    watches: Mapping[str, Watch]
    token_embeddings: tuple[str, ...]


def find_targets(job: Job, rewritten: Rewritten) -> Targets:
    """Every linear of the recording that got a scheme, and kept it."""
    prog, linears = rewritten.program, {}
    for node in prog.nodes("linear"):
        if "scheme" in node.meta:
            weight, meta = weight_of(node), node.meta
            name = weight.removesuffix(".weight")
            linears[weight] = Target(name, meta["tower"], meta["role"], meta["scheme"], meta.get("outliers"))
    asymmetric = job.request.inputs == "asymmetric"  # which asks for second moments whatever the solver
    watches = {
        target.module: Watch(
            target.language,
            target.scheme.activation if target.scheme.static else None,
            target.scheme.weight.needs_hessian or asymmetric,
            target.outliers,
            job.request.row_weights.of(target.scheme.weight),
        )
        for target in linears.values()
        if target.scheme.static or target.scheme.weight.needs_hessian or asymmetric
    }
    return Targets(linears, watches, tuple(_token_embeddings(prog)))


def _token_embeddings(prog: Program) -> list[str]:
    found = []
    for node in prog.nodes("embedding"):
        index, weight = operands(node)["input"], operands(node)["weight"]
        if isinstance(index, fx.Node) and index.op == "placeholder" and isinstance(weight, fx.Node):
            found.append(str(weight.target))
    return found
