"""What is done to rows on CUDA: a compiled graph launches what an eager call does, on a device that is only told of."""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import device_facts
import pytest
import sympy
import torch
from often import often
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.exc import LoweringException
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from mmqc.lowering import inductor, norm_quantize
from mmqc.ops.hadamard_matrix import hadamard_factors

eager = pytest.importorskip("mmqc.kernels.rows_on_cuda")
lowered = pytest.importorskip("mmqc.lowering.rows_on_cuda")
from mmqc import kernels  # noqa: E402
from mmqc.kernels.hadamard import hadamard_plan, hadamard_quantize  # noqa: E402
from mmqc.kernels.shared.launch import Launch  # noqa: E402
from mmqc.lowering import launch as emitting  # noqa: E402

BF16, FP32, FP64, FP8 = torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn
ROWS = (1, 16, 17, 40, 513)
Empty = Callable[..., Tensor]


class Case(NamedTuple):
    """A call of an op; ``make`` gives its operands, of tensors that ``empty`` makes."""

    op: str
    what: tuple[Any, ...]
    make: Callable[[Empty], tuple[Any, ...]]

    def __str__(self) -> str:
        return f"{self.op} {self.what}"


def norms(rows: int, width: int, dtype: torch.dtype, full: bool, empty: Empty) -> tuple[Any, ...]:
    x, r = empty(rows, width, dtype=dtype), empty(rows, width, dtype=dtype) if full else None
    scale, visual = empty(2 if full else 1, dtype=FP32), empty(rows, dtype=torch.bool) if full else None
    return x, r, empty(width, dtype=dtype), None, 1e-6, full, not full, scale, visual, 4 if full else 8, None if full else FP8


def norms_per_token(rows: int, parts: list[int], dtype: torch.dtype, full: bool, empty: Empty) -> tuple[Any, ...]:
    width = sum(parts)
    x, r = empty(rows, width, dtype=dtype), empty(rows, width, dtype=dtype) if full else None
    order = empty(width, dtype=torch.int64) if full else None
    return x, r, empty(width, dtype=FP32), None, 1e-6, False, order, parts, [2, 4, 8, 8][: len(parts)]


def static(rows: int, width: int, dtype: torch.dtype, full: bool, empty: Empty) -> tuple[Any, ...]:
    scale, visual = empty(2 if full else 1, dtype=FP32), empty(rows, dtype=torch.bool) if full else None
    return empty(rows, width, dtype=dtype), scale, visual, 4 if full else 8, None if full else FP8


def per_token(rows: int, parts: list[int], dtype: torch.dtype, full: bool, empty: Empty) -> tuple[Any, ...]:
    order = empty(sum(parts), dtype=torch.int64) if full else None
    return empty(rows, sum(parts), dtype=dtype), order, parts, [4, 8, 8, 8][: len(parts)]


def bases(rows: int, parts: list[int], dtype: torch.dtype, empty: Empty) -> tuple[Any, ...]:
    width = sum(parts)
    return empty(rows, width, dtype=dtype), empty(width, width, dtype=dtype), parts, [4, 8, 8][: len(parts)]


def transforms(op: str, rows: int, sizes: list[int], dtype: torch.dtype, gated: bool, empty: Empty) -> tuple[Any, ...]:
    width = math.prod(sizes)
    x, up = empty(rows, width, dtype=dtype), empty(rows, width, dtype=dtype) if gated else None
    factors = [empty(size, size, dtype=FP32) for size in sizes]
    if op == "hadamard":
        return x, factors
    static = (empty(1, dtype=FP32), None, 8, FP8 if gated else None)
    if op.endswith("kept"):
        return x, up, factors, empty(8, dtype=torch.int64), *static
    return x, up, factors, *((4,) if op.endswith("token") else static)


def cases() -> Iterator[Case]:
    """Rows, widths that kernels take and that they do not, dtypes, with everything in front and with nothing."""
    parts = ([64], [3136, 448], [1024, 2560, 512], [70000], [16] * 4)
    for rows, full in itertools.product(ROWS, (False, True)):
        for width, dtype in ((64, BF16), (1280, FP32), (18944, BF16), (70000, BF16), (64, FP64)):
            for op, make in (("norm_quantize", norms), ("quantize", static)):
                yield Case(op, (rows, width, dtype, full), functools.partial(make, rows, width, dtype, full))
        for make in (norms_per_token, per_token):
            op = "norm_quantize_per_token" if make is norms_per_token else "quantize_per_token"
            for some, dtype in (*((some, BF16) for some in parts), ([64], FP32), ([64], FP64)):
                yield Case(op, (rows, some, dtype, full), functools.partial(make, rows, some, dtype, full))
        for width, dtype in ((64, BF16), (3584, BF16), (18944, BF16), (8960, BF16), (64, FP32)):
            sizes = [len(factor) for factor in hadamard_factors(width)]
            for op in (
                "hadamard_quantize",
                "hadamard_quantize_kept",
                "hadamard_quantize_per_token",
                *(() if full else ("hadamard",)),
            ):
                yield Case(op, (rows, width, dtype, full), functools.partial(transforms, op, rows, sizes, dtype, full))
        for some, dtype in (([112, 16], BF16), ([1], FP32), ([320], BF16), ([64], FP64)) if full else ():
            yield Case("basis_quantize_per_token", (rows, some, dtype), functools.partial(bases, rows, some, dtype))


