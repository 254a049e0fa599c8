"""Compiled graphs launch what eager calls launch: for every shape that was tuned, with the facts of an H200 and without one.

Operands have no memory: eager calls get tensors on the meta device, the lowering boxes that know a size and a dtype.  Launches are
recorded in place of being run or emitted.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from often import often
from sympy import Symbol
from torch import Tensor

from mmqc.ops.pack import packed_width

on_cuda = pytest.importorskip("mmqc.kernels.on_cuda")
from mmqc.kernels import mixed_on_cuda as mixed_eager  # noqa: E402
from mmqc.kernels.hadamard import hadamard_plan, hadamard_quantize, hadamard_quantize_per_token, transform_by_rows  # noqa: E402
from mmqc.kernels.matmul import by_rows, configs, mixed_matmul, product  # noqa: E402
from mmqc.kernels.shared import compile_ahead, device_facts  # noqa: E402
from mmqc.kernels.shared.launch import Launch  # noqa: E402
from mmqc.kernels.shared.row_scale import row_scale  # noqa: E402
from mmqc.kernels.warpgroup import packed_matmul  # noqa: E402
from mmqc.lowering import by_rows as lowered_by_rows  # noqa: E402
from mmqc.lowering import launch as graph_launch  # noqa: E402
from mmqc.lowering import mixed_on_cuda  # noqa: E402
from mmqc.lowering import on_cuda as lowered  # noqa: E402
from mmqc.lowering import rows_on_cuda as lowered_rows  # noqa: E402

TUNED = json.loads((configs.FOLDER / "nvidia_h200.json").read_text(encoding="utf-8"))
CHIP = TUNED["chip"]
FACTS = {
    "capability": lambda device: CHIP["capability"],
    "multiprocessors": lambda device: CHIP["multiprocessors"],
    "gpu_name": lambda device: "nvidia_h200",
    "why_not_here": lambda *tensors: None,
}
CACHES = (configs.measured, configs._table, mixed_matmul.config)
INT8, UINT8, FP8, BF16, FLOAT = torch.int8, torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32
META = torch.device("meta")
WORKSPACE = ("part_ptr", "counter_ptr")
CALLED = "the op is called"
ROWS = Symbol("rows", integer=True, positive=True)
Made = Callable[[tuple[Any, ...], torch.dtype], Any]


class Box:
    """As much of Inductor's tensors as the lowerings ask for."""

    def __init__(self, size: Any, dtype: torch.dtype) -> None:
        self.size, self.dtype = list(size), dtype

    def get_size(self) -> list[Any]:
        return self.size

    def get_dtype(self) -> torch.dtype:
        return self.dtype

    def get_device_or_error(self) -> torch.device:
        return META


class Lowerings:
    """Those of aten that only shape: a view is asked for by its size."""

    def __getitem__(self, op: Any) -> Callable[..., Box]:
        return lambda box, size=None, *rest: Box(size if isinstance(size, list) else box.size, box.dtype)


INDUCTOR = {
    "contiguous": lambda box: box,
    "static_int": int,
    "size_hint": lambda size, fallback: fallback,
    "at_most": lambda size, bound: False,
    "at_least": lambda size, bound: bound <= 1,
    "empty": lambda shape, dtype, device: Box(shape, dtype),
    "counters": lambda count, device: Box([count], torch.int32),
    "convert": lambda box, dtype: Box(box.size, dtype),
    "for_package": lambda: False,
    "has_python": lambda: True,
    "lowerings": Lowerings(),
}
MODULES = (graph_launch, lowered, lowered_by_rows, lowered_rows, mixed_on_cuda)
CALLS_ABOVE = device_facts.WARPGROUP_ROWS


def described(launch: Launch) -> tuple[Any, ...]:
    """All that a device would see of a launch, but for the room that split_k.py and a graph keep for parts of tiles."""
    args = {k: (tuple(v.shape), stored(v)) if hasattr(v, "shape") else v for k, v in launch.args.items() if k not in WORKSPACE}
    kernel = getattr(launch.kernel, "__name__", None) or launch.kernel.fn.__name__
    return kernel, launch.grid, args, launch.constants, launch.num_warps, launch.num_stages, dict(launch.descriptors), launch.early


