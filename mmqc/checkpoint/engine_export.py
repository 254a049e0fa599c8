"""What an engine would do with a model's linears if they were written for it: its objections, and the command that serves it.

    linear -> form (engines/form.py) -> the engine's name of it, q/k/v and gate/up joined -> scheme and kernel, or a refusal

Everything is asked before anything is written.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from mmqc.checkpoint import compressed_tensors
from mmqc.engines import form as forms
from mmqc.engines.names import joined, renamed
from mmqc.engines.table import Answer, Case, Rules, described

RECORD = "mmqc_engine.json"  # beside the checkpoint: what was asked, and how to serve it
HUMMING = "humming"


@dataclass(frozen=True)
class Linear:
    """A linear as the engine has it: its name there, the modules it is made of, and the case to ask about."""

    name: str
    parts: tuple[str, ...]
    case: Case


@dataclass
class Plan:
    """What the engine will do: its answers, and why not."""

    engine: str
    gpu: str
    source: str
    objections: list[str] = field(default_factory=list)
    kernels: Counter[str] = field(default_factory=Counter)
    flags: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """That serves the directory."""
        return " ".join(("vllm serve .", *self.flags))

    def write(self, directory: Path) -> None:
        """Leaves the plan beside the checkpoint."""
        record = {"engine": self.engine, "gpu": self.gpu, "by": self.source, "serve": self.command, "kernels": dict(self.kernels)}
        (directory / RECORD).write_text(json.dumps(record, indent=1) + "\n")


def plan(model: PreTrainedModel, rules: Rules, engine: str, gpu: str) -> Plan:
    """Ask for every linear of the model; nothing is written."""
    made = Plan(engine, gpu, rules.source)
    architecture = type(model).__name__
    names = rules.names(architecture)
    if names is None:
        made.objections.append(f"{architecture}: {rules.source} has no such class; save with format='compressed-tensors' alone")
        return made
    linears = list(_linears(model, names, made.objections))
    answers = rules.answers([linear.case for linear in linears])
    if any(a is not None and a.note == "float inputs" for a in answers):
        made.flags = (f"--linear-backend {HUMMING}",)
        answers = rules.answers([linear.case for linear in linears], HUMMING)
    for linear, answer in zip(linears, answers, strict=True):
        why = _objection(linear, answer, _dtype(model))
        if why:
            made.objections.append(f"{linear.parts[0]} ({linear.case.form}) {why}")
        elif answer is not None:
            made.kernels[f"{linear.case.form}: {described(answer, linear.case.form)}"] += 1
    return made


def _linears(model: PreTrainedModel, names: Mapping[str, Any], objections: list[str]) -> Iterator[Linear]:
    """The engine's quantized linears; parts of one that differ are an objection."""
    quantized = compressed_tensors.written_linears(model)
    shapes = {n: (m.in_features, m.out_features) for n, m in quantized.items()}
    shapes |= {n: (m.in_features, m.out_features) for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    here = {renamed(name, names): name for name in shapes}
    schemes = {name: compressed_tensors.scheme_of(linear, True) for name, linear in quantized.items()}
    for whole, of in joined(here, names).items():
        parts = tuple(here[name] for name in of)
        found = [schemes.get(part) for part in parts]
        if all(scheme is None for scheme in found):
            continue
        if any(scheme != found[0] for scheme in found):
            objections.append(
                f"{', '.join(parts)} are one linear there and have different schemes: give them one, or keep all of them"
            )
            continue
        scheme = found[0] or {}
        config = {
            "quant_method": "compressed-tensors",
            "format": scheme["format"],
            "ignore": [],
            "config_groups": {"group_0": {"targets": ["Linear"], **scheme}},
        }
        outputs = sum(shapes[part][1] for part in parts)
        yield Linear(whole, parts, Case(forms.of_group(scheme), config, shapes[parts[0]][0], outputs))


def _objection(linear: Linear, answer: Answer | None, dtype: torch.dtype) -> str:
    """Why it cannot be written, and what to change; empty where it can."""
    case = linear.case
    group = forms.group_of(case.form)
    if group and case.inputs % group:
        return f"has {case.inputs} input channels, no multiple of its group size {group}: quantize its tower to 8 bits, or keep it"
    if answer is None:
        return "is a form that nobody asked the engine about: install it in this Python, or quantize by recipes.for_engine"
    if answer.refused.startswith("Failed to find a kernel"):
        return (
            f"has {case.inputs} x {case.outputs} channels, for which it has no kernel (of 4-bit weights beside float8 both are "
            "multiples of 128): quantize its tower to 8 bits, or keep it"
        )
    if answer.refused:
        return f"is refused there ({answer.refused}): quantize by recipes.for_engine"
    if answer.note == "float inputs":
        return "would run with inputs in floating point: quantize weight-only, or by recipes.for_engine"
    if answer.note == "fails":
        return f"has {case.inputs} x {case.outputs} channels, for which its kernel fails: keep it, or quantize it weight-only"
    if answer.kernel.startswith("CutlassW4A8") and dtype == torch.float16:
        return "has outputs in float16, where its kernel has bfloat16 alone: convert the model first (model.to(torch.bfloat16))"
    return ""


def _dtype(model: PreTrainedModel) -> torch.dtype:
    return next(p.dtype for p in model.parameters() if p.is_floating_point())
