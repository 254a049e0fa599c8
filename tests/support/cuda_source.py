"""The wrapper that Inductor writes for a function of CUDA tensors, on a machine that has no GPU: nothing is compiled or run."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch._inductor import scheduler
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

H100: dict[str, Any] = {
    "multi_processor_count": 132,
    "cc": 90,
    "major": 9,
    "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 2048,
    "warp_size": 32,
}


def compiled_kernels() -> None:
    """Skip where kernels are the interpreter's, which have no source."""
    triton = pytest.importorskip("triton")
    if triton.knobs.runtime.interpret:
        pytest.skip("run by test_kernel_options.py in a process without the interpreter")


class Sizes:
    """Symbols of one graph: ``Sizes()["b", 3]`` is one that was 3 when the graph was traced."""

    def __init__(self) -> None:
        self.env = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.env, allow_non_fake_inputs=True)

    def __getitem__(self, named: tuple[str, int]) -> Any:
        name, hint = named
        return self.env.create_symintnode(self.env.create_symbol(hint, ConstantSource(name)), hint=hint)

    def empty(self, *shape: Any, dtype: torch.dtype) -> torch.Tensor:
        """A tensor on a GPU that is not there."""
        with self.mode:
            return torch.empty(shape, dtype=dtype, device="cuda")


def wrapper_of(function: Callable[..., Any], sizes: Sizes, *args: torch.Tensor) -> str:
    """The source."""
    with sizes.mode:
        graph = make_fx(function, tracing_mode="fake")(*args)
    with contextlib.ExitStack() as stack:
        _pretend(stack)
        lowered = GraphLowering(graph, example_inputs=args, shape_env=sizes.env)
        stack.enter_context(V.set_graph_handler(lowered))
        stack.enter_context(V.set_fake_mode(sizes.mode))
        stack.enter_context(V.set_debug_handler(mock.MagicMock()))
        lowered.run(*args)
        source: Any = lowered.codegen()[0]
    return getattr(source, "value", source)


def _pretend(stack: contextlib.ExitStack) -> None:
    """To mmqc and to Inductor, that there is an H100."""
    launch = importlib.import_module("mmqc.lowering.launch")
    inductor = importlib.import_module("mmqc.lowering.inductor")
    told: dict[str, Any] = {
        "has_kernel": lambda x: True,
        "multiprocessors": lambda device: 132,
        "shared_bytes": lambda device: 232_448,
        "why_not_here": lambda *x: None,
        "early_lines": lambda *x: 0,
    }
    for module in [m for name, m in list(sys.modules.items()) if name.startswith("mmqc.")]:
        for name in told.keys() & vars(module).keys():
            stack.enter_context(mock.patch.object(module, name, told[name]))
    zeros = lambda count, device: inductor.constant("counters", lambda: torch.zeros(count, dtype=torch.int32))  # noqa: E731
    stack.enter_context(mock.patch.object(launch, "counters", zeros))
    facts = DeviceProperties(type="cuda", index=0, **H100)
    stack.enter_context(mock.patch.object(DeviceProperties, "create", return_value=facts))
    stack.enter_context(mock.patch("torch.cuda.get_device_properties", return_value=SimpleNamespace(**H100, minor=0)))
    stack.enter_context(mock.patch("torch.cuda.current_device", return_value=0))
    stack.enter_context(mock.patch("torch.utils._triton.triton_hash_with_backend", return_value="no backend"))
    stack.enter_context(mock.patch.object(scheduler, "has_triton", return_value=True))
