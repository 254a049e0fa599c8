"""Float64 all the way: models upcast norms, rotary angles and softmax to float32; here those requests widen to float64."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mmqc.graph.program import Program
from mmqc.graph.record import record
from mmqc.graph.runner import Pass, run
from mmqc.graph.spaces.spaces import Spaces
from mmqc.pipeline import FACTS

EXACT = 1e-10  # relative error that a chain of exact passes may make in float64: some dozen reassociated matmuls deep


class Float64(TorchFunctionMode):
    """Under this mode whoever asks for float32 gets float64."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        def widen(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(widen, args), **{key: widen(value) for key, value in (kwargs or {}).items()})


def to_float64(model: nn.Module, batch: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    """The model, converted in place, and its batch in float64; experts run one by one (their grouped matmul has none)."""
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model.double(), {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in batch.items()}


@torch.no_grad()
def output_of(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """Logits, or the first output, under Float64."""
    with Float64():
        out = model(**batch)
    return out if isinstance(out, Tensor) else out.logits if hasattr(out, "logits") else out[0]


def recorded(model: nn.Module, batch: dict[str, Any]) -> Program:
    """The model's program in float64."""
    model, batch = to_float64(model.eval(), batch)
    with Float64():
        return record(model, batch)


@torch.no_grad()
def replayed(prog: Program) -> Tensor:
    """The first output of a program, under Float64."""
    with Float64():
        return prog.replay()[0]


def passed(prog: Program, passes: Iterable[Pass]) -> Program:
    """``prog`` after these passes."""
    with Float64(), torch.no_grad():
        return run(prog, passes, FACTS, text=True)


def spaces_of(prog: Program) -> Spaces:
    """A program's channel spaces, under Float64."""
    with Float64():
        return Spaces.of(prog)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Error of the finite entries in units of the expected norm."""
    keep = torch.isfinite(expected) & (expected.abs() < 1e30)
    actual, expected = actual[keep].double(), expected[keep].double()
    return ((actual - expected).norm() / expected.norm()).item()
