"""Ahead-of-time compilation: from an exported program to the files of an AOTInductor package, and the package of several programs.

    compile_program(program)  ->  files          write_package(path, {name: files})          load_program(path, name)

On a CPU a program that rounds activations must round where the model does (``as_eager``, torch_kernels.py); on CUDA matmuls add up
in another order in any case.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from mmqc.graph.environment import environment
from mmqc.lowering import inductor
from mmqc.lowering.scaled_matmul import why_no_kernel
from mmqc.lowering.torch_kernels import torch_kernels
from mmqc.ops import kv_attention, kv_pack

LOWER_BOUND = "aot_inductor.check_lowerbound"  # since torch 2.12
LIBRARIES = "aot_inductor.custom_op_libs"
TORCH = ("aten", "prims", "prim", "quantized", "mkldnn", "onednn", "inductor")  # whose ops a process with torch alone has
SCALED = ("mmqc.scaled_matmul.default", "mmqc.scaled_matmuls.default")  # of one linear, and of several that read one tensor


def grouped_mm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """What transformers' op of experts computes, without reading where their rows end: every expert multiplies all rows.

    Shapes: x [S, K], sorted by expert, weight [E, K, N], ends int [E], running sums of rows -> [S, N].
    """
    expert = torch.searchsorted(ends, torch.arange(x.shape[0], device=x.device, dtype=ends.dtype), right=True)
    y = x.new_zeros(x.shape[0], weight.shape[2])
    for i in range(weight.shape[0]):
        y = torch.where((expert == i)[:, None], x @ weight[i], y)
    return y


PLAIN: dict[str, Callable[..., Any]] = {  # in torch's own ops, to be compiled where there is no lowering
    "mmqc::kv_pack": kv_pack.reference,
    "mmqc::kv_attention": kv_attention.reference,
    "transformers::grouped_mm_fallback": grouped_mm,
}


def python_ops(program: ExportedProgram) -> list[str]:
    """Ops of the program that are neither torch's own nor turned into such, nor lowered to code, by name."""
    return sorted({str(op) for op in _foreign(program) if op.name() not in PLAIN})


def _foreign(program: ExportedProgram) -> set[Any]:
    """Ops that torch does not have, and that have neither a lowering nor a decomposition in Inductor (torchao's have one)."""
    ops = {n.target for n in program.graph.nodes if isinstance(n.target, torch._ops.OpOverload)}
    code = {op for op in inductor.lowerings if op not in inductor.fallbacks} | set(inductor.decompositions)
    return {op for op in ops if op.namespace not in TORCH and op not in code}


def in_float64(program: ExportedProgram) -> int:
    """Linears with scales of groups that no kernel takes, and that a package for a GPU therefore multiplies in float64."""
    ops = [n for n in program.graph.nodes if str(n.target) in SCALED and n.args[9:10] and n.args[9]]
    return sum(len(n.args[1]) if isinstance(n.args[1], Sequence) else 1 for n in ops if why_no_kernel(n) is not None)


def compile_program(
    program: ExportedProgram, *, as_eager: bool, metadata: Mapping[str, str], weights_apart: bool = False, step: bool = False
) -> list[Any]:
    """Compile for the device of the program's weights.

    Args:
        program: without ops that ``python_ops`` names.
        as_eager: take torch's kernels where generated code would add up in another order.
        metadata: stored with the compiled program.
        weights_apart: leave the program's weights out; ``load_program`` is given them.
        step: a step of decoding, whose kernels are so short that a GPU waits for launches.

    Returns:
        The files of the package.

    Raises:
        RuntimeError: an op that torch does not have would be called; names it.
    """
    inductor.forget_traces()  # of the program before: on a GPU it has a copy of quantized weights
    args, kwargs = program.example_inputs or ((), {})
    options = {
        "aot_inductor.package": True,
        "aot_inductor.metadata": dict(metadata),
        "aot_inductor.package_constants_in_so": not weights_apart,
        "cpp.dynamic_threads": True,  # as many as the process has, not as many as this one
    }
    if LOWER_BOUND in inductor.config_keys():
        options[LOWER_BOUND] = False  # a trace takes two for the least size; what is less was compared with the model
    plain = {op: PLAIN[op.name()] for op in _foreign(program) if op.name() in PLAIN}
    if plain:
        program = program.run_decompositions(plain)
    module: Any = program.module(check_guards=False)
    with torch.no_grad(), torch_kernels() if as_eager else nullcontext(), one_cpp_library() as linked:
        files = inductor.aot_files(module, args, kwargs, {**options, **linked}, early=step)
    called = sorted({op for file in files if str(file).endswith(".json") for op in _external(Path(file))})
    if called:
        raise RuntimeError(f"these ops are Python on this device and cannot be part of a package: {', '.join(called)}")
    return files


def write_package(path: Path, programs: Mapping[str, Sequence[Any]]) -> None:
    """One archive with the compiled programs by name."""
    inductor.package_aoti(str(path), {name: list(files) for name, files in programs.items()})


def load_program(
    path: Path, name: str, weights: Callable[[list[str]], Mapping[str, Tensor]] | None = None, *, single_threaded: bool = False
) -> Callable[..., Any]:
    """A program of a package; takes tensors by keyword.

    Args:
        path: the package.
        name: of "model", "vision", "prefill", "decode".
        weights: gives the tensors of these names to a program that has none; they stay where they are.
        single_threaded: called by one thread alone, without the events that keep a CUDA graph from being captured.
    """
    program = inductor.load_package(str(path), name, run_single_threaded=single_threaded)
    if weights is None:
        return program
    own = dict(weights(program.get_constant_fqns()))
    program.load_constants(own, check_full_update=True, user_managed=True)
    program.weights = own  # type: ignore[attr-defined]  # for its caller to keep, says torch; 2.13 and before keep them too
    return program


def names_of_weights(path: Path, name: str) -> list[str]:
    """What a program calls the tensors that it needs."""
    return inductor.load_package(str(path), name).get_constant_fqns()


@contextmanager
def one_cpp_library() -> Iterator[dict[str, Any]]:
    """Inductor's options that link a package with the C++ library of this process, which is torch's, and with no other.

    Some compilers link theirs statically, by an option or because they bring no other.  A second copy in torch's process is
    what std::bad_cast or a segmentation fault in the loader comes from.  Named as a file, in a folder with nothing else in it,
    the library is taken whatever the compiler has by that name.
    """
    library = next((path for path in _loaded_libraries() if path.name.startswith("libstdc++.so")), None)
    if library is None:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="mmqc_") as folder:
        (Path(folder) / library.name).symlink_to(library)
        paths = os.pathsep.join(filter(None, (folder, os.environ.get("LIBRARY_PATH"))))
        with environment({"LIBRARY_PATH": paths}):
            yield {LIBRARIES: [f":{library.name}"]}


def _loaded_libraries() -> Iterator[Path]:
    """Shared libraries of this process, on Linux."""
    maps = Path("/proc/self/maps")
    for line in maps.read_text(encoding="utf-8").splitlines() if maps.exists() else ():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith("/"):
            yield Path(fields[5])


def _external(file: Path) -> Iterator[str]:
    """Ops that torch does not have and the compiled program would call through the dispatcher."""
    content = json.loads(file.read_text(encoding="utf-8"))
    nodes = content.get("nodes", []) if isinstance(content, dict) else []
    for node in nodes:
        target = node.get("node", {}).get("target", "")
        if target and target.replace("torch.ops.", "").replace("::", ".").split(".")[0] not in TORCH:
            yield target