def stored(tensor: Any) -> torch.dtype:
    """What is read: a mask as bytes, as which eager calls hand it over."""
    return UINT8 if tensor.dtype == torch.bool else tensor.dtype


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, Any]]]:
    """(Rows that it was made for, launch) of every launch, on an H200."""
    recorded: list[tuple[Any, Any]] = []
    real = {name: getattr(device_facts, name) for name in FACTS}
    for name in [name for name in sys.modules if name.startswith("mmqc.kernels.")]:
        for fact, value in FACTS.items():
            if getattr(sys.modules[name], fact, None) is real[fact]:
                monkeypatch.setattr(sys.modules[name], fact, value)
    monkeypatch.setattr(device_facts, "INTERPRETED", False)
    for module, (name, value) in itertools.product(MODULES, INDUCTOR.items()):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, value)
    emit = lambda launch, rows, planned, runs=None: recorded.append((planned, described(launch)))  # noqa: E731
    for module in (graph_launch, lowered, lowered_rows, mixed_on_cuda):
        monkeypatch.setattr(module, "emit", emit)
    call = lambda function, args, outputs, runs, once: recorded.append((CALLS_ABOVE, (function, args, once)))  # noqa: E731
    for module in (lowered_by_rows, lowered_rows):
        monkeypatch.setattr(module, "call", call)
    monkeypatch.setattr(Launch, "run", lambda self: recorded.append((None, described(self))))
    for cache in CACHES:
        cache.cache_clear()
    yield recorded
    for cache in CACHES:
        cache.cache_clear()


