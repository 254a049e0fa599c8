"""What came of the rows, as figures and as a page."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from mmqc.cli.doctor import environment
from tests.newcomer.row import ROOT, Verdict

RESULTS, PAGE = ROOT / "benchmarks/results/newcomer.json", ROOT / "docs/results/newcomer.md"
HEAD = """# What a newcomer tries

`make newcomer` tries everything below on a small model that is nobody's, one process a row; `tests/newcomer` has each row's command
line or program, and what has to come of it. A row works, or is refused in one line that says why; "not here": a package is missing.
Seconds are of a processor, most of them for the imports of torch and transformers.
"""


def read() -> dict[str, dict[str, Any]]:
    """The rows so far, by what they are about."""
    return json.loads(RESULTS.read_text(encoding="utf-8"))["rows"] if RESULTS.exists() else {}


def write(order: Sequence[str], verdicts: Sequence[Verdict]) -> None:
    """Figures and page, with these verdicts in the place of older ones; rows that are no more are left out."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    about = {"commit": commit.stdout.strip(), "date": time.strftime("%Y-%m-%d")}
    rows = read()
    for verdict in verdicts:
        rows[verdict.row.what] = {"state": verdict.state, "seconds": round(verdict.seconds, 1), "text": verdict.text, **about}
    rows = {what: rows[what] for what in order if what in rows}
    found = {"command": "python -m tests.newcomer --write", **environment(), "of": len(order), "rows": rows}
    RESULTS.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    PAGE.write_text(page(found), encoding="utf-8")


def page(found: dict[str, Any]) -> str:
    """docs/results/newcomer.md."""
    states = [row["state"] for row in found["rows"].values()]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    packages = ", ".join(f"{name} {found[name]}" for name in ("torch", "transformers", "torchao", "python"))
    lines = ["| | | s | its last line, or its refusal | commit | date |", "|---|---|---|---|---|---|"]
    for what, row in found["rows"].items():
        text = row["text"].replace("|", "\\|").replace("`", "'")[:150]
        cells = (what, row["state"], row.get("seconds", ""), f"`{text}`" if text else "", row["commit"], row["date"])
        lines.append(f"| {' | '.join(map(str, cells))} |")
    tried = f"{len(states)} of {found['of']} rows" if len(states) < found["of"] else f"{len(states)} rows"
    return "\n".join([HEAD, f"{tried}: {counts} ({found['cpu']}; {packages}).", "", *lines]) + "\n"
