"""Draws and checks cases for so many seconds, in so many processes; goes on where the last run stopped.

State is one JSON file: how many seeds are done, what came of them, how many programs had each feature and how many of those
were accepted.  A failure is made smaller and saved; one whose program has all that an earlier one takes counts as known.
"""

from __future__ import annotations

import hashlib
import json
import logging
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.fuzz.build import features
from tests.fuzz.check import BAD, GOOD, Outcome, run
from tests.fuzz.draw import draw
from tests.fuzz.grammar import Data
from tests.fuzz.pool import LIMIT, Shared, pool
from tests.fuzz.shrink import called, shrink, signature

CASES = Path(__file__).parent / "cases"
CHUNK = 8  # seeds that a process takes at once
SHRINKS, SAVED, APART = 10, 60, 5.0  # failures made smaller, failures saved, seconds between two writes of the state
STRIDE = 1 << 32  # seeds of a campaign
SAID = 300  # characters of what is said of a failure
Known = tuple[str, str, frozenset[str]]  # kind, key, and what its program has to have


@dataclass
class Found:
    """A failure: its case, made smaller if ``small``, and what came of it."""

    seed: int
    case: Data
    kind: str
    key: str
    detail: str
    takes: list[str]

    @property
    def name(self) -> str:
        """Of its file: by what it takes, so that a defect that is found twice is one file."""
        return hashlib.sha256(json.dumps([self.kind, self.key, self.takes]).encode()).hexdigest()[:10]

    def data(self) -> Data:
        """As it is saved."""
        found = {"kind": self.kind, "key": self.key, "detail": self.detail[:SAID], "takes": self.takes, "seed": self.seed}
        return {"found": found, "case": self.case}


@dataclass
class State:
    """What a campaign has seen.

    Attributes:
        next: seeds below it were drawn.
        counts: by kind of outcome, and "programs", "changed by mmqc", "known".
        seen, accepted: programs by feature; accepted ones were rewritten or quantized, and equal.
    """

    next: int = 0
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    seen: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)

    @classmethod
    def read(cls, path: Path) -> State:
        """From its file; a new one if there is none."""
        if not path.exists():
            return cls()
        data = json.loads(path.read_text(encoding="utf-8"))
        tables = {name: Counter(data[name]) for name in ("counts", "seen", "accepted", "reasons")}
        return cls(data["next"], data["seconds"], **tables)

    def write(self, path: Path) -> None:
        """As one, so that a killed campaign leaves the old file or the new one."""
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".new")
        beside.write_text(json.dumps(vars(self), indent=1, sort_keys=True), encoding="utf-8")
        beside.replace(path)

    def add(self, case: Data, outcome: Outcome) -> None:
        """Counts one program."""
        words = features(case["program"]) | {f"dtype={case['dtype']}", f"recipe={case['recipe']}"}
        did = outcome.rewritten or outcome.quantized > 0
        self.counts.update(["programs", outcome.kind, *(["changed by mmqc"] if did else [])])
        self.seen.update(words)
        if did and outcome.kind == "equal":
            self.accepted.update(words)
        if outcome.kind != "equal":
            self.reasons.update([f"{outcome.kind}: {outcome.key}"])

    def merge(self, other: State) -> None:
        """Adds what another process has seen."""
        for mine, its in zip(self.tables, other.tables, strict=True):
            mine.update(its)

    @property
    def tables(self) -> tuple[Counter[str], ...]:
        return self.counts, self.seen, self.accepted, self.reasons


def known_cases(folder: Path = CASES) -> dict[str, Data]:
    """The saved failures, by their names."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}


def known_by(found: Data) -> Known:
    """By what a failure is known again."""
    return found["kind"], found["key"], frozenset(found["takes"])


def is_known(case: Data, outcome: Outcome, known: list[Known]) -> bool:
    """Whether the case has all that a known failure of the same kind takes."""
    words = features(case["program"]) | called(case)
    return any(kind == outcome.kind and key == outcome.key and takes <= words for kind, key, takes in known)


class Hang(BaseException):
    """A case takes too long; nothing in between may catch it."""


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Raises Hang in what takes longer."""

    def stop(*_: Any) -> None:
        raise Hang(f"a case took more than {seconds} s")

    old = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)


def outcome_of(case: Data) -> Outcome:
    """What comes of a case, in time; "broken" if the fuzzer itself fails."""
    torch.manual_seed(0)
    try:
        with at_most(LIMIT):
            return run(case)
    except Hang as error:
        return Outcome(hung(case), str(error), "hang")
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return Outcome("broken", f"{type(error).__name__}: {error}", f"{Path(place.filename).name}:{place.lineno}")


def hung(case: Data) -> str:
    """The kind of outcome: Inductor's own compilations may take long on a busy machine."""
    return "slow" if case["compile"].startswith("inductor") else "crash"


