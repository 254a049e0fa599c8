"""How far a quantized or rewritten model may be from the float model, and by which reference.

    rewrites only       the float model's outputs up to rounding, in its own dtype
    bfloat16            no further from the float32 model than a few times what the bfloat16 float model is
    weights rounded     exactly the float model with the rounded weights, where nothing is rewritten
    otherwise           a few times the error of the float model with rounded weights and inputs

Where more than that is seen, the float model is run with weights moved by a few units in the last place: what moves by as much
by itself (a branch at its threshold, a tie of two experts) is no defect.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils import _pytree as pytree
from transformers.pytorch_utils import Conv1D

from mmqc.nn.linear import QuantLinear
from tests.fuzz.build import batch, build, features
from tests.fuzz.grammar import Data

BARS = {torch.float64: 1e-9, torch.float32: 2e-5}
NARROW = 2e-5  # in float64, of parts that compute in float32: norms with a cast, mmqc's quantized linears
TIMES, FLOOR = 6.0, 0.02  # of what bfloat16 and of what rounding costs anyway
MOVES, UNITS = 4, 8  # runs with moved weights, by so many units in the last place
# fmt: off
VALUES = (
    ".numpy", "test=numpy", "greater", "item", "float", "tolist", "test=int",
    "any", "equal", "test=mean", "test=norm", "argmax", "sort",
)
# fmt: on


def leaves(output: Any) -> list[Tensor]:
    """The floating-point tensors of an output; of one with logits, the logits."""
    if isinstance(output, dict) and "logits" in output:
        output = output["logits"]
    return [t.detach() for t in pytree.tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]


def distance(expected: list[Tensor], got: list[Tensor]) -> float:
    """The largest ‖a - b‖ / ‖b‖ of two outputs; infinite where shapes or NaNs differ."""
    if [t.shape for t in expected] != [t.shape for t in got]:
        return float("inf")
    worst = 0.0
    for b, a in zip(expected, got, strict=True):
        known = b.isfinite()
        if bool((a.isfinite() != known).any()):
            return float("inf")
        b, a = b[known].double(), a[known].double()
        size = float(b.norm())
        error = float((a - b).norm())
        worst = max(worst, error / size if size else error)
    return worst


def decides(words: set[str]) -> bool:
    """Whether Python or an order of values decides what is computed."""
    return bool(words & {"value", "experts"}) or any(v in word for word in words for v in VALUES)


class Oracle:
    """What the outputs of one case's model must be."""

    def __init__(self, case: Data, model: nn.Module, reference: nn.Module, calibration: list[Data], rewritten: bool) -> None:
        self.case, self.reference, self.dtype = case, reference, getattr(torch, case["dtype"])
        self.words, self.rewritten = features(case["program"]), rewritten
        self.quantizes = not case["recipe"].startswith("rotate(") or "w8" in case["recipe"]
        self.known = [self.fingerprint(b) for b in case["calibration"]]
        untouched = "option" in case.get("compile", "")  # the graphs are quantized, not the modules
        self.exact = dequantized(model, reference) if self.quantizes and not rewritten and not untouched else None
        self.wide = build(case["program"], torch.float32) if self.dtype is torch.bfloat16 else None

    @staticmethod
    def fingerprint(data: Data) -> tuple[Any, ...]:
        return tuple(data[name] for name in ("batch", "length", "image", "alt", "seed"))

    def objection(self, call: Data, given: Data, expected: Any, got: Any) -> str:
        """What is wrong with an output, or nothing."""
        want, have = leaves(expected), leaves(got)
        if [(t.shape, t.dtype) for t in want] != [(t.shape, t.dtype) for t in have]:
            return f"shapes and dtypes {[(tuple(t.shape), t.dtype) for t in have]}, not {[(tuple(t.shape), t.dtype) for t in want]}"
        if self.exact is not None:
            return self.rounding(call, leaves(self.exact(**given)), have, self.exact, NARROW)
        if self.quantizes:
            return self.bounded(call, want, have)
        loose = self.narrow or self.case.get("compile", "").startswith("inductor")  # whose float64 is off by 1e-8 by itself
        return self.rounding(call, want, have, self.reference, NARROW if loose else 0.0)

    @property
    def narrow(self) -> bool:
        return "norm=rms_cast" in self.words

    def rounding(self, call: Data, want: list[Tensor], have: list[Tensor], reference: nn.Module, least: float) -> str:
        """Equal up to rounding."""
        if self.wide is not None:
            return self.halves(call, want, have)
        bar, error = max(BARS[self.dtype], least), distance(want, have)
        if error <= bar:
            return ""
        unit = torch.finfo(torch.float32 if least and self.dtype is torch.float64 else self.dtype).eps
        allowed = 30 * self.sensitivity(call, reference, UNITS * unit)
        return "" if error <= allowed else f"off by {error:.2g}, where rounding explains {max(bar, allowed):.2g}"

    def halves(self, call: Data, want: list[Tensor], have: list[Tensor]) -> str:
        """In bfloat16: as near to float32 as the float model is, nearly; not where a value decides."""
        if self.decides:
            return ""
        assert self.wide is not None
        truth = leaves(self.wide(**batch(self.case["program"], call, torch.float32)))
        own, error = distance(truth, want), distance(truth, have)
        allowed = TIMES * own + FLOOR
        if error <= allowed:
            return ""
        allowed = max(allowed, TIMES * self.sensitivity(call, self.wide, torch.finfo(torch.bfloat16).eps))
        return "" if error <= allowed else f"off by {error:.2g} in bfloat16, where the float model is off by {own:.2g}"

    def bounded(self, call: Data, want: list[Tensor], have: list[Tensor]) -> str:
        """Not much further off than rounding weights and inputs alone, on batches that were seen where that decides.

        Static scales are those of what was seen; a unit that was never active weighs nothing in AWQ's search.
        """
        recipe = self.case["recipe"]
        seen = any(word in recipe for word in ("rtn(8, 8)", "mquant")) or ("awq" in recipe and "mlp.act=relu" in self.words)
        if self.decides or "experts" in self.words or (seen and self.fingerprint(call) not in self.known):
            return ""
        error = distance(want, have)
        allowed = 3 * FLOOR
        if error <= allowed:
            return ""
        allowed = max(allowed, 2 * TIMES * self.sensitivity(call, self.reference, 2e-2))
        return "" if error <= allowed else f"quantized, off by {error:.2g}, where rounding explains {allowed:.2g}"

    @property
    def decides(self) -> bool:
        return decides(self.words)

    @property
    def takes_other_ways(self) -> bool:
        """Whether rounding alone may send a row to another expert, or Python into another branch."""
        return self.decides and (self.quantizes or self.wide is not None)

    def sensitivity(self, call: Data, reference: nn.Module, unit: float) -> float:
        """How far the float model's output moves when its weights and inputs do by so much."""
        dtype = next(reference.parameters()).dtype
        given, worst, g = batch(self.case["program"], call, dtype), 0.0, torch.Generator().manual_seed(call["seed"])
        with torch.no_grad():
            want = leaves(reference(**given))
            for _ in range(MOVES):
                moved = copy.deepcopy(reference)
                for p in moved.parameters():
                    p.mul_(1 + unit * torch.randn(p.shape, generator=g, dtype=torch.float64).to(dtype))
                worst = max(worst, distance(want, leaves(moved(**given))))
        return worst


