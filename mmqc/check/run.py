"""``mmqc check DIR --engine vllm==0.33``: everything that is found about a checkpoint, without loading it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmqc.check.finding import LEVELS, Finding, several
from mmqc.check.kernels import choose
from mmqc.check.linears import EXPERT, Whole, wholes
from mmqc.check.settings import settings
from mmqc.check.stored import read
from mmqc.check.structure import structure
from mmqc.check.values import values
from mmqc.engines.table import Asked, Rules, capability_of, engine_version, rules


@dataclass
class Checked:
    """The result.

    Attributes:
        engine, gpu, source: what was asked about, and who answered: a table or the engine itself.
        findings: errors first.
        kernels: linears of each form by the kernel that will run them.
        linears: every quantized linear with its form, scheme, kernel and widths.
        share: of all linear weights, those that are quantized.
        flag: what the engine is to be started with.
    """

    engine: str
    gpu: str
    source: str
    findings: list[Finding] = field(default_factory=list)
    kernels: dict[str, int] = field(default_factory=dict)
    linears: list[dict[str, Any]] = field(default_factory=list)
    share: float = 0.0
    flag: str = ""

    @property
    def good(self) -> bool:
        """Whether there is nothing to do: no errors and no warnings."""
        return all(finding.level == "note" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {**self.__dict__, "findings": [vars(f) for f in self.findings], "good": self.good}


def check(
    directory: str | Path,
    engine: str,
    *,
    gpu: str = "h100",
    tensor_parallel: int = 1,
    linear_backend: str = "auto",
    python: str | None = None,
) -> Checked:
    """What an engine makes of a checkpoint of compressed-tensors, AWQ or GPTQ.

    Args:
        directory: config.json and safetensors.
        engine: "vllm==0.32" or "vllm==0.33".
        gpu: "a100", "l40s", "h100", or a capability like "9.0".
        tensor_parallel: GPUs that a linear is split over.
        linear_backend: "auto", or "humming" where the engine is started with it.
        python: of an environment that has the engine, which is then asked instead of its table.

    Raises:
        NoCheckpointError: nothing there to look at.
        EngineError: an engine, a version or a GPU of which nothing is known.
    """
    given: Rules = rules(engine, gpu) if python is None else Asked(engine_version(engine), capability_of(gpu), python)
    stored = read(directory)
    names = given.names(stored.architecture)
    linears = wholes(stored, names)
    made = Checked(engine, gpu, given.source)
    if names is None:
        text = f"{given.source} has no such class: names of modules are taken as they are, and may be other ones there"
        made.findings.append(Finding("warning", "architecture", stored.architecture or "config.json", text))
    chosen = choose(stored, linears, given, tensor_parallel, linear_backend)
    made.findings += [*structure(stored, linears), *chosen.findings, *settings(stored, linears, tensor_parallel)]
    made.findings += [*values(stored, linears), *_experts(linears)]
    made.findings.sort(key=lambda finding: LEVELS.index(finding.level))
    made.kernels, made.flag = dict(chosen.kernels()), chosen.flag
    made.linears = [
        {"name": w.name, "form": case.form, "inputs": case.inputs, "outputs": case.outputs, **({} if a is None else vars(a))}
        for w, case, a in chosen.linears
    ]
    made.share = _share(linears)
    return made


def _share(linears: list[Whole]) -> float:
    parts = [part for whole in linears for part in whole.parts]
    total = sum(part.parameters for part in parts)
    return sum(part.parameters for part in parts if part.stored) / total if total else 0.0


def _experts(linears: list[Whole]) -> list[Finding]:
    """That experts were not asked about."""
    names = [w.first.name for w in linears if w.first.stored and EXPERT.search(f"{w.first.name}.")]
    return several("note", "experts", names, "experts run by kernels of their own, of which the table says nothing")
