"""One thing that a newcomer tries, and whether it worked or was refused in one clear line.

works               exit code 0, and the words are in what was printed
refused             another exit code, one line that begins with "error:" (of a program: one exception, not a chain of frames
                    below a pass or a kernel), and the words are in it
not here            a package that the row is about is not installed
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 1800  # on a busy machine
HIDDEN = "import sys; sys.modules.update(dict.fromkeys({}))\n"  # what is None there cannot be imported
MMQC = "import runpy; runpy.run_module('mmqc', run_name='__main__', alter_sys=True)"
CACHES = ("HOME", "TMPDIR", "HF_HOME", "TORCHINDUCTOR_CACHE_DIR")  # empty, as a newcomer's are
FRAME = " \t│┃"  # around a table's lines
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
        without: packages that it does not see, installed or not.
        makes: a file or directory that later rows read, whose lines name it.
        after: more of what other rows make, that ``then`` looks at.
        within: seconds of processor time that a refusal may take.
        then: looks at the folder afterwards, and gives what is wrong there, or "".
        interrupted: the signal that it gets.
        at: words on stderr at which it gets it.
    """

    what: str
    line: str
    words: tuple[str, ...] = ()
    code: bool = False
    refused: bool = False
    packages: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    makes: str = ""
    after: tuple[str, ...] = ()
    within: float = 0.0
    then: Callable[[Path], str] = lambda folder: ""
    interrupted: int = 0
    at: str = ""


@dataclass(frozen=True)
class Verdict:
    """What came of a row: "works", "refused" or "not here"; or "WRONG", and what is; and its seconds of a processor."""

    row: Row
    state: str
    text: str
    seconds: float


def chosen(rows: Sequence[Row], only: Sequence[str]) -> list[Row]:
    """Those with one of ``only`` in what they are about, and before them those that make what they read; without ``only`` all."""
    found: list[Row] = []
    for row in reversed(rows):
        read = row.makes and any(reads(later, row.makes) for later in found)
        if not only or read or any(words in row.what for words in only):
            found.insert(0, row)
    return found


def reads(row: Row, name: str) -> bool:
    """Whether what another row makes is in its line, as a word of its own."""
    return name in row.after or bool(re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w.-])", row.line))


def command(row: Row) -> list[str]:
    """Of its process."""
    hidden = HIDDEN.format(row.without) if row.without else ""
    if row.code:
        return [sys.executable, "-c", hidden + row.line]
    return [sys.executable, *(["-c", hidden + MMQC] if hidden else ["-m", "mmqc"]), *shlex.split(row.line)]


def run(row: Row, folder: Path) -> Verdict:
    """Run it in ``folder``, in a process of its own."""
    missing = [name for name in row.packages if importlib.util.find_spec(name) is None]
    if missing:
        return Verdict(row, "not here", f"{', '.join(missing)} not installed", 0.0)
    paths = [str(ROOT), str(ROOT / "tests/support"), os.environ.get("PYTHONPATH", "")]
    own = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "COLUMNS": "150", "TERM": "dumb"}
    own |= {name: str(folder / name.lower()) for name in CACHES}
    own |= {"HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "passive"}
    before = os.times()
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        with subprocess.Popen(command(row), cwd=folder, env=os.environ | own, stdout=stdout, stderr=stderr) as child:
            watch(child, row, stderr.fileno())
        out, err = written(stdout.fileno()), written(stderr.fileno())
    after = os.times()
    processor = after.children_user + after.children_system - before.children_user - before.children_system
    wrong = judge(row, child.returncode, out, err) or row.then(folder)
    if not wrong and row.within and processor > row.within:
        wrong = f"took {processor:.1f} s of a processor, not {row.within:g}"
    if wrong:
        return Verdict(row, "WRONG", wrong, processor)
    return Verdict(row, "refused" if row.refused else "works", said(row, out, err), processor)


def watch(child: subprocess.Popen[bytes], row: Row, stderr: int) -> None:
    """Wait for its end, and interrupt it once the row's words are there."""
    end, interrupted = time.monotonic() + SECONDS, not row.interrupted
    while child.poll() is None:
        if not interrupted and row.at in written(stderr):
            child.send_signal(row.interrupted)
            interrupted = True
        if time.monotonic() > end:
            child.kill()
        time.sleep(0.02)


def written(file: int) -> str:
    """What is in it; the place where the process goes on writing, which is shared, stays."""
    return os.pread(file, os.fstat(file).st_size, 0).decode("utf-8", "replace")


def judge(row: Row, code: int, out: str, err: str) -> str:
    """What is wrong with an exit code and an output; "" if nothing is."""
    if row.interrupted:
        wanted = 130 if row.interrupted == signal.SIGINT else -row.interrupted
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
    """The last one with a word in it: not a frame's."""
    return next((line.strip(FRAME) for line in reversed(text.splitlines()) if re.search(r"\w", line)), "")
