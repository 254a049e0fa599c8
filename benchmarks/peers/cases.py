"""What is compared: mmqc's recipe and a peer's method at the same bits, groups and symmetry, on one sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mmqc.config import QuantConfig
from mmqc.recipes import awq, gptq, learned, rtn


@dataclass(frozen=True)
class Case:
    """``ours`` against ``peer``: names of RECIPES and of a script's methods."""

    sample: str
    ours: str
    peer: str
    bits: int
    group: int
    symmetric: bool

    @property
    def form(self) -> str:
        """E.g. "W2 g64 sym"."""
        return f"W{self.bits} {f'g{self.group}' if self.group else 'row'} {'sym' if self.symmetric else 'asym'}"


RECIPES: dict[str, Callable[[int, int | None, bool], QuantConfig]] = {
    "rtn": lambda bits, group, symmetric: rtn(bits, group_size=group, symmetric=symmetric),
    "mse_clip": lambda bits, group, symmetric: rtn(bits, group_size=group, symmetric=symmetric, solver="mse_clip"),
    "mse_clip, float zero": lambda bits, group, symmetric: rtn(
        bits, group_size=group, symmetric=symmetric, solver="mse_clip", zero_point="float"
    ),
    "gptq": lambda bits, group, symmetric: gptq(bits, group, symmetric=symmetric),
    "awq": lambda bits, group, symmetric: awq(bits, group, symmetric=symmetric),
    "awq+gptq": lambda bits, group, symmetric: awq(bits, group, symmetric=symmetric, solver="gptq"),
    "learned": lambda bits, group, symmetric: learned(bits, group, symmetric=symmetric),
    "awq+learned": lambda bits, group, symmetric: awq(bits, group, symmetric=symmetric, solver="learned"),
}
SAMPLES = ("digits-vqa", "digits-vqa-stress", "docs-vqa")
FORMS = {
    "rtn": ((4, 128, True), (3, 128, True), (2, 32, True)),
    "gptq": ((4, 128, True), (4, 128, False), (3, 128, True), (2, 64, True), (2, 32, False), (2, 32, True)),
    "awq": ((4, 128, False), (3, 128, False), (2, 32, False)),
    "awq+gptq": ((4, 128, True), (3, 128, True), (2, 64, True), (2, 32, False)),
}
DATA_FREE = {  # (ours, its peer): with zero points, which the docs advise to have between the codes in 2 bits, and not above
    ("mse_clip", "hqq"): ((4, 128), (3, 128)),
    ("mse_clip, float zero", "hqq"): ((2, 32),),
    ("rtn", "quanto"): ((4, 128), (2, 32)),
    ("rtn", "torchao"): ((4, 128), (3, 128), (2, 32)),
}
LEARNED = ("gptq", "awq+gptq", "autoround")
CASES = (
    *(
        Case(sample, method, f"llmcompressor {method}", *form)
        for method, forms in FORMS.items()
        for form in forms
        for sample in SAMPLES
    ),
    *(
        Case(sample, ours, f"llmcompressor {peer}", 2, 64, True)
        for ours in ("learned", "awq+learned")
        for peer in LEARNED
        for sample in SAMPLES
    ),
    *(
        Case(sample, ours, f"data_free {peer}", *form, False)
        for (ours, peer), forms in DATA_FREE.items()
        for form in forms
        for sample in SAMPLES
    ),
)
UNRUN = {
    "GPTQModel": "it asks for another torch than this comparison's",
}


def nearest() -> list[Case]:
    """Of each of mmqc's recipes the comparison with the method that is most like it, where both read data."""
    like = {"learned": "autoround", "awq+learned": "autoround"}
    return [case for case in CASES if case.peer == f"llmcompressor {like.get(case.ours, case.ours)}"]


def name_of(sample: str) -> str:
    """On the page: digits, stress, docs-vqa."""
    return sample.removeprefix("digits-vqa").lstrip("-") or "digits"


def verdict(low: float, high: float) -> str:
    """Of an interval, mmqc minus peer."""
    return "better" if high < 0 else "worse" if low > 0 else "tie"


def keys(case: Case) -> tuple[str, str]:
    """Under which mmqc's and the peer's run are on file."""
    return f"{case.sample} {case.form} mmqc {case.ours}", f"{case.sample} {case.form} {case.peer}"
