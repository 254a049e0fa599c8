"""compute-sanitizer's memcheck and racecheck over every kernel (tests/gpu_tests/sanitize.py), each next to its reference.

    python tests/support/run_sanitizer.py [--out FILE] [--seconds 150]        on a CUDA device
    python tests/support/run_sanitizer.py --dry                               the calls alone, in Triton's interpreter, on the CPU

tests/gpu_tests/test_sanitizer.py calls it part by part; alone it writes what docs/results/kernels.md shows.

The kernels run three times, in a process each: alone (which compiles them), under memcheck, under racecheck.  Both tools also
get an error that they must find; where they do not, or refuse the device, kernels count as skipped and never as clean.
Ends with 1 where a kernel is wrong or a tool reports an error.  A warning of racecheck (its word for what warp-synchronous code
may do on purpose) is shown, and is no error.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CHILD = ROOT / "tests/gpu_tests/sanitize.py"
PLANTED = "planted"
OPTIONS = {
    # A gap behind every allocation, or a write past one may land in the next.  What the driver answers to its callers is
    # left out: torch and Triton ask it things that fail by design.
    "memcheck": ["--padding", "512", "--report-api-errors", "no"],
    "racecheck": [],
}
# What a tool says of itself; the rest of its lines that are not indented are findings.
TROUBLE = re.compile(r"Internal Sanitizer|before first instrumented|Unable to|[Ff]ailed to|out of memory")
CHATTER = re.compile(r"^(COMPUTE-SANITIZER|(Error: )?Target application|Error: process didn't|.*SUMMARY:|$)")


@dataclass
class Log:
    """What one run printed: facts, how each kernel ended, and what a tool found while it ran."""

    facts: dict[str, Any] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)  # name -> "" or what is wrong
    found: dict[str, list[str]] = field(default_factory=dict)
    trouble: dict[str, str] = field(default_factory=dict)  # name, or "" for all -> why there is no answer
    refused: str | None = None  # why the tool cannot work here at all
    tool_ran: bool = False
    missing: str | None = None  # why there was no planted error

    def doubt(self) -> str | None:
        """Why the tool is not to be believed where it found nothing."""
        if self.refused or not self.tool_ran:
            return self.refused or self.trouble.get("") or "the tool said nothing"
        untold = PLANTED in self.ended and not self.found.get(PLANTED)
        return "the planted error was not found" if untold and not self.missing else None

    def verdict(self, name: str, tool: bool) -> str:
        """Of one kernel: clean, warnings, errors or skipped, with the reason."""
        found = self.found.get(name, [])
        errors = [f for f in found if not f.startswith("Warning")]
        doubt = self.doubt() if tool else None
        if self.refused and tool:  # what follows from that looks like errors of the kernel
            return f"skipped: {self.refused}"
        errors, told = [f for f in errors if not is_role(f)], errors
        if errors:
            return f"errors: {len(errors)}, first: {errors[0]}"
        if self.ended.get(name):
            return f"errors: {self.ended[name]}"
        if name in self.trouble or name not in self.ended:
            return f"skipped: {self.trouble.get(name) or self.trouble.get('') or 'not reached'}"
        if doubt:
            return f"skipped: {doubt}"
        if told:
            return f"role: {told[0]}"
        return f"warnings: {len(found)}, first: {found[0]}" if found else "clean"


def is_role(finding: str) -> bool:
    """Whether racecheck means the byte by which Triton tells a warp its role, read behind a barrier that the tool does not follow.

    That load is no statement of the kernel's: its line is the one in which the kernel begins.
    """
    place = re.search(r"Race reported between Read access at (\w+)\+0x\w+ in (\w+\.py):(\d+)", finding)
    if place is None:
        return False
    kernel, file, line = place.groups()
    text = next(iter((ROOT / "mmqc/kernels").rglob(file))).read_text(encoding="utf-8").splitlines()
    return text[int(line) - 1].startswith(f"def {kernel}(") and text[int(line) - 2].startswith("@gluon.jit")


def parse(text: str) -> Log:
    """Read the child's lines (``@``) and the tool's (``=========``)."""
    log, current = Log(), ""
    for line in text.splitlines():
        if line.startswith("@ "):
            word, _, rest = line[2:].partition(" ")
            name, _, why = rest.partition(": ")
            if word == "facts":
                log.facts = json.loads(rest)
            elif word == "start":
                current = rest
            elif word == "missing":
                log.missing = why
            else:
                log.ended[name] = why
        elif line.startswith("========="):
            _tool_line(log, current, line[9:].rstrip())
    return log


def _tool_line(log: Log, current: str, said: str) -> None:
    """One line of the tool: a headline, or, indented, where the last finding was."""
    headline = said.strip()
    log.tool_ran |= headline == "COMPUTE-SANITIZER"
    if said.startswith("  "):
        found = log.found.get(current, [])
        if found and " at " not in found[-1] and headline.startswith("at "):
            found[-1] += f" {headline}"
    elif "Device not supported" in headline:
        log.refused = log.refused or headline
    elif TROUBLE.search(headline):
        log.trouble.setdefault(current, headline)
    elif not CHATTER.match(headline):
        log.found.setdefault(current, []).append(headline)


def run(tool: str | None, sanitizer: str, seconds: int, dry: bool, part: str) -> Log:
    """The child, alone or under a tool, with a time limit."""
    command = [sys.executable, str(CHILD), "--part", part, *(["--dry"] if dry else []), *(["--planted", tool] if tool else [])]
    if tool:
        command = [sanitizer, "--tool", tool, "--print-limit", "1000", "--show-backtrace", "no", *OPTIONS[tool], *command]
    # Real allocations, or memcheck sees torch's large blocks only.
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONUNBUFFERED": "1"}
    env.pop("TRITON_INTERPRET", None)
    if dry:
        env["TRITON_INTERPRET"] = "1"
    with tempfile.TemporaryFile() as out:
        # A session of its own: the tool starts the child, and a limit has to end both.
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True)
        try:
            end = f"ended with {process.wait(seconds)}"
        except subprocess.TimeoutExpired:
            end = f"over {seconds} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        out.seek(0)
        text = out.read().decode(errors="replace")
    log = parse(text)
    if not log.facts:
        end += f": {' '.join(text.split())[-300:]}"
    log.trouble.setdefault("", end)
    if not tool:  # alone, nothing excuses a kernel that hangs or takes the process with it
        log.ended = {name: end for name in log.facts.get("kernels", ["start"])} | log.ended
    return log


def find_sanitizer() -> str | None:
    """On PATH, else in the newest CUDA toolkit."""
    places = sorted(Path("/usr/local").glob("cuda*/bin/compute-sanitizer"), reverse=True)
    return shutil.which("compute-sanitizer") or next((str(p) for p in places), None)


def table(data: dict[str, Any]) -> str:
    """One row a kernel; what is not one word follows below."""
    columns = ("alone", *OPTIONS)
    lines = [f"{'kernel':42}" + "".join(f"{c:>11}" for c in columns)]
    notes: dict[str, None] = {}
    for name, verdicts in data["kernels"].items():
        lines.append(f"{name:42}" + "".join(f"{verdicts[c].split(':')[0]:>11}" for c in columns))
        for c in columns:
            if verdicts[c].startswith("skipped"):
                notes[f"{c}: {verdicts[c]}"] = None  # the reason is most often everybody's
            elif ":" in verdicts[c]:
                notes[f"{c}, {name}: {verdicts[c]}"] = None
    return "\n".join([*lines, *notes, *(f"{tool}: planted error {how}" for tool, how in data["planted"].items())])


def sanitize(seconds: int, dry: bool = False, part: str = "1/1") -> dict[str, Any]:
    """Run the kernels alone and under both tools; every kernel's verdicts, and what they were made with.

    Args:
        seconds: time limit of each of the three runs.
        dry: in Triton's interpreter, on the CPU, without the tools.
        part: "2/4" is every fourth kernel from the second on.
    """
    sanitizer, took, planted, logs = find_sanitizer(), {}, {}, {}
    for name in ("alone", *OPTIONS):
        tool = None if name == "alone" else name
        if tool and (dry or not sanitizer):
            logs[name] = Log(refused="a dry run" if dry else "no compute-sanitizer on PATH or in /usr/local/cuda*/bin")
            continue
        start = time.monotonic()
        logs[name] = log = run(tool, sanitizer or "", seconds, dry, part)
        took[name] = round(time.monotonic() - start, 1)
        if tool:
            how = "found" if log.found.get(PLANTED) else "not found" if PLANTED in log.ended else "not reached"
            planted[tool] = f"not tried: {log.missing}" if log.missing else how
    facts = logs["alone"].facts
    version = subprocess.run([sanitizer, "--version"], capture_output=True, text=True).stdout if sanitizer else ""
    return {
        "command": "python tests/support/run_sanitizer.py",
        "device": facts.get("device"),
        "torch": facts.get("torch"),
        "triton": facts.get("triton"),
        "python": facts.get("python"),
        "compute_sanitizer": (re.findall(r"[Vv]ersion (\S+)", version) or [None])[-1],
        "seconds": took,
        "planted": planted,
        "of": facts.get("of", 0),
        "kernels": {
            name: {column: log.verdict(name, column != "alone") for column, log in logs.items()}
            for name in facts.get("kernels", logs["alone"].ended)
        },
    }


def kernels_with(data: dict[str, Any], word: str) -> list[str]:
    """Kernels with a verdict that begins with this word."""
    return [name for name, row in data["kernels"].items() if any(v.startswith(word) for v in row.values())]


def main() -> int:
    """Run all kernels, and write and print the verdicts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/sanitize.json")
    parser.add_argument("--seconds", type=int, default=150, help="time limit of each of the three runs")
    parser.add_argument("--part", default="1/1", help="2/4: every fourth kernel from the second on; written nowhere")
    parser.add_argument("--dry", action="store_true", help="in Triton's interpreter, on the CPU, without the tools")
    args = parser.parse_args()
    data = sanitize(args.seconds, args.dry, args.part)
    if not args.dry and data["device"] is None:
        print("skipped: no CUDA device")
        return 0
    if not args.dry and args.part == "1/1":
        args.out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    print(table(data), flush=True)
    return int(bool(kernels_with(data, "errors")))


if __name__ == "__main__":
    sys.exit(main())
