"""``python -m tests.newcomer``: everything that a newcomer tries, one after the other, as a table; ``make newcomer`` calls it.

    python -m tests.newcomer                prints the table
    python -m tests.newcomer --write        the table of docs/results/newcomer.md, too, and benchmarks/results/newcomer.json
    python -m tests.newcomer --only LoRA    these rows, and those that make what they read

Exit code 1 if a row neither works nor fails in one clear line, or, with --write, is about a package that is not installed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.newcomer import python_rows, shell_rows, table
from tests.newcomer.row import CACHES, ROOT, Row, Verdict, chosen, run

ROWS: tuple[Row, ...] = (*shell_rows.ROWS, *python_rows.ROWS)


def prepare(folder: Path) -> None:
    """A model and data of nobody's, and some that are broken; empty caches."""
    for name in CACHES:
        (folder / name.lower()).mkdir(exist_ok=True)
    sys.path.insert(0, str(ROOT / "tests/support"))
    from own_model import write_data, write_model, write_task

    write_model(folder / "model")
    write_task(folder)
    write_model(folder / "bare", with_processor=False)
    write_model(folder / "cut")
    weights = folder / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:20_000])
    write_data(folder / "data")
    for name in ("empty", "broken", "missing", "noimage"):
        write_data(folder / name)
    (folder / "empty" / "data.jsonl").write_text("")
    good = (folder / "data" / "data.jsonl").read_text().splitlines()
    (folder / "broken" / "data.jsonl").write_text("\n".join([good[0], "{'question':", good[1]]))
    (folder / "missing" / "data.jsonl").write_text(good[0].replace("0.png", "none.png"))
    (folder / "noimage" / "0.png").write_bytes(b"this is no image")


def try_all(only: Sequence[str] = ()) -> list[Verdict]:
    """Every row, or those with one of ``only`` in what they are about and the rows that they need."""
    with tempfile.TemporaryDirectory(prefix="newcomer-") as name:
        folder = Path(name)
        prepare(folder)
        verdicts = []
        for row in chosen(ROWS, only):
            verdicts.append(run(row, folder))
            print(line(verdicts[-1]), flush=True)
        return verdicts


def line(verdict: Verdict) -> str:
    """A line of the table."""
    return f"{verdict.state:8s}  {verdict.seconds:5.1f} s  {verdict.row.what:66s}  {verdict.text[:150]}"


def main() -> int:
    """See above."""
    parser = argparse.ArgumentParser(prog="python -m tests.newcomer", description=__doc__)
    parser.add_argument("--only", nargs="*", default=(), help="rows with one of these in their name, and what they need")
    parser.add_argument("--write", action="store_true", help="the table")
    options = parser.parse_args()
    if options.write and options.only:
        parser.error("the table is of one run over all rows: --write or --only")
    commit = table.commit()
    verdicts = try_all(options.only)
    states = [verdict.state for verdict in verdicts]
    print(", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)))
    bad = {"WRONG", "not here"} & set(states) if options.write else {"WRONG"} & set(states)
    if options.write and not bad:
        table.write(verdicts, commit)
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