def smaller(seed: int, case: Data, outcome: Outcome, seconds: float = 30.0, shared: Shared | None = None) -> Found:
    """A failure, made smaller; ``shared`` is told of each run."""

    def fails(other: Data) -> bool:
        if shared is not None:
            shared.at(seed)
        now = outcome_of(other)
        return (now.kind, now.key) == (outcome.kind, outcome.key)

    case = shrink(case, fails, seconds)
    again = outcome_of(case) if seconds else outcome
    return found_of(seed, case, outcome if again.kind in GOOD else again)  # what fails now and then is told as it was first seen


def found_of(seed: int, case: Data, outcome: Outcome) -> Found:
    """A failure as it is."""
    takes = {word for word in signature(case) if outcome.kind != "hook" or word.startswith("hook=")}
    return Found(seed, case, outcome.kind, outcome.key, outcome.detail, sorted(takes))


def work(seeds: Iterable[int], known: list[Known], options: Data) -> tuple[State, list[Found]]:
    """Draws and checks the cases of these seeds; ``options["shared"]`` is what other processes see of it."""
    torch.set_num_threads(1)
    torch._logging.set_logs(dynamo=logging.ERROR)  # it has a page of words for each graph break
    shared: Shared | None = options.get("shared")
    state, found, known = State(), [], list(known)
    for seed in seeds:
        case = draw(seed, options["compiled"])
        if options["only"] and not any(options["only"] in word for word in features(case["program"]) | {case["recipe"]}):
            continue
        if shared is not None:
            shared.at(seed)
        outcome = outcome_of(case)
        state.add(case, outcome)
        if outcome.kind in options["kinds"]:
            if is_known(case, outcome, known):
                state.counts["known"] += 1
                continue
            small = outcome.key != "hang" and (shared is None or shared.may_shrink())
            found.append(smaller(seed, case, outcome, shared=shared) if small else found_of(seed, case, outcome))
            known.append(known_by(vars(found[-1])))
    return state, found


def campaign(
    seed: int = 0,
    seconds: float = 60.0,
    jobs: int = 1,
    *,
    folder: Path | None = None,
    cases: Path | None = CASES,
    only: str = "",
    compiled: float = 0.0,
    kinds: tuple[str, ...] = (*BAD, "rewrite_error"),
    programs: int | None = None,
    tell: Callable[[Found], None] = lambda found: None,
) -> tuple[State, list[Found]]:
    """Goes on with the campaign ``seed`` for so many seconds.

    Args:
        seed: which of 2^31 rows of programs.
        seconds: of the clock; a case that has begun is ended.
        programs: ends it as well; None: no limit.
        jobs: processes.
        folder: where the state is kept; None: nowhere, it begins anew.
        cases: where failures are saved; None: nowhere.
        only: cases whose program has a feature with this in its name.
        compiled: share of cases that compile.
        kinds: of outcomes that are failures.
        tell: is called with each failure that is not known.
    """
    path = folder / f"state_{seed}.json" if folder is not None else None
    state, found, start = State.read(path) if path is not None else State(), [], time.monotonic()
    known: list[Known] = []  # saved cases are mended: what fails as they did is new
    options, before, written = {"only": only, "compiled": compiled, "kinds": kinds}, state.seconds, start
    parts = _parts(state, seed, seconds, jobs, known, options)
    for part, new in parts:
        state.merge(part)
        if programs is not None and state.counts["programs"] >= programs:
            parts.close()
        state.seconds = before + time.monotonic() - start
        for each in new:
            if not any((each.kind, each.key) == (kind, key) and takes <= set(each.takes) for kind, key, takes in known):
                known.append(known_by(vars(each)))
                found.append(each)
                if len(found) <= SAVED:
                    save(each, cases)
                    tell(each)
        if path is not None and time.monotonic() - written > APART:
            state.write(path)
            written = time.monotonic()
    if path is not None:
        state.write(path)
    return state, found


def save(found: Found, cases: Path | None) -> None:
    """As a file that the tests run."""
    if cases is not None:
        cases.mkdir(parents=True, exist_ok=True)
        (cases / f"{found.name}.json").write_text(json.dumps(found.data(), indent=1) + "\n", encoding="utf-8")


def _parts(
    state: State, seed: int, seconds: float, jobs: int, known: list[Known], options: Data
) -> Iterator[tuple[State, list[Found]]]:
    """What comes of chunk after chunk; the state's ``next`` moves with them."""

    def chunk() -> list[int]:
        first = seed * STRIDE + state.next
        state.next += CHUNK
        return list(range(first, first + CHUNK))

    if jobs == 1:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            yield work(chunk(), known, options)
        return
    for done, lost in pool(work, jobs, seconds, chunk, known, options, SHRINKS):
        yield done if lost is None else _lost(*lost, options)


def _lost(seed: int, how: str, options: Data) -> tuple[State, list[Found]]:
    """What is said of a program whose process died or hung."""
    if seed < 0:  # at no program yet
        return State(counts=Counter({f"process {how}": 1})), []
    case, state = draw(seed, options["compiled"]), State()
    outcome = Outcome(hung(case) if how == "hang" else "crash", f"its process {how}", how)
    state.add(case, outcome)
    return state, [found_of(seed, case, outcome)] if outcome.kind in options["kinds"] else []
