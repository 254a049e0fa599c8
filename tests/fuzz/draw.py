"""A case from a seed: a program, a dtype, a recipe, calibration batches and calls."""

from __future__ import annotations

import random

from tests.fuzz.grammar import CHANGES, DTYPES, HOOKS, IMAGE, OPS, RECIPES, SHELL, STEPS, TOWER_STEPS, WAYS, Child, Data

DEPTH = 3
TRACED = 0.03  # of cases that compile without Inductor: Dynamo and mmqc's own part, and so in a second
PLAIN_SHARE = 0.35  # of programs with nothing but residual blocks: an odd step makes most spaces be left alone


def draw(seed: int, compiled: float = 0.0) -> Data:
    """The case of a seed; ``compiled`` is the share of cases that compile with Inductor."""
    rng = random.Random(seed)
    program = draw_program(rng)
    images, shapes = program["image"] is not None, _shapes(rng)
    calibration = [_batch(rng, shapes[:3], images, 0.1) for _ in range(rng.choice((1, 1, 2, 3)))]
    calls = [{**_batch(rng, shapes, images, 0.4), "how": rng.choice(WAYS)} for _ in range(rng.choice((4, 6, 8)))]
    calls[0] |= {name: calibration[0][name] for name in ("batch", "length", "image", "alt", "seed")}
    recipe = rng.choice(RECIPES)
    dtype = rng.choice(DTYPES if "(8" not in recipe and "w8" not in recipe else ("float32", "bfloat16"))
    case: Data = {"program": program, "dtype": dtype, "recipe": recipe, "calibration": calibration, "calls": calls, "compile": ""}
    chance = rng.random()
    if chance < compiled + TRACED:
        _compile(rng, case, "inductor" if chance < compiled else "traced")
    return case


def _compile(rng: random.Random, case: Data, how: str) -> None:
    """The case compiles: a quantized model, or an untouched one with the config as an option, whose weights may change."""
    option = rng.random() < 0.5
    case |= {"compile": f"{how} option" if option else how, "calls": case["calls"][:5]}
    if option:
        case |= {"recipe": rng.choice(("rotate()", "rotate() | w8", "rtn(8)")), "dtype": rng.choice(("float32", "float64"))}
        for call in case["calls"][1:]:
            call["how"] = rng.choice(("plain", "plain", *CHANGES))


def draw_program(rng: random.Random) -> Data:
    """A program of one to five steps."""
    program: Data = {name: rng.choice(values) for name, values in SHELL.items()}
    names = ("residual",) if rng.random() < PLAIN_SHARE else STEPS
    program["side"] = program["streams"] > 1
    program["steps"] = [draw_step(rng, names, program["streams"]) for _ in range(rng.choice((1, 2, 2, 3, 3, 4, 5)))]
    program["image"] = None
    if rng.random() < 0.25:
        tower = [draw_step(rng, TOWER_STEPS, 1) for _ in range(rng.choice((0, 1, 1, 2)))]
        program["image"] = {**{name: rng.choice(values) for name, values in IMAGE.items()}, "steps": tower}
        if rng.random() < 0.9:
            program["input"] = "ids"
    program["hooks"] = [draw_hook(rng)] if rng.random() < 0.04 else []
    if rng.random() < 0.12:
        rng.choice(program["steps"])["hook"] = draw_hook(rng)
    program["seed"] = rng.randrange(1 << 20)
    return program


def draw_step(rng: random.Random, names: tuple[str, ...], streams: int) -> Data:
    """An op that stands in a program's list."""
    return {**draw_op(rng, names, DEPTH), "on": rng.randrange(streams)}


def draw_op(rng: random.Random, names: tuple[str, ...], depth: int) -> Data:
    """One of these ops with its parameters, and ops in it no deeper than ``depth``."""
    flat = tuple(name for name in names if depth > 0 or not any(isinstance(v, Child) for v in OPS[name].values()))
    name = rng.choice(flat)
    op: Data = {"op": name}
    for key, values in OPS[name].items():
        op[key] = draw_op(rng, values.names, depth - 1) if isinstance(values, Child) else rng.choice(values)
    return op


def draw_hook(rng: random.Random) -> Data:
    """A hook on one of an op's modules."""
    return {"module": rng.randrange(12), "what": rng.choice(HOOKS)}


def _shapes(rng: random.Random) -> list[tuple[int, int]]:
    return [(rng.choice((1, 2, 2, 3)), rng.choice((4, 5, 6, 9))) for _ in range(3)] + [(0, 5), (1, 1)]


def _batch(rng: random.Random, shapes: list[tuple[int, int]], images: bool, odd: float) -> Data:
    """How to make a batch; ``odd`` is the chance of what calibration seldom has: the other branch, odd sizes."""
    batch, length = rng.choice(shapes if rng.random() < odd else shapes[:3])
    return {
        "batch": batch,
        "length": length,
        "image": images and rng.random() < 0.7,
        "alt": rng.random() < odd,
        "seed": rng.randrange(1 << 16),
    }
