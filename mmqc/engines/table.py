"""What an engine does with a linear, read from tables that were generated from the engine's own Python; or asked of it anew.

Tables lie in ``engines/tables``, one a version; ``python -m benchmarks.engines.make_tables`` writes them.  Where the engine itself
is installed, in this Python or in another one, it can be asked instead of its table: ``Asked``.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

from mmqc.engines.form import group_of, quantizes_inputs, weight_bits, width_class
from mmqc.errors import MmqcError

GPUS = {"a100": 80, "l40s": 89, "rtx4090": 89, "h100": 90, "h200": 90}
BACKENDS = ("auto", "humming")
ASKING = Path(__file__).with_name("ask_vllm.py")


class EngineError(MmqcError, ValueError):
    """An engine, a version or a GPU of which nothing is known: says which are."""


@dataclass(frozen=True)
class Answer:
    """What becomes of a linear.

    Attributes:
        scheme, kernel: the engine's names of them; "" where it refuses.
        note: "float inputs": quantized inputs are asked for and left in floating point; "triton": CUTLASS has no such widths;
            "fails": no kernel has them.
        tensors: names of those that it loads, with spaces between them.
        refused: why, in the engine's words.
    """

    scheme: str = ""
    kernel: str = ""
    note: str = ""
    tensors: str = ""
    refused: str = ""


@dataclass(frozen=True)
class Case:
    """A linear to ask about: its form (engines/form.py), the config that says so, and its widths as one GPU has them."""

    form: str
    config: Mapping[str, Any]
    inputs: int
    outputs: int


class Rules(Protocol):
    """A source of answers."""

    source: str

    def answers(self, cases: Iterable[Case], backend: str = "auto") -> list[Answer | None]:
        """One answer a case; None where nothing is known of its form."""
        ...

    def names(self, architecture: str) -> Mapping[str, Any] | None:
        """``{"joined": ..., "renaming": ...}`` of a model class (engines/names.py); None: not known."""
        ...


def engine_version(engine: str) -> str:
    """E.g. "0.33" of "vllm==0.33" or "vllm==0.33.0".

    Raises:
        EngineError: no such engine, or a version of which there is no table.
    """
    name, _, version = engine.partition("==")
    known = versions()
    allowed = ", ".join(f"'vllm=={v}'" for v in known)
    if name.strip().lower() == "sglang":
        raise EngineError(
            f"engine = {engine!r}: there is no table of SGLang, whose kernels mmqc has not asked; for its plain forms (weights in "
            "4 or 8 bits alone, W8A8 static, float8) save with format='compressed-tensors' and no engine"
        )
    short = ".".join(version.strip().split(".")[:2])
    if name.strip().lower() != "vllm" or short not in known:
        raise EngineError(f"engine = {engine!r}: known are {allowed}")
    return short


def capability_of(gpu: str | int) -> int:
    """90 of "h100", "9.0" or 90.

    Raises:
        EngineError: no such GPU.
    """
    text = str(gpu).lower().replace(".", "")
    number = GPUS.get(text) or (int(text) if text.isdigit() else 0)
    if number not in GPUS.values():
        raise EngineError(f"gpu = {gpu!r}: known are {', '.join(GPUS)} and the capabilities 8.0, 8.9 and 9.0")
    return number


def versions() -> list[str]:
    """Of which there are tables, oldest first."""
    files = (p.name for p in resources.files("mmqc.engines").joinpath("tables").iterdir())
    found = [n.removeprefix("vllm-").removesuffix(".json") for n in files if n.startswith("vllm-") and n.endswith(".json")]
    return sorted(found, key=lambda v: [int(part) for part in v.split(".")])


@functools.cache
def read_table(version: str) -> dict[str, Any]:
    """The table of one version, as it was generated."""
    table = json.loads(resources.files("mmqc.engines").joinpath("tables", f"vllm-{version}.json").read_text())
    table["answers"] = {key: dict(zip(table["forms"], numbers, strict=True)) for key, numbers in table["answers"].items()}
    return table


class Tabled:
    """Answers from the table."""

    def __init__(self, version: str, capability: int) -> None:
        self.table, self.capability = read_table(version), capability
        self.source = f"the table of vLLM {self.table['version']}"

    def answers(self, cases: Iterable[Case], backend: str = "auto") -> list[Answer | None]:
        """Looked up by form and classes of widths."""
        return [self._answer(case, backend) for case in cases]

    def _answer(self, case: Case, backend: str) -> Answer | None:
        forms = self.table["answers"][f"{self.capability} {backend}"]
        number = forms.get(case.form)
        if number is None:
            return None
        letter = self.table["maps"][number][width_class(case.inputs)][width_class(case.outputs)]
        return Answer(**self.table["letters"][letter])

    def names(self, architecture: str) -> Mapping[str, Any] | None:
        """As the table has them."""
        return self.table["models"].get(architecture)


def ask(python: str, questions: Mapping[str, Any]) -> dict[str, Any]:
    """What the vLLM of a Python answers, which needs nothing of mmqc's: the asking file is run there by its path.

    Raises:
        EngineError: vLLM cannot be imported there.
    """
    command = [python, "-c", "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')", str(ASKING)]
    run = subprocess.run(command, input=json.dumps(questions), capture_output=True, text=True, check=False)
    if run.returncode:
        last = (run.stderr.strip().splitlines() or ["no output"])[-1]
        raise EngineError(f"vLLM could not be asked by {python}: {last}")
    return json.loads(run.stdout)


class Asked:
    """Answers of vLLM itself, in a process of ``python``'s."""

    def __init__(self, version: str, capability: int, python: str = sys.executable) -> None:
        self.version, self.capability, self.python = version, capability, python
        self.source = f"vLLM {version}'s own Python"

    def answers(self, cases: Iterable[Case], backend: str = "auto") -> list[Answer | None]:
        """Asked all at once."""
        cases = list(cases)
        different = list(dict.fromkeys((json.dumps(c.config, sort_keys=True), c.inputs, c.outputs) for c in cases))
        questions = [{"config": json.loads(config), "inputs": k, "outputs": n} for config, k, n in different]
        given = self.ask({"capability": self.capability, "backend": backend, "questions": questions})["answers"]
        known = dict(zip(different, (Answer(**a) for a in given), strict=True))
        return [known[json.dumps(c.config, sort_keys=True), c.inputs, c.outputs] for c in cases]

    def names(self, architecture: str) -> Mapping[str, Any] | None:
        """Of the model class itself."""
        return self.ask({"models": [architecture]})["models"][architecture]

    def ask(self, questions: Mapping[str, Any]) -> dict[str, Any]:
        """What ``engines/ask_vllm.py`` answers.

        Raises:
            EngineError: vLLM cannot be imported there, or is another version.
        """
        answers = ask(self.python, questions)
        if not answers["version"].startswith(f"{self.version}."):
            raise EngineError(f"{self.python} has vLLM {answers['version']}, not {self.version}: name that engine")
        return answers


def rules(engine: str, gpu: str | int = "h100") -> Rules:
    """Of the engine itself where this Python has that version installed, else of its table.

    Raises:
        EngineError: an engine, a version or a GPU of which nothing is known.
    """
    version, capability = engine_version(engine), capability_of(gpu)
    try:
        installed = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        installed = ""
    return Asked(version, capability) if installed.startswith(f"{version}.") else Tabled(version, capability)


def described(answer: Answer, form: str) -> str:
    """The kernel's name, with what is not as the config says."""
    if answer.refused:
        return f"refused: {answer.refused}"
    kernel = answer.kernel.removesuffix("LinearKernel").removesuffix("ScaledMM")
    if answer.note == "float inputs" or not quantizes_inputs(form):
        kernel += f", W{weight_bits(form)}A16"
    if answer.note == "triton":
        kernel += ", by Triton for these widths"
    return kernel if not group_of(form) else f"{kernel}, groups of {group_of(form)}"
