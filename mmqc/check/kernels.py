"""Which scheme and kernel the engine chooses for every linear, and where that is not what the config says, or slow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from mmqc.check.finding import Finding, several
from mmqc.check.linears import EXPERT, Whole
from mmqc.check.stored import Stored
from mmqc.engines import form as forms
from mmqc.engines.table import Answer, Case, Rules, described

OPTIONAL = ("bias", "weight_shape", "g_idx")  # a linear's own, and two that nothing is computed from
SLOW = {
    "AutoAWQLinearMethod": "no kernel takes AWQ's form without zero points: the weight is written out in every call",
    "ConchLinearKernel": "its kernel is a fallback",
    "ExllamaLinearKernel": "its kernel is a fallback of float16 alone",
    "TritonW4A16LinearKernel": "its kernel is a fallback",
}


@dataclass
class Chosen:
    """What was asked and answered.

    Attributes:
        linears: the engine's quantized linears, with the case asked of each and the answer; None: nobody knows.
        findings: about them.
        flag: what to start the engine with, so that it runs all of them as their config says; "" where nothing is needed.
    """

    linears: list[tuple[Whole, Case, Answer | None]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    flag: str = ""

    def kernels(self) -> Counter[str]:
        """How many linears of each form go to which kernel."""
        return Counter(f"{case.form}: {described(answer, case.form)}" for _, case, answer in self.linears if answer is not None)


def choose(stored: Stored, wholes: Iterable[Whole], rules: Rules, tensor_parallel: int, backend: str) -> Chosen:
    """Ask for every quantized linear; experts are left out, which have kernels of their own."""
    asked = [w for w in wholes if w.first.target is not None and w.first.stored and not EXPERT.search(f"{w.first.name}.")]
    cases = [whole.case(stored, tensor_parallel) for whole in asked]
    answers = rules.answers(cases, backend)
    made = Chosen(list(zip(asked, cases, answers, strict=True)))
    silent = [w.first.name for w, _, a in made.linears if a is not None and a.note == "float inputs"]
    if silent and backend == "auto":
        again = rules.answers(cases, "humming")
        if not any(a is None or a.refused or a.note == "float inputs" for a in again):
            made.flag = "--linear-backend humming"
    made.findings = [
        *_silent(silent, made.flag),
        *_refused(made),
        *_tensors(made),
        *_slow(made),
        *_unknown(made, rules),
        *_split(made, tensor_parallel),
    ]
    return made


def _silent(names: list[str], flag: str) -> list[Finding]:
    way = f"start it with {flag}" if flag else "the engine has no kernel that does"
    return several("warning", "weight-only", names, f"its config quantizes inputs, and vLLM leaves them in floating point: {way}")


def _refused(made: Chosen) -> Iterator[Finding]:
    groups: dict[tuple[str, str], list[str]] = {}
    for whole, case, answer in made.linears:
        if answer is not None and answer.refused:
            groups.setdefault((case.form, answer.refused), []).append(f"{whole.first.name} ({case.inputs} x {case.outputs})")
    for (form, why), names in groups.items():
        yield from several("error", "refused", names, f"vLLM takes no linear of this form ({form}): {why}")


def _tensors(made: Chosen) -> Iterator[Finding]:
    """Tensors that the engine looks for and does not find, or finds and has no place for."""
    wrong: dict[str, list[str]] = {}
    for whole, _, answer in made.linears:
        wanted = answer.tensors.split() if answer is not None else []
        for part in whole.parts if wanted else ():
            lack = [name for name in wanted if name not in part.entries and name not in OPTIONAL]
            more = sorted(name for name in part.entries if name not in wanted and name not in OPTIONAL)
            if lack or more:
                looks = f"vLLM's {answer.scheme if answer else ''} looks for {', '.join(lack)}" if lack else "vLLM"
                has = f"{' and' if lack else ''} has no place for {', '.join(more)}" if more else ""
                wrong.setdefault(looks + has, []).append(part.name)
    for text, names in wrong.items():
        yield from several("error", "unloadable", names, text)


def _slow(made: Chosen) -> Iterator[Finding]:
    """Widths for which a kernel is not the one that its form has elsewhere."""
    usual: dict[str, str] = {}
    for _, case, answer in made.linears:
        if answer is not None and answer.kernel and not _uneven(case):
            usual.setdefault(case.form, answer.kernel)
    odd: dict[str, list[str]] = {}
    for whole, case, answer in made.linears:
        if answer is None or answer.refused:
            continue
        where, common = f"{whole.first.name} ({case.inputs} x {case.outputs})", usual.get(case.form)
        if answer.note == "triton":
            odd.setdefault("CUTLASS wants multiples of 16 channels: a Triton kernel runs it", []).append(where)
        elif answer.note == "fails":
            yield Finding("error", "refused", where, "CUTLASS wants multiples of 16 channels, and nothing else adds zero points")
        elif answer.kernel in SLOW:
            odd.setdefault(SLOW[answer.kernel], []).append(where)
        elif _uneven(case) and (common is None or common != answer.kernel) and answer.kernel.startswith("Humming"):
            text = "no multiples of 64 inputs and 128 outputs: Humming runs it" + (f" in place of {common}" if common else "")
            odd.setdefault(text, []).append(where)
    for text, names in odd.items():
        yield from several("warning", "slow widths", names, text)


def _uneven(case: Case) -> bool:
    return forms.width_class(case.inputs) < forms.width_class(64) or forms.width_class(case.outputs) < forms.width_class(128)


def _unknown(made: Chosen, rules: Rules) -> Iterator[Finding]:
    for form in dict.fromkeys(case.form for _, case, answer in made.linears if answer is None):
        names = [w.first.name for w, case, answer in made.linears if case.form == form and answer is None]
        text = f"its form ({form}) is not in {rules.source}: install the engine and pass --python, and it is asked"
        yield from several("warning", "unknown", names, text)


def _split(made: Chosen, tensor_parallel: int) -> Iterator[Finding]:
    if tensor_parallel == 1:
        return
    uneven = [
        w.first.name
        for w, _, _ in made.linears
        if w.first.inputs % tensor_parallel or any(part.outputs % tensor_parallel for part in w.parts)
    ]
    text = f"its channels do not divide by {tensor_parallel} GPUs"
    yield from several("error", "tensor parallel", uneven, text)
