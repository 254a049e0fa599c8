"""``python -m tests.fuzz --seconds 600 --jobs 2``: draws programs, compares mmqc with the float model, saves what differs."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from importlib import metadata
from pathlib import Path

import mmqc
from tests.fuzz.build import text
from tests.fuzz.campaign import CASES, CHUNK, Found, State, campaign, outcome_of, smaller
from tests.fuzz.check import BAD
from tests.fuzz.draw import draw
from tests.fuzz.grammar import Data


def main() -> int:
    """Exit code 1 if a failure was found that no saved case has."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--programs", type=int, help="ends it as well, whichever comes first")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seed", type=int, default=0, help="of the campaign; another seed, other programs")
    parser.add_argument("--only", default="", help="programs that have a feature with this in its name, e.g. branch or slice.how=")
    parser.add_argument("--compiled", type=float, default=0.002, help="share of cases that compile, which takes long")
    parser.add_argument("--replay", help="a saved case, or a program's seed: run it and say what comes of it")
    parser.add_argument("--shrink", action="store_true", help="with --replay: make it smaller")
    parser.add_argument("--out", type=Path, default=Path("out/fuzz"), help="where the state is kept, for the next run to go on")
    parser.add_argument("--cases", type=Path, default=CASES, help="where failures are saved")
    given = parser.parse_args()
    if given.replay:
        return replay(given.replay, given.shrink)
    options = {
        "folder": given.out,
        "cases": given.cases,
        "only": given.only,
        "compiled": given.compiled,
        "programs": given.programs,
    }
    tell = lambda each: print(described(each), flush=True)  # noqa: E731
    given.out.mkdir(parents=True, exist_ok=True)
    state, found = campaign(given.seed, given.seconds, given.jobs, tell=tell, **options)
    summary = {"versions": versions(), "jobs": given.jobs, **summarised(state), "classes": [said(each) for each in found]}
    (given.out / f"summary_{given.seed}.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({k: v for k, v in summary.items() if k != "features"}, indent=1))
    return 1 if any(each.kind in BAD for each in found) else 0


def replay(what: str, smaller_too: bool) -> int:
    """Runs one case."""
    seed = int(what) if what.isdigit() else -1
    case: Data = draw(seed) if seed >= 0 else json.loads(Path(what).read_text(encoding="utf-8"))["case"]
    outcome = outcome_of(case)
    if smaller_too and outcome.kind in (*BAD, "rewrite_error"):
        found = smaller(seed, case, outcome, 120.0)
        print(described(found))
        print(json.dumps(found.case))
        return 1
    print(text(case["program"]))
    print({k: v for k, v in case.items() if k != "program"})
    print(outcome)
    return int(outcome.kind in BAD)


def versions() -> dict[str, str]:
    """Of what the programs ran on."""
    numbers = {name: metadata.version(name) for name in ("torch", "transformers")}
    return {"python": platform.python_version(), "machine": platform.machine(), "mmqc": mmqc.__version__, **numbers}


def said(found: Found) -> Data:
    """A failure in a summary; its program is the file of its name."""
    return {name: getattr(found, name) for name in ("name", "seed", "kind", "key", "takes", "detail")}


def described(found: Found) -> str:
    """A failure in words."""
    rest = "\n  ".join(f"{name}: {found.case[name]}" for name in ("recipe", "dtype", "calibration", "calls"))
    head = f"== {found.name} seed {found.seed} {found.kind} [{found.key}] takes {', '.join(found.takes)}"
    return f"{head}\n{text(found.case['program'])}\n  {rest}\n  {found.detail}"


def summarised(state: State) -> Data:
    """Counts, the share that mmqc changed, and by feature how many programs had it and how many were accepted and changed."""
    programs = state.counts["programs"] or 1
    return {
        "seeds": state.next - state.next % CHUNK,
        "seconds": round(state.seconds, 1),
        "programs": state.counts["programs"],
        "changed by mmqc": round(state.counts["changed by mmqc"] / programs, 3),
        "outcomes": {k: v for k, v in sorted(state.counts.items()) if k not in ("programs", "changed by mmqc")},
        "reasons": dict(state.reasons.most_common(40)),
        "features": {name: [n, state.accepted[name]] for name, n in sorted(state.seen.items())},
    }


if __name__ == "__main__":
    sys.exit(main())
