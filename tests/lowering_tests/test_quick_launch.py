"""Launches of generated code without the way through Inductor and Triton; lists stand for the functions in C."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

from mmqc.lowering import quick_launch
from mmqc.lowering.inductor import compile_graph
from mmqc.lowering.joined_cpp import waiting_at_the_end

LAUNCHER = """
def launcher(in_ptr0, out_ptr0, xnumel, stream):
    grid_0 = -(xnumel // -1024)
    grid_1 = 1
    grid_2 = 1
    runner({})
"""
STATIC = "grid_0, grid_1, grid_2, stream, in_ptr0, out_ptr0, xnumel"
METADATA = "bin.launch_metadata((grid_0, grid_1, grid_2), stream, in_ptr0, out_ptr0, xnumel)"
TRITON = f"grid_0, grid_1, grid_2, stream, function, metadata, {METADATA}, enter, exit, in_ptr0, out_ptr0, xnumel"


class Static:
    """A kernel of Inductor's own launcher."""

    function, num_warps, shared, arg_tys, has_global_scratch, has_profile_scratch = 5, 4, 64, "OOi", False, False

    def __init__(self, **other: Any) -> None:
        self.launched: list[Any] = []
        self.C_impl = SimpleNamespace(_launch_kernel=lambda *args: self.launched.append(args))
        vars(self).update(other)

    def run(self, *_args: Any) -> None:
        self.launched.append("slowly")


def launcher(text: str, **scope: Any) -> Any:
    exec(LAUNCHER.format(text), scope)
    return scope["launcher"]


def static(kernel: Static) -> Any:
    made = launcher(STATIC, runner=kernel.run)
    made._is_static = True
    return made


def by_triton(launched: list[Any], **other: Any) -> Any:
    """A launcher of a kernel as Triton 3.6 compiles it."""
    known = {"launch_cooperative_grid": False, "launch_pdl": True, "global_scratch_size": 0, "profile_scratch_size": 0}
    run = SimpleNamespace(**{"launch": lambda *args: launched.append(args), **known, **other})
    compiled = SimpleNamespace(
        run=run, function=5, packed_metadata="packed", launch_metadata=lambda *_args: launched.append("asked")
    )
    return launcher(TRITON, bin=compiled, runner=run, function=5, metadata="packed", enter=1, exit=2)


@pytest.mark.parametrize("scratch", [0, 1, 2])
def test_quick__static(scratch: int) -> None:
    kernel = Static(has_global_scratch=scratch > 0, has_profile_scratch=scratch > 1)
    quick_launch.quick(static(kernel), "name")("x", "y", 2049, stream=7)
    assert kernel.launched == [(5, 3, 1, 1, 4, 64, "OOi" + "O" * scratch, ("x", "y", 2049, *[None] * scratch), 7)]


def test_quick__by_triton() -> None:
    launched: list[Any] = []
    quick_launch.quick(by_triton(launched), "name")("x", "y", 1024, stream=7)
    assert launched == [(1, 1, 1, 7, 5, False, True, None, None, "packed", None, None, None, "x", "y", 1024)]


@pytest.mark.parametrize(
    "unknown",
    [
        static(Static(function=None)),
        static(Static(C_impl=object())),
        by_triton([], global_scratch_size=128),
        by_triton([], arg_annotations=()),
        launcher("0", runner=print),
    ],
)
def test_quick__what_is_not_known_stays(unknown: Any) -> None:
    assert quick_launch.quick(unknown, "name") is None


def test_quick__a_profiler_sees_the_launch() -> None:
    quick = quick_launch.quick(static(Static()), "triton_poi_fused_add_0")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        quick(torch.ones(2), torch.ones(2), 2, stream=0)
    assert "triton_poi_fused_add_0" in {event.key for event in seen.key_averages()}


def test_quicken__from_the_second_launch_on() -> None:
    kernel, slow = CachingAutotuner.__new__(CachingAutotuner), Static()
    kernel.inductor_meta, kernel.launchers = {"kernel_name": "name"}, []

    def first(*_args: Any, stream: int) -> None:
        slow.launched.append(("first", stream))
        kernel.launchers = [static(slow)]

    kernel.run = first  # type: ignore[method-assign]
    quick_launch.quicken({"kernel": kernel, "other": 3})
    for numel in (1024, 4096):
        kernel.run("x", "y", numel, stream=7)
    assert slow.launched == [("first", 7), (5, 4, 1, 1, 4, 64, "OOi", ("x", "y", 4096), 7)]


def test_quicken__kernels_of_parts_that_are_compiled_meanwhile() -> None:
    kernel = CachingAutotuner.__new__(CachingAutotuner)
    kernel.inductor_meta, names = {}, {"kernel": object()}
    with waiting_at_the_end():
        quick_launch.quicken(names)
        names["kernel"] = kernel
    assert "run" in vars(kernel)


def test_launching_quickly__generated_code_asks_for_it() -> None:
    sources: list[str] = []
    gm = torch.fx.symbolic_trace(lambda x: (x + 1,))
    compile_graph(gm, [torch.ones(8)], {}, lambda _graph, source: sources.append(source))(torch.ones(8))
    assert "mmqc_quick_launch.quicken(globals())" in sources[0]


def test_quicken__a_kernel_that_has_been_launched_can_be_stored() -> None:
    """Two graphs of a process share kernels of the same source; the second graph's are pickled for the next process."""
    kernel: Any = CachingAutotuner.__new__(CachingAutotuner)
    vars(kernel).update(launchers=[], inductor_meta={}, lock=None, run=lambda: None)
    quick_launch.quicken({"kernel": kernel})
    stored = pickle.loads(pickle.dumps(kernel))
    assert "run" in vars(kernel)
    assert "run" not in vars(stored)
    assert stored.inductor_meta == {}
