"""What every pass did, as files: ``MMQC_TRACE=folder`` in the environment.

    folder/000_recorded/00_captured.txt              the program as it was captured
    folder/000_recorded/03_fold_norm_scale.diff      what the third pass changed, under its equation, its sites and its refusals
    folder/000_recorded/03_fold_norm_scale.txt       the program after it
    folder/001_graph_Model.forward/...               the next program: one of Dynamo's graphs

Programs are numbered in the order in which passes first changed them, passes in the order in which they ran on theirs; a pass
that found no site has a number and no file.  Later processes count on, so nothing is ever overwritten.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path

from mmqc.errors import MmqcError
from mmqc.graph.program import PassRecord, Program
from mmqc.graph.text import program_text, text_diff

# Dynamo's l_self_modules_a_modules_b_buffers_c_ is the model's a.b.c.
DYNAMO_NAME = re.compile(r"\bl_self_modules_(\w+?)_(?:parameters|buffers)_(\w+?)_\b")


class TraceError(MmqcError, OSError):
    """The folder that MMQC_TRACE names cannot be written."""


def trace_folder() -> Path:
    """The folder that MMQC_TRACE names, made where there is none.

    Raises:
        TraceError: nothing can be written there.
    """
    name = os.environ["MMQC_TRACE"]
    folder = Path(name).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise TraceError(f"MMQC_TRACE={name}: no trace can be written there ({error}); name another folder, or unset it") from error


class Trace:
    """A program in front of one pass; ``write`` says what the pass did."""

    def __init__(self, prog: Program, module: str) -> None:
        self.prog, self.module, self.before = prog, module, _text(prog)

    def write(self, record: PassRecord) -> None:
        """Write the files of the pass, if it had sites; ``record`` is the program's last."""
        if not record.sites:
            return
        if self.prog.traced is None:
            self.prog.traced = _new_folder("recorded" if not self.prog.fragment else f"graph_{_place()}")
            _write(self.prog.traced / "00_captured.txt", self.before)
        after = _text(self.prog)
        first = f"# after {record.name}: {record.n_sites} sites, {len(record.misses)} refused, {record.ms:.1f} ms\n"
        notes = [*_equation(self.module), *(f"site     {s}" for s in record.sites), *(f"refused  {m}" for m in record.misses)]
        head = first + "".join(f"# {line}".rstrip() + "\n" for line in notes)
        stem = f"{len(self.prog.records):02d}_{record.name}"
        _write(self.prog.traced / f"{stem}.diff", head + text_diff(self.before, after, context=2))
        _write(self.prog.traced / f"{stem}.txt", first + after)


def _text(prog: Program) -> str:
    """The program, and the formulas of the weights that passes derived and that the model does not hold yet."""
    nodes = DYNAMO_NAME.sub(lambda m: f"{m[1].replace('_modules_', '.')}.{m[2]}", program_text(prog))
    weights = (f"{name} <- {step.formula}" for name in prog.changed for step in prog.derived(name))
    return "\n".join([nodes, "", *weights])


def _equation(module: str) -> list[str]:
    """The first sentence of a pass's docstring and the equation under it."""
    head, _, rest = (sys.modules[module].__doc__ or "").partition("\n\n")
    equation = rest.split("\n\n")[0]
    return [head, "", *equation.splitlines(), ""] if equation.startswith(" ") else [head, ""]


def _new_folder(name: str) -> Path:
    """With the next number."""
    folder = trace_folder()
    while True:
        taken = [int(found[0]) for path in folder.iterdir() if (found := re.match(r"\d+", path.name))]
        new = folder / f"{max(taken, default=-1) + 1:03d}_{name}"
        try:
            new.mkdir()
            return new
        except FileExistsError:
            continue  # of another process that writes to the same folder


def _place() -> str:
    """The function that Dynamo traces, or, where it does not say, the class of the module that is being called."""
    from mmqc.graph.capture import outermost_module  # these ask Dynamo, which a recording does not need
    from mmqc.graph.tracing import traced_place

    module = outermost_module()
    place = traced_place().split(" at ")[0] or (type(module).__name__ if module is not None else "function")
    return re.sub(r"[^\w.]+", "_", place)


def _write(path: Path, text: str) -> None:
    path.write_text(text + "\n", encoding="utf-8")
