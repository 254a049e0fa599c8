"""One thing that a newcomer tries, and whether it worked or was refused in one clear line.

works               exit code 0, and the words are in what was printed
refused             another exit code, one line that begins with "error:" (of a program: one exception, not a chain of frames
                    below a pass or a kernel), and the words are in it
not here            a package that the row is about is not installed
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 1800  # on a busy machine
NOISE = ("Traceback (most recent call last)", "not finite", "Exception ignored")


@dataclass(frozen=True)
class Row:
    """A command line or a program, and what has to come of it.

    Attributes:
        what: as in the table.
        line: behind ``mmqc``, or Python code where ``code`` is set.
        words: have to be in the output; of a refusal, in the line.
        code: ``line`` is a program.
        refused: it has to be.
        packages: that it is about.
        within: seconds of processor time that a refusal may take.
        then: looks at the folder afterwards, and gives what is wrong there, or "".
        interrupted: seconds after which it gets a SIGINT (> 0) or, with a minus, a SIGKILL.
    """

    what: str
    line: str
    words: tuple[str, ...] = ()
    code: bool = False
    refused: bool = False
    packages: tuple[str, ...] = ()
    within: float = 0.0
    then: Callable[[Path], str] = lambda folder: ""
    interrupted: float = 0.0


@dataclass(frozen=True)
class Verdict:
    """What came of a row: "works", "refused" or "not here"; or "WRONG", and what is; and its seconds of a processor."""

    row: Row
    state: str
    text: str
    seconds: float


def run(row: Row, folder: Path) -> Verdict:
    """Run it in ``folder``, in a process of its own."""
    missing = [name for name in row.packages if importlib.util.find_spec(name) is None]
    if missing:
        return Verdict(row, "not here", f"{', '.join(missing)} not installed", 0.0)
    command = [sys.executable, "-c", row.line] if row.code else [sys.executable, "-m", "mmqc", *shlex.split(row.line)]
    paths = [str(ROOT), str(ROOT / "tests/support"), os.environ.get("PYTHONPATH", "")]
    own = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "COLUMNS": "150", "TERM": "dumb"}
    own |= {"HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "passive"}
    before = os.times()
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=folder, env=os.environ | own, stdout=pipe, stderr=pipe, text=True) as child:
        try:
            out, err = child.communicate(timeout=abs(row.interrupted) or SECONDS)
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGINT if row.interrupted > 0 else signal.SIGKILL)
            out, err = child.communicate()
    after = os.times()
    processor = after.children_user + after.children_system - before.children_user - before.children_system
    wrong = judge(row, child.returncode, out, err) or row.then(folder)
    if not wrong and row.within and processor > row.within:
        wrong = f"took {processor:.1f} s of a processor, not {row.within:g}"
    if wrong:
        return Verdict(row, "WRONG", wrong, processor)
    return Verdict(row, "refused" if row.refused else "works", said(row, out, err), processor)


def judge(row: Row, code: int, out: str, err: str) -> str:
    """What is wrong with an exit code and an output; "" if nothing is."""
    if row.interrupted:
        wanted = 130 if row.interrupted > 0 else -signal.SIGKILL
        return "" if code == wanted and "Traceback" not in err else f"exit code {code}, not {wanted}: {err[-300:]}"
    if (code != 0) != row.refused:
        return f"exit code {code}: {last_line(err)}"
    if row.refused and not row.code and err.count("error:") != 1:
        return f"{err.count('error:')} lines of errors: {err[-400:]}"
    text = refusal(row, err) if row.refused else out + err
    lost = [word for word in row.words if word not in " ".join(text.split())]
    if lost:
        return f"{lost[0]!r} is not in: {' '.join(text.split())[-400:]}"
    noise = [words for words in NOISE if words in out + err and not (row.code and row.refused)]
    return f"{noise[0]!r} is in the output" if noise else ""


def refusal(row: Row, err: str) -> str:
    """The line that says no."""
    return last_line(err) if row.code else next((line for line in err.splitlines() if line.startswith("error:")), "")


def said(row: Row, out: str, err: str) -> str:
    """For the table: a refusal's line, else the last line of the output."""
    return refusal(row, err) if row.refused else last_line(out)


def last_line(text: str) -> str:
    """The last one that is not empty."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
