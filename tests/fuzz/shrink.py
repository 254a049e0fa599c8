"""Makes a failing case smaller, step by step, for as long as it goes on failing in the same way."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tests.fuzz.build import features
from tests.fuzz.grammar import IMAGE, OPS, SHELL, Child, Data

SMALL = {"batch": (2, 1), "length": (4,), "image": (False,), "alt": (False,), "how": ("plain",)}


def shrink(case: Data, fails: Callable[[Data], bool], seconds: float = 30.0) -> Data:
    """The smallest case that was found, by processor time; ``fails`` says whether a case still fails in the same way."""
    start, again = time.process_time(), True
    while again:
        again = False
        for smaller in candidates(case):
            if time.process_time() - start > seconds:
                return case
            if fails(smaller):
                case, again = smaller, True
                break
    return case


def signature(case: Data) -> frozenset[str]:
    """What a small case has beyond the simplest program: what its failure takes."""
    words = features(case["program"]) - features(SIMPLEST) | called(case)
    return frozenset(words - PLAIN or words)


def called(case: Data) -> set[str]:
    """What is special about a case's calls, in words."""
    words = {f"call={name}" for call in case["calls"] for name in ("image", "alt") if call[name]}
    words |= {f"compile={case['compile']}"} if case.get("compile") else set()
    return words | {f"call={call['how']}" for call in case["calls"] if call["how"] != "plain"}


PLAIN = {"residual", "linear", "mlp", "attention", "norm=none", "norm=layer_bare", "residual.write=add", "residual.write=none"}
PLAIN |= {f"{op}.kind={kind}" for op in ("linear", "mlp", "attention", "experts") for kind in ("plain", "bias")}
PLAIN |= {"mlp.act=relu", "mlp.gate=none"}
LINEAR = {"op": "linear", "kind": "plain"}
SIMPLEST: Data = {name: values[0] for name, values in SHELL.items()} | {"steps": [], "image": None, "hooks": []}


def candidates(case: Data) -> Iterator[Data]:
    """Cases that are a little smaller, those that save most first."""
    for name in ("calls", "calibration"):
        yield from (_with(case, **{name: [item]}) for item in case[name] if len(case[name]) > 1)
    for program in _programs(case["program"]):
        yield _with(case, program=program)
    for name in ("calls", "calibration"):
        for i, item in enumerate(case[name]):
            for key, values in SMALL.items():
                for value in _simpler(item.get(key), values):
                    yield _with(case, **{name: [{**old, key: value} if i == j else old for j, old in enumerate(case[name])]})
    if case.get("compile"):
        yield from (_with(case, compile=value) for value in _simpler(case["compile"], ("", "traced", "traced option")))
    for name, values in (("dtype", ("float64", "float32")), ("recipe", ("rotate()", "rtn(8) without data", "rtn(8)"))):
        yield from (_with(case, **{name: value}) for value in _simpler(case[name], values))


def _programs(program: Data) -> Iterator[Data]:
    steps, image = program["steps"], program["image"]
    for name in ("steps", "hooks"):
        yield from (_with(program, **{name: rest}) for rest in _without_one(program[name]))
    if image:
        yield _with(program, image=None)
        yield from (_with(program, image={**image, "steps": rest}) for rest in _without_one(image["steps"]))
    for i, step in enumerate(steps):
        yield from (_with(program, steps=[*steps[:i], made, *steps[i + 1 :]]) for made in _ops(step))
    yield from (_with(program, **{k: v}) for k, v in _options(program, SHELL))
    if image:
        yield from (_with(program, image={**image, k: v}) for k, v in _options(image, IMAGE))
        for i, step in enumerate(image["steps"]):
            yield from (
                _with(program, image={**image, "steps": [*image["steps"][:i], made, *image["steps"][i + 1 :]]})
                for made in _ops(step)
            )


def _ops(op: Data) -> Iterator[Data]:
    """Simpler ops in an op's place: one that it holds, the same with simpler parameters."""
    rest = {k: v for k, v in op.items() if k in ("on", "hook")}
    held = {k: v for k, v in op.items() if isinstance(v, dict) and k != "hook"}
    if "hook" in op:
        yield {k: v for k, v in op.items() if k != "hook"}
        if op["hook"]["what"] != "count":
            yield {**op, "hook": {**op["hook"], "what": "count"}}
    if op["op"] in ("mlp", "attention", "experts"):
        yield {"op": "linear", "kind": op["kind"], **rest}
    for value in held.values():
        yield {**value, **rest}
    yield from ({**op, key: LINEAR} for key, value in held.items() if value != LINEAR)
    yield from ({**op, key: value} for key, value in _options(op, OPS[op["op"]]))
    for key, value in held.items():
        yield from ({**op, key: made} for made in _ops(value))


def _options(data: Data, table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, values in table.items():
        if not isinstance(values, Child):
            simplest = ("none",) if "none" in values else ()
            yield from ((key, value) for value in _simpler(data.get(key, values[0]), (*simplest, *values)))


def _simpler(value: Any, values: tuple[Any, ...]) -> list[Any]:
    """The values in front of this one; all if it is not among them."""
    known = list(dict.fromkeys(values))
    return known[: known.index(value)][:3] if value in known else known[:3]


def _without_one(items: list[Any]) -> Iterator[list[Any]]:
    yield from (items[:i] + items[i + 1 :] for i in range(len(items)))


def _with(data: Data, **changes: Any) -> Data:
    return {**copy.deepcopy(data), **copy.deepcopy(changes)}