def unparametrized(linear: Any) -> nn.Linear:
    """A plain linear with the same bias and hooks; torch's own way would take the class of all copies apart."""
    made = nn.Linear(linear.in_features, linear.out_features, linear.bias is not None)
    made.bias, made._forward_hooks, made._forward_pre_hooks = linear.bias, linear._forward_hooks, linear._forward_pre_hooks
    made._forward_hooks_with_kwargs = linear._forward_hooks_with_kwargs
    return made.eval()


@torch.no_grad()
def dequantized(model: nn.Module, reference: nn.Module) -> nn.Module | None:
    """The float model with the rounded weights; None where there is no such model: rounded inputs, other kinds of modules."""
    made = copy.deepcopy(reference)
    for name, module in model.named_modules():
        twin = made.get_submodule(name) if name in dict(made.named_modules()) else None
        if type(module) is type(twin):
            continue
        plain = isinstance(twin, nn.Linear | Conv1D) and isinstance(module, QuantLinear) and module.input_scale is None
        if not plain or module.outlier_index is not None:  # type: ignore[union-attr]
            return None
        weight = module.weight.to(twin.weight)  # type: ignore[union-attr, arg-type]
        weight = weight.T if isinstance(twin, Conv1D) else weight
        if is_parametrized(twin):  # type: ignore[arg-type]
            twin = unparametrized(twin)  # type: ignore[arg-type]
            made.set_submodule(name, twin)
        twin.weight = nn.Parameter(weight.contiguous(), requires_grad=False)  # type: ignore[union-attr]
    return made
