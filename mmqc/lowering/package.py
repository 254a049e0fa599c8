"""Ahead-of-time compilation: from an exported program to the files of an AOTInductor package, and the package of several programs.

    compile_program(program)  ->  files          write_package(path, {name: files})          load_program(path, name)

A program that rounds activations must round where the model does: a sum in another order moves a value across a tie now and
then, and its code is another one.  Inductor's own reductions and activations add up in other orders than torch's kernels, so
in such a program (``as_eager``) those ops are calls of torch's kernels; what is computed entry by entry is still fused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.export import ExportedProgram

from mmqc.lowering import inductor
from mmqc.ops import kv_attention, kv_pack

# Sums over an axis, and functions that torch's kernels approximate by other polynomials than generated code.
ORDERED = (
    "mean", "sum", "silu", "gelu", "sigmoid", "tanh", "softplus", "exp", "sin", "cos", "rsqrt", "_softmax", "native_layer_norm",
    "native_group_norm", "_fused_rms_norm",
)  # fmt: skip
LOWER_BOUND = "aot_inductor.check_lowerbound"  # since torch 2.12
OWN = ("mmqc", "mmqc_front")  # namespaces whose implementations are Python
PLAIN: dict[Any, Callable[..., Any]] = {  # ops whose reference is compiled where they have no lowering
    torch.ops.mmqc.kv_pack.default: kv_pack.reference,
    torch.ops.mmqc.kv_attention.default: kv_attention.reference,
}


def python_ops(program: ExportedProgram) -> list[str]:
    """Ops of the program that are neither torch's own nor lowered to code, by name."""
    found = set()
    for node in program.graph.nodes:
        op: Any = node.target
        if isinstance(op, torch._ops.OpOverload) and op.namespace in OWN and op not in {*inductor.lowerings, *PLAIN}:
            found.add(str(op))
    return sorted(found)


def compile_program(program: ExportedProgram, *, as_eager: bool, metadata: Mapping[str, str]) -> list[Any]:
    """Compile for the device of the program's weights.

    Args:
        program: without ops that ``python_ops`` names.
        as_eager: take torch's kernels where generated code would add up in another order.
        metadata: stored with the compiled program.

    Returns:
        The files of the package.

    Raises:
        RuntimeError: an op of mmqc would be called as Python; names it.
    """
    args, kwargs = program.example_inputs or ((), {})
    options = {
        "aot_inductor.package": True,
        "aot_inductor.metadata": dict(metadata),
        "cpp.dynamic_threads": True,  # as many as the process has, not as many as this one
    }
    if LOWER_BOUND in inductor.config_keys():
        options[LOWER_BOUND] = False  # a trace takes two for the least size; what is less was compared with the model
    plain = {op: f for op, f in PLAIN.items() if op not in inductor.lowerings}
    if any(node.target in plain for node in program.graph.nodes):
        program = program.run_decompositions(plain)
    module: Any = program.module(check_guards=False)
    with torch.no_grad(), _ordered() if as_eager else _as_it_is():
        files = inductor.aot_files(module, args, kwargs, options)
    called = sorted({op for file in files if str(file).endswith(".json") for op in _external(Path(file))})
    if called:
        raise RuntimeError(f"these ops are Python on this device and cannot be part of a package: {', '.join(called)}")
    return files


def write_package(path: Path, programs: Mapping[str, Sequence[Any]]) -> None:
    """One archive with the compiled programs by name."""
    inductor.package_aoti(str(path), {name: list(files) for name, files in programs.items()})


def load_program(path: Path, name: str) -> Callable[..., Any]:
    """A program of a package; takes tensors by keyword."""
    return inductor.load_package(str(path), name)


@contextmanager
def _as_it_is() -> Iterator[None]:
    yield


@contextmanager
def _ordered() -> Iterator[None]:
    """Inductor without its own code for ``ORDERED``."""
    aten: Any = torch.ops.aten
    ops = [
        getattr(packet, overload)
        for packet in (getattr(aten, name) for name in ORDERED if hasattr(aten, name))
        for overload in packet.overloads()
        if "out" not in overload
    ]
    plain = {op: inductor.fallback_handler(op, add_to_fallback_set=False) for op in ops}
    with mock.patch.dict(inductor.lowerings, plain), mock.patch.dict(inductor.decompositions):
        for op in ops:
            inductor.decompositions.pop(op, None)
        yield


def _external(file: Path) -> Iterator[str]:
    """Ops of ours that the compiled program would call through the dispatcher."""
    content = json.loads(file.read_text(encoding="utf-8"))
    nodes = content.get("nodes", []) if isinstance(content, dict) else []
    for node in nodes:
        target = node.get("node", {}).get("target", "")
        if target.replace("torch.ops.", "").replace("::", ".").split(".")[0] in OWN:
            yield target
