"""Ways of one benchmark, each in a process: they compile side by side and then measure one after the other.

So nothing else is on the device while one measures, and ratios are of one run.  What is known is kept: a run that is ended from
outside, or by its limit, writes what each way has measured by then.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.gpu_run import Run, facts

T = TypeVar("T")


def add_arguments(parser: argparse.ArgumentParser, seconds: float) -> None:
    """Those of every such benchmark."""
    parser.add_argument("--seconds", type=float, default=seconds)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)


def report(module: str, ways: Sequence[str], words: Sequence[str], args: argparse.Namespace) -> None:
    """Print the figures of every way, write them, and end with an error if one is missing."""
    found, failed = run(module, ways, [*words, *(["--dry"] if args.dry else [])], args.seconds)
    text = json.dumps({**facts(Run(args.dry, 0)), "figures": found, "not measured": failed}, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")
    if failed:
        raise SystemExit(f"no figures of {', '.join(failed)}")


def run(module: str, ways: Sequence[str], words: Sequence[str], seconds: float) -> tuple[dict[str, Any], list[str]]:
    """The figures of every way, and which did not come to an end.

    Args:
        module: is started for each way with ``--child FOLDER --ways WAY OTHERS``, and calls ``child``.
        ways: their names.
        words: more arguments.
        seconds: from now until what still runs is ended.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "4", "OMP_WAIT_POLICY": "passive"}
    end, failed, ended = time.monotonic() + seconds, list[str](), list[int]()
    signal.signal(signal.SIGTERM, lambda number, _: ended.append(number))
    with tempfile.TemporaryDirectory() as folder:
        here = [sys.executable, "-m", module, "--child", folder, *words, "--ways"]
        started = [(name, subprocess.Popen([*here, name, *(w for w in ways if w != name)], env=environment)) for name in ways]
        while any(process.poll() is None for _, process in started) and time.monotonic() < end and not ended:
            for name, process in started:
                if process.poll():
                    (Path(folder) / f"{name}.ready").touch()  # the others do not wait for it
            time.sleep(0.2)
        for name, process in started:
            if process.poll() is None:
                process.kill()
            if process.wait() != 0:
                failed.append(name)
        files = {name: Path(folder, f"{name}.json") for name in ways}
        return {name: json.loads(f.read_text(encoding="utf-8")) for name, f in files.items() if f.exists()}, failed


def child(folder: Path, ways: Sequence[str], prepare: Callable[[], T], measure: Callable[[T], Iterable[dict[str, Any]]]) -> None:
    """In a way's process: prepare, wait for the others, measure in turn; ``measure`` gives figures as they become known."""
    way = prepare()
    (folder / f"{ways[0]}.ready").touch()
    while len(list(folder.glob("*.ready"))) < len(ways):
        time.sleep(0.1)
    found, whole = dict[str, Any](), folder / f"{ways[0]}.json"
    with turn(folder):
        for part in measure(way):
            found |= part
            unfinished = whole.with_suffix(".unfinished")
            unfinished.write_text(json.dumps(rounded(found)), encoding="utf-8")
            unfinished.replace(whole)


@contextmanager
def turn(folder: Path) -> Iterator[None]:
    """This process's, among those that share a folder."""
    with (folder / "turn").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def rounded(value: Any) -> Any:
    """Five figures of every number."""
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [rounded(v) for v in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value
