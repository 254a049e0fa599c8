"""What came of the rows, as figures and as a page."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from typing import Any

from mmqc.cli.doctor import environment
from mmqc.versions import installed
from tests.newcomer.row import ROOT, Verdict

RESULTS, PAGE = ROOT / "benchmarks/results/newcomer.json", ROOT / "docs/results/newcomer.md"
HEAD = """# What a newcomer tries

`make newcomer` tries everything below on a small model that is nobody's, one process a row; `tests/newcomer` has each row's command
line or program, and what has to come of it. A row works, or is refused in one line that says why.
Seconds are of a processor, most of them for the imports of torch and transformers.
"""


def commit() -> str:
    """That the rows are run at: its short hash, with "-dirty" where files differ from it."""
    asked = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    return subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def write(verdicts: Sequence[Verdict], commit: str) -> None:
    """Figures and page of one run."""
    packages = sorted({name for verdict in verdicts for name in verdict.row.packages})
    rows = {v.row.what: {"state": v.state, "seconds": round(v.seconds, 1), "text": v.text} for v in verdicts}
    found = {
        "command": "python -m tests.newcomer --write",
        "commit": commit,
        **environment(),
        "packages": {name: installed(name) for name in packages},
        "rows": rows,
    }
    RESULTS.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    PAGE.write_text(page(found), encoding="utf-8")


def page(found: dict[str, Any]) -> str:
    """docs/results/newcomer.md."""
    states = [row["state"] for row in found["rows"].values()]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    versions = {name: found[name] for name in ("torch", "transformers", "torchao", "python")} | found["packages"]
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    ran = f"One run of `{found['command']}`, commit {found['commit']}, {found['date']}; {found['cpu']}; {packages}."
    lines = [
        f"{len(states)} rows: {counts}. {ran}",
        "",
        "| | | s | its last line, or its refusal |",
        "|---|---|---|---|",
    ]
    for what, row in found["rows"].items():
        text = row["text"].replace("|", "\\|").replace("`", "'")[:150]
        lines.append(f"| {what} | {row['state']} | {row['seconds']} | {f'`{text}`' if text else ''} |")
    return "\n".join([HEAD, *lines]) + "\n"