def shown(value: Any) -> Any:
    """A tensor, or a graph's buffer, as far as two launches are compared."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape)
    if hasattr(value, "get_size"):
        dtype = value.get_dtype()
        return torch.uint8 if dtype == torch.bool else dtype, tuple(int(size) for size in value.get_size())
    return value


class Launched:
    """Launches as values that can be compared, and calls of the op; none: the operands were refused."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def put(self, launch: Launch, grid: tuple[Any, ...], args: dict[str, Any], runs: Any = None) -> None:
        assert runs is None, "a kernel of rows has one launch for any number of them"
        grid = tuple(int(size) for size in (*grid, 1, 1)[:3])
        how = launch.kernel.fn.__name__, grid, launch.num_warps, launch.num_stages, launch.outputs, launch.descriptors
        self.found.append((*how, launch.constants, {name: shown(value) for name, value in args.items()}))

    def call(self, op: Any, *args: Any) -> Any:
        del args
        self.found.append(str(op))
        raise LookupError("called")


class RefusedError(Exception):
    """The reference is asked."""


def reference(*args: Any) -> Any:
    raise RefusedError


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    """What is launched on a Hopper device that is not there, by kernels that are compiled."""
    found, on_cpu = Launched(), hadamard_plan.hadamard_plan
    matrices = lambda n, device, dtype, cut=None: on_cpu(n, torch.device("cpu"), dtype, cut)  # noqa: E731
    device_facts.pretend(monkeypatch, hadamard_plan=matrices, install=lambda: True, call_kernel=found.call)
    monkeypatch.setattr(kernels, "install", lambda: True)
    monkeypatch.setattr(hadamard_plan, "all_known", lambda factors, n: True)
    monkeypatch.setattr(hadamard_quantize, "DTYPES", (torch.float16, torch.bfloat16))
    monkeypatch.setattr(Launch, "run", lambda self: found.put(self, self.grid, self.args))
    monkeypatch.setattr(emitting, "launch_kernel", found.put)
    for op in (module for name, module in vars(eager).items() if name.endswith("_op")):
        monkeypatch.setattr(op, "reference", reference)
    return found


def of_eager(case: Case, launched: Launched) -> list[Any]:
    """The launches of a call."""
    launched.found = []
    empty = lambda *size, dtype: torch.zeros(size, dtype=dtype) if dtype == torch.int64 else torch.empty(size, dtype=dtype)  # noqa: E731
    with contextlib.suppress(RefusedError):
        getattr(eager, case.op)(*case.make(empty))
    return launched.found


def of_graph(case: Case, launched: Launched) -> list[Any]:
    """The launches of the same call in a graph; what is no launch needs a device, and is not lowered any further."""
    launched.found = []
    mode = FakeTensorMode()
    with mode:
        operands = case.make(lambda *size, dtype: torch.empty(size, dtype=dtype, device="cuda"))
        tensors, spec = tree_flatten(operands)
        given = [t for t in tensors if isinstance(t, Tensor)]

        def function(*traced: Tensor) -> Any:
            values = iter(traced)
            return getattr(torch.ops.mmqc, case.op)(
                *tree_unflatten([next(values) if isinstance(t, Tensor) else t for t in tensors], spec)
            )

        traced = make_fx(function, decomposition_table=select_decomp_table())(*given)

    def needs_a_device(*_: Any) -> Any:
        raise RefusedError

    graph, width = GraphLowering(traced, shape_env=None), frozenset({operands[0].shape[1]})
    with (
        V.set_graph_handler(graph),
        V.set_fake_mode(mode),
        inductor.trusted_transforms(width),
        mock.patch.dict(inductor.lowerings, {torch.ops.aten.mm.default: needs_a_device}),
        contextlib.suppress(LoweringException),
    ):
        graph.run(*given)
    return launched.found


@pytest.mark.parametrize(
    "op", often(sorted({case.op for case in cases()}), "hadamard", "norm_quantize", "basis_quantize_per_token")
)
def test_lowered__launches_are_those_of_eager_calls(op: str, launched: Launched) -> None:
    seen = set()
    for case in cases():
        if case.op != op:
            continue
        want, found = of_eager(case, launched), of_graph(case, launched)
        kernels_of = [launch[0] for launch in want]
        if case.what[0] <= {"norm_quantize": norm_quantize.INDUCTOR_ROWS, "quantize": lowered.INDUCTOR_ROWS}.get(op, 0):
            assert found == [], f"{case}: few rows are Inductor's"
        elif "hadamard_wgmma_kernel" in kernels_of:
            assert found == [f"mmqc.{op}.default"], f"{case}: Gluon's kernels are launched by calls of the op"
        else:
            assert found == want, str(case)
        seen.add((*kernels_of, len(want)))
    assert len(seen) > 1, "some are launched, and some refused"
    assert (0,) in seen


def test_lowered__a_package_calls_no_op(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("hadamard", (513, 18944), functools.partial(transforms, "hadamard", 513, [148, 128], BF16, False))
    assert of_graph(case, launched) == ["mmqc.hadamard.default"]
    monkeypatch.setattr(lowered, "for_package", lambda: True)
    assert [launch[0] for launch in of_graph(case, launched)] == ["hadamard_quantize_kernel"]


@pytest.mark.parametrize(("first", "planned"), [(5, emitting.MANY), (100_000, 100_000)])
def test_lowered__any_number_of_rows_is_planned_as_many(first: int, planned: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that any prompt will run may have been traced with a short one."""
    count = sympy.Symbol("s0", positive=True, integer=True)
    monkeypatch.setattr(emitting, "size_hint", lambda size, unknown: first)
    monkeypatch.setattr(emitting, "for_package", lambda: False)
    monkeypatch.setattr(lowered.Operand, "matrix", lambda box: SimpleNamespace(shape=box.get_size(), of=lambda rows: rows))
    assert lowered.Rows(SimpleNamespace(get_size=lambda: [count, 64])).x == planned