def meta(shape: tuple[Any, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


class Case:
    """An op on operands of some shapes: eagerly, and in a graph."""

    def __init__(self, eager: Callable[..., Any], in_graph: Callable[..., Any], operands: Callable[[Made, Any], list[Any]]) -> None:
        self.eager, self.in_graph, self.operands = eager, in_graph, operands

    def run(self, found: list[tuple[Any, Any]], rows: Any, graph: bool) -> list[tuple[Any, Any]]:
        found.clear()
        made = self.operands(Box if graph else meta, rows)
        called = (self.in_graph if graph else self.eager)(*made)
        return [(None, CALLED)] if called is CALLED else list(found)


def scaled(x: Any, w: Any, x_scale: Any, w_scale: Any, bias: Any, visual: Any, bits: int, dtype: torch.dtype, *groups: Any) -> Any:
    if lowered.scaled_is_called(x, w, w_scale, bias, dtype, *groups):
        return CALLED
    return lowered.scaled(x, w, x_scale, w_scale, bias, visual, dtype, *groups)


def scaled_case(n: int, k: int, codes: torch.dtype, bits: int, widths: tuple[int, ...]) -> Case:
    stored, columns = (UINT8, packed_width(k, 4)) if bits == 4 else (codes, k)

    def operands(new: Made, m: Any) -> list[Any]:
        w, s = [new((n, columns), stored) for n in widths], [new((n,), FLOAT) for n in widths]
        return [new((m, k), codes), w, new((1,), FLOAT), s, [None] * len(w), None, bits, BF16]

    return Case(on_cuda.scaled_matmuls, scaled, operands)


def grouped_case(n: int, k: int, bits: int, integer: torch.dtype | None, widths: tuple[int, ...]) -> Case:
    """Scales of groups of 128: float, or integers of a dtype."""
    plain = scaled_case(n, k, INT8, bits, widths)

    def operands(new: Made, m: Any) -> list[Any]:
        x, w, x_scale, w_scale, *rest = plain.operands(new, m)
        scales = [new((n, math.ceil(k / 128)), integer or FLOAT) for n in widths]
        return [x, w, x_scale, *([scales, *rest, None] if integer is None else [w_scale, *rest, scales]), 128]

    return Case(on_cuda.scaled_matmuls, scaled, operands)


def with_epilogue(
    x: Any, w: Any, x_scale: Any, w_scale: Any, bias: Any, visual: Any, bits: int, dtype: torch.dtype, *after: Any
) -> Any:
    if lowered.epilogue_is_called(x, w, w_scale, bias, dtype, after[1]):
        return CALLED
    return lowered.with_epilogue(x, w, x_scale, w_scale, bias, visual, dtype, *after)


def epilogue_case(n: int, k: int, bits: int, linears: int, ends_in_codes: bool) -> Case:
    plain = scaled_case(n, k, INT8, bits, (n,) * linears)

    def operands(new: Made, m: Any) -> list[Any]:
        return [*plain.operands(new, m), "silu", new((1,), FLOAT) if ends_in_codes else None, None, 8, None, None]

    return Case(on_cuda.scaled_matmul_epilogue, with_epilogue, operands)


def low_rank_case(n: int, k: int, bits: int, rank: int) -> Case:
    """With a term of low rank, and a scale for each modality."""
    plain = scaled_case(n, k, INT8, bits, (n,))

    def operands(new: Made, m: Any) -> list[Any]:
        x, w, _, w_scale, bias, _, *rest = plain.operands(new, m)
        by_modality = [x, w, new((2,), FLOAT), w_scale, bias, new((m,), torch.bool), *rest]
        return [*by_modality, "none", None, None, 8, new((m, rank), BF16), new((n, rank), BF16)]

    return Case(on_cuda.scaled_matmul_epilogue, with_epilogue, operands)


def weight_only_case(n: int, k: int, bits: int, widths: tuple[int, ...]) -> Case:
    def operands(new: Made, m: Any) -> list[Any]:
        w = [new((n, packed_width(k, bits)), UINT8 if bits < 8 else INT8) for n in widths]
        return [new((m, k), BF16), w, [new((n, math.ceil(k / 128)), BF16) for n in widths], [None] * len(w), bits, 128]

    return Case(on_cuda.weight_only_matmuls, lowered.weight_only, operands)


def mixed(x: Any, s: Any, o: Any, w: Any, w_scale: Any, w_sum: Any, bias: Any, widths: Any, bits: Any, dtype: torch.dtype) -> Any:
    assert mixed_on_cuda.why_not(w_scale.size[0], widths, bits, dtype, META) is None
    if mixed_on_cuda.is_called(x, w_scale, widths, bits, dtype):
        return CALLED
    return mixed_on_cuda.mixed(x, s, o, w, w_scale, w_sum, bias, widths, bits, dtype)


def mixed_case(n: int, widths: list[int], bits: list[int]) -> Case:
    def operands(new: Made, m: Any) -> list[Any]:
        w = [new((n, packed_width(k, b)), UINT8 if b == 4 else INT8) for k, b in zip(widths, bits, strict=True)]
        s, o = (new((m, len(w)), FLOAT) for _ in "so")
        scale, sums = new((n, len(w)), FLOAT), new((n, len(w)), torch.int32)
        return [new((m, sum(widths)), INT8), s, o, w, scale, sums, None, widths, bits, BF16]

    return Case(mixed_eager.mixed_matmul, mixed, operands)


def tuned(*ops: str) -> list[tuple[int, int, int]]:
    """(Rows, columns, channels) of these ops in the file."""
    keys = [key.split("/") for key in TUNED["configs"]]
    return sorted({(int(m), int(n), int(k)) for op, m, n, k in keys if op in ops})


def shapes_of(name: str) -> tuple[list[tuple[int, int, int]], Callable[[int, int], list[Case]]]:
    """The tuned shapes of an op, and its cases of N and K: alone, beside others, with epilogues."""
    kinds = {"scaled int8": (INT8, 8), "scaled fp8": (FP8, 8), "scaled int4": (INT8, 4)}
    if name in kinds:
        codes, bits = kinds[name]
        several = [lambda n, k, w=w: scaled_case(n, k, codes, bits, (n, *w)) for w in ((), (512, 512), (64,))]
        last = name.split()[1]
        return tuned(f"scaled_{last}", f"pingpong_{last}", f"packed_{last}"), lambda n, k: [make(n, k) for make in several]
    if name.startswith("groups"):
        bits = int(name[-1])
        forms = [(form, w) for form in (None, INT8, torch.int32) for w in ((), (512,))]
        cases = lambda n, k: [grouped_case(n, k, bits, form, (n, *w)) for form, w in forms]  # noqa: E731
        return tuned(f"scaled_int{bits}_group", f"scaled_int{bits}_group_float"), cases
    if name.startswith("epilogue"):
        bits = int(name[-1])
        ways = [(1, False), (1, True), (2, False), (2, True)]
        term = lambda n, k: low_rank_case(n, k, bits, 8)  # noqa: E731
        cases = lambda n, k: [*(epilogue_case(n, k, bits, *way) for way in ways), term(n, k)]  # noqa: E731
        return tuned(f"scaled_int{bits}", "pingpong_int8"), cases
    if name.startswith("weight"):
        bits = int(name[-1])
        return tuned(f"weight_int{bits}", f"scaled_int{bits}"), lambda n, k: [weight_only_case(n, k, bits, (n,))]
    one, two = [[4], [8]], [[4, 8], [8, 8], [4, 4]]
    return (
        tuned("mixed_int8", "pingpong_mixed", "packed_mixed", "pingpong_int8"),
        lambda n, k: [mixed_case(n, [k], b) for b in one] + [mixed_case(n, [k - k // 8, k // 8], b) for b in two],
    )


NAMES = (
    "scaled int8",
    "scaled fp8",
    "scaled int4",
    "groups int8",
    "groups int4",
    "epilogue int8",
    "epilogue int4",
    "weight_only int8",
    "weight_only int4",
    "mixed",
)


def in_gluon(launches: list[tuple[Any, Any]]) -> bool:
    return any(kernel[0].startswith(("scaled_pingpong", "mixed_pingpong", "gated_pingpong", "packed_")) for _, kernel in launches)


@pytest.mark.parametrize("name", NAMES)
def test_plans__a_graph_launches_what_an_eager_call_does(name: str, found: list[tuple[Any, Any]]) -> None:
    """At the tuned number of rows, at odd ones, and at the rows of every regime where their number is not known."""
    shapes, cases = shapes_of(name)
    assert shapes
    for m, n, k in shapes:
        for i, case in enumerate(cases(n, k)):
            for rows in {m, max(1, m - 3), m // 2 + 1}:
                eager, graph = case.run(found, rows, False), case.run(found, rows, True)
                where = (name, i, rows, n, k)
                assert eager, where
                if in_gluon(eager):
                    assert graph == [(None, CALLED)], where
                else:
                    assert [launch for _, launch in graph if launch[0] != "mm"] == [launch for _, launch in eager], where


@pytest.mark.parametrize("name", often(NAMES, "scaled int8", "groups int4"))
def test_plans__any_number_of_rows_has_the_launches_of_every_regime(name: str, found: list[tuple[Any, Any]]) -> None:
    """Few rows as eager calls; many too, where a call knows them, else without what a graph cannot have: weights written out."""
    for i, (n, k) in enumerate(sorted({(n, k) for _, n, k in shapes_of(name)[0]})):
        for case in shapes_of(name)[1](n, k):
            graph = case.run(found, ROWS, True)
            calls = [
                told for planned, told in graph if planned == CALLS_ABOVE and told[0] in (by_rows.scaled, by_rows.with_epilogue)
            ]
            graph = [found for found in graph if found[1] not in calls]
            assert not in_gluon(graph)
            if name == "mixed":  # one launch, whatever the rows
                continue
            up_to = packed_matmul.FEW if name.endswith("int4") else CALLS_ABOVE  # from where on a call is faster
            up_to = graph_launch.REGIMES[-1] if name.startswith("groups") else up_to
            regimes = (*(last for last in graph_launch.REGIMES if last < up_to), up_to) if calls else graph_launch.REGIMES
            assert {planned for planned, _ in graph} == {*regimes, *([] if calls else [graph_launch.MANY])}
            assert not any(launch[0].startswith("unpack") for _, launch in graph)
            for last in regimes:
                eager = [normal(launch, last) for _, launch in case.run(found, last, False)]
                assert [normal(launch, last) for planned, launch in graph if planned == last] == eager
            assert len(calls) == (0 if name.startswith("weight") else 1)
            for function, args, once in calls:
                compare_call(case, function, args, found, up_to)
                if i % 6 == 0:
                    compare_kernels(case, expected(once), found)


@pytest.fixture
def packed(found: list[tuple[Any, Any]], monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """As ``found``, of graphs without Python."""
    monkeypatch.setattr(graph_launch, "for_package", lambda: True)
    monkeypatch.setattr(lowered_by_rows, "has_python", lambda: False)
    return found


@pytest.mark.parametrize("name", [name for name in NAMES if name != "mixed"])
def test_plans__a_package_launches_what_python_need_not_choose(name: str, packed: list[tuple[Any, Any]]) -> None:
    """Of any number of rows nothing that is written out in vain; few rows as eager calls."""
    shapes, cases = shapes_of(name)
    for n, k in {(n, k) for _, n, k in shapes}:
        for case in cases(n, k):
            assert not in_gluon(case.run(packed, 2048, True))
            graph = case.run(packed, ROWS, True)
            assert {planned for planned, _ in graph} == {*graph_launch.REGIMES, graph_launch.MANY}
            assert not in_gluon(graph)
            assert not any(launch[0].startswith("unpack") for _, launch in graph)


@pytest.mark.parametrize("name", ["scaled int8", "scaled int4", "groups int4", "weight_only int4"])
def test_plans__a_step_in_a_package_has_launches_for_one_row(name: str, packed: list[tuple[Any, Any]], monkeypatch: Any) -> None:
    monkeypatch.setattr(graph_launch, "starts_early", lambda: True)
    monkeypatch.setattr(graph_launch, "at_least", lambda size, bound: bound <= 2)  # as a trace has it
    for n, k in {(n, k) for _, n, k in shapes_of(name)[0]}:
        for case in shapes_of(name)[1](n, k):
            graph = case.run(packed, ROWS, True)
            assert {planned for planned, _ in graph} == {1, *graph_launch.REGIMES, graph_launch.MANY}
            assert [normal(found, 1) for planned, found in graph if planned == 1] == [
                normal(found, 1) for _, found in case.run(packed, 1, False)
            ]


@pytest.mark.parametrize("rows", [1, 3, 300])
def test_expected__rows_of_a_step_are_as_many_as_in_its_example(rows: int, packed: list[Any], monkeypatch: Any) -> None:
    monkeypatch.setattr(graph_launch, "size_hint", lambda size, fallback: rows)
    assert graph_launch.expected(ROWS) == graph_launch.MANY
    monkeypatch.setattr(graph_launch, "starts_early", lambda: True)
    assert graph_launch.expected(ROWS) == rows


@pytest.mark.parametrize("name", ["scaled int4", "groups int4", "epilogue int4", "weight_only int4"])
def test_plans__no_sum_of_any_number_of_rows_is_split(name: str, packed: list[tuple[Any, Any]], monkeypatch: Any) -> None:
    """Parts of sums have memory for the rows that a launch was planned for: more of them wrote behind it, in packages."""
    split = configs.MatmulConfig(128, 64, 64, 4, 3, split_k=2, variant="columns")
    monkeypatch.setattr(configs, "config", lambda *shape: split)
    case = shapes_of(name)[1](1280, 5120)[0]
    parts = {planned: launch[1][1] if len(launch[1]) > 1 else 1 for planned, launch in case.run(packed, ROWS, True)}
    assert parts == {**dict.fromkeys(graph_launch.REGIMES, 2), graph_launch.MANY: 1}


def transforms(n: int, gated: bool, static: bool, visual: bool, by_token: bool, kept: bool) -> Case:
    """A transform into numbers, codes by a static scale, with channels that are kept or without, or codes by token."""

    def operands(new: Made, m: Any) -> list[Any]:
        scale, mask = new((2 if visual else 1,), FLOAT), new((m,), torch.bool) if visual else None
        x, up, channels = new((m, n), BF16), new((m, n), BF16) if gated else None, new((8,), torch.int64)
        return [x, up, *((scale, mask) if static else (None, None)), channels]

    def eager(x: Any, up: Any, scale: Any, mask: Any, channels: Any) -> None:
        if by_token:
            hadamard_quantize_per_token.plan(x, up, hadamard_plan.hadamard_plan, 4).run()
            return
        scales = row_scale(scale, len(x), mask) if static else None
        if kept:
            hadamard_quantize.plan_kept(x, up, hadamard_plan.hadamard_plan, channels, scales).run()
            return
        hadamard_quantize.plan(x, up, hadamard_plan.hadamard_plan, scales, 8, INT8 if static else None).run()

    def in_graph(x: Any, up: Any, scale: Any, mask: Any, channels: Any) -> None:
        if by_token:
            lowered_rows.transform_per_token(x, up, 4)
        elif kept:
            lowered_rows.transform_kept(x, up, channels, scale, mask, 8, INT8)
        else:
            lowered_rows.transform(x, up, scale, mask, 8, INT8 if static else None)

    return Case(eager, in_graph, operands)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("into", ["numbers", "codes", "codes by modality", "codes by token", "codes, channels kept"])
def test_plans__a_transform_of_any_number_of_wide_rows_calls_for_many(
    into: str, gated: bool, found: list[tuple[Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lowered_rows, "matrices", lambda n, device, dtype: hadamard_plan.hadamard_plan(n, device, dtype))
    for n in (18944, 14336, 5120):
        case = transforms(
            n, gated, into.startswith("codes") and into != "codes by token", "modality" in into, "token" in into, "kept" in into
        )
        graph = case.run(found, ROWS, True)
        calls = [told for planned, told in graph if planned == CALLS_ABOVE]
        assert [launch[0] for planned, launch in graph if planned == lowered_rows.TURNS] == ["hadamard_quantize_kernel"]
        assert len(calls) == (n > 8192)
        for function, args, once in calls:
            compare_call(case, function, args, found)
            compare_kernels(case, expected(once), found)


def expected(once: str) -> set[Any]:
    """The kernels that a line of generated code asks for."""
    asked: list[Launch] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile_ahead, "ahead", lambda launches, device: asked.extend(launches))
        for module in (by_rows, transform_by_rows):
            patch.setattr(module, "_expected", set())
        kernels_of = transform_by_rows.kernels_of  # which makes matrices on the device
        patch.setattr(transform_by_rows, "kernels_of", lambda device, site: list(kernels_of(META, site)))
        exec(once, {"mmqc_by_rows": by_rows, "mmqc_transform_by_rows": transform_by_rows, "torch": torch})
    return {launch.specialisation() for launch in asked}


def compare_kernels(case: Case, compiled: set[Any], found: list[tuple[Any, Any]]) -> None:
    """No kernel is launched of many rows that was not compiled ahead."""
    wanted: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Launch, "run", lambda self: wanted.append(self.specialisation()))
        for rows in (CALLS_ABOVE + 1, 917, 1999, 3600, 6417, 9000):
            case.run(found, rows, False)
    assert wanted
    assert set(wanted) <= compiled


def compare_call(case: Case, function: Any, args: Any, found: list[tuple[Any, Any]], above: int = CALLS_ABOVE) -> None:
    """The call launches of many rows what the op launches."""
    for rows in (above + 1, 917, 3600, 6417):
        eager = case.run(found, rows, False)
        found.clear()
        function(*on_meta(args, rows))
        assert found == eager, (rows, args[0])


def on_meta(arg: Any, rows: int) -> Any:
    if isinstance(arg, (list, tuple)):
        return [on_meta(a, rows) for a in arg]
    return meta(tuple(rows if size == ROWS else size for size in arg.size), arg.dtype) if isinstance(arg, Box) else arg


def normal(launch: tuple[Any, ...], rows: int) -> tuple[Any, ...]:
    """With so many rows in place of the symbol."""
    kernel, grid, args, *rest = launch
    fixed = {k: (tuple(rows if s == ROWS else s for s in v[0]), v[1]) if isinstance(v, tuple) else v for k, v in args.items()}
    return kernel, grid, fixed, *rest


def test_plans__a_threshold_of_the_graph_alone_is_noticed(found: list[tuple[Any, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail."""
    monkeypatch.setattr(lowered, "matmul_caller", lambda rows, runs=None: product.Caller(gluon=False, graph=True))
    with pytest.raises(AssertionError, match="scaled int8"):
        test_plans__a_graph_launches_what_an_eager_call_does("scaled int8", found)
