"""The quarantine: every import of Inductor's private names, every version check, every use of its entry points.

    compile_graph(gm, inputs, patches, observe)  ->  callable          observe(graph, source) per compiled graph

Tested with torch 2.11 to 2.15.  The other files of this package import from here and from nowhere else in torch._inductor.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._inductor
import torch._inductor.lowering  # in front of cpp_template, which it imports
from sympy import Integer
from torch import fx
from torch._functorch import config as functorch_config
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from torch._inductor import config as inductor_config
from torch._inductor.codegen.cpp import get_export_declaration
from torch._inductor.codegen.cpp_template import CppTemplate
from torch._inductor.codegen.triton import TritonScheduling
from torch._inductor.codegen.wrapper import PythonWrapperCodegen, WrapperLine
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch._inductor.decomposition import decompositions, fast_random_decomps
from torch._inductor.ir import (
    ExternKernel,
    FixedLayout,
    InputsKernel,
    IRNode,
    MutationOutput,
    NoneLayout,
    Pointwise,
    Reduction,
    TensorBox,
    TMADescriptor,
    UserDefinedTritonKernel,
)
from torch._inductor.kernel.bmm import aten_bmm
from torch._inductor.lowering import (
    add_layout_constraint,
    constrain_to_fx_strides,
    fallback_handler,
    fallbacks,
    lowerings,
    register_lowering,
)
from torch._inductor.package import load_package, package_aoti
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.utils import parallel_num_threads
from torch._inductor.virtualized import V, ops
from torch.compiler import config as _compiler_config
from torch.fx.experimental import proxy_tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._sympy import functions as _sympy

from mmqc import kernels
from mmqc.lowering import early_compiler
from mmqc.lowering.cpp_arrays import declared_arrays
from mmqc.lowering.cpp_descriptors import described, descriptors_in_cpp
from mmqc.lowering.early_kernels import can_start_early, early_definitions, starting_early, starts_early
from mmqc.lowering.joined_cpp import joined_kernels
from mmqc.lowering.kernel_options import with_options
from mmqc.lowering.known_transforms import known_transforms
from mmqc.lowering.modular_indexing import mend
from mmqc.lowering.plain_strides import plain_strides
from mmqc.lowering.quick_launch import launching_quickly
from mmqc.lowering.small_constants import small_constants_in_memory
from mmqc.lowering.unbacked import layouts, renamed_again, slices_of_views, written_slices

__all__ = [
    "CppTemplate",
    "ExternKernel",
    "FixedLayout",
    "FloorDiv",
    "ModularIndexing",
    "Pointwise",
    "TensorBox",
    "aot_files",
    "as_int",
    "at_least",
    "at_most",
    "batched_matmul",
    "call_kernel",
    "compile_graph",
    "config_keys",
    "constant",
    "contiguous",
    "convert",
    "counters",
    "current_node",
    "decompositions",
    "depends",
    "empty",
    "fallback_handler",
    "fallbacks",
    "for_package",
    "forget_traces",
    "get_export_declaration",
    "has_kernel",
    "indented",
    "is_known_transform",
    "launch_kernel",
    "load_package",
    "lowerings",
    "mode_patches",
    "ops",
    "package_aoti",
    "parallel_num_threads",
    "pick_vec_isa",
    "register_decomposition",
    "register_lowering",
    "row_major",
    "row_sums",
    "size_hint",
    "static_int",
    "sums",
    "trusted_transforms",
]

SUPPORTED = ((2, 11), (2, 15))
ASSERTS_NO_MORE = (2, 14)

FloorDiv: Any = _sympy.FloorDiv
ModularIndexing: Any = _sympy.ModularIndexing

compiler_config: Any = _compiler_config  # a module that turns itself into an object with ``patch``
_version = tuple(int(part) for part in torch.__version__.split(".")[:2])
if not SUPPORTED[0] <= _version <= SUPPORTED[1]:
    low, high = (".".join(map(str, v)) for v in SUPPORTED)
    raise ImportError(f"mmqc lowers through Inductor's internals of torch {low} to {high}; this is {torch.__version__}")
if not __debug__ and _version < ASSERTS_NO_MORE:
    raise ImportError(
        f"torch {torch.__version__} generates wrong code under python -O (PYTHONOPTIMIZE), which leaves out assertions in which "
        "Inductor does its work: run Python without it, or use torch 2.14 or later; models that are not compiled run as they are"
    )

_known: ContextVar[frozenset[int]] = ContextVar("widths of trusted Hadamard transforms", default=frozenset())


def fingerprint() -> str:
    """Hash of the sources that decide what an mmqc op compiles to; part of Inductor's cache keys."""
    package = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for folder in ("ops", "lowering", "kernels"):
        for path in sorted((package / folder).rglob("*.*")):
            if path.suffix in (".py", ".jinja", ".json"):
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


_TAG = f"mmqc-{fingerprint()}"


mend()

# torch 2.11's C++ backend emits bounds checks of indirect indices that name a variable of another scope and do not compile.
_WORKAROUNDS: dict[str, Any] = {"assert_indirect_indexing": False} if _version < (2, 12) else {}

# Where the device waits for launches, what is independent shares one: a layer's rotated queries and the keys that go to the cache.
_ONE_LAUNCH: dict[str, Any] = {"combo_kernels": True}


def compile_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    patches: Mapping[str, Any],
    observe: Callable[[fx.GraphModule, str], None] | None,
) -> Callable[..., Any]:
    """Inductor's ``compile_fx`` under ``patches`` of its config; in CUDA graphs kernels start early (early_kernels.py).

    ``observe`` sees every graph that reaches code generation, forward or backward, with the generated wrapper's source;
    AOTAutograd's cache would skip it, so that cache is off while somebody observes.
    """
    if not any(isinstance(x, torch.Tensor) and x.is_cuda for x in example_inputs):
        early_compiler.wait()
    known = depends(gm, example_inputs)
    early = bool(patches.get("triton.cudagraphs")) and any(map(can_start_early, example_inputs))
    own = "-".join((_TAG, *map(str, sorted(known)), *(("early",) if early else ())))

    def tagged() -> Any:
        tag = compiler_config.cache_key_tag
        return compiler_config.patch(cache_key_tag=tag if tag.endswith(own) else tag + own)

    def inner_compile(graph: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        with tagged():
            code = compile_fx_inner(graph, inputs, **kwargs)
        if observe is not None:
            observe(graph, getattr(code, "source_code", None) or "")
        return code

    cached = functorch_config.enable_autograd_cache and observe is None
    patches = {**_WORKAROUNDS, **layouts(gm), **(_ONE_LAUNCH if early else {}), **patches}
    compile_: Any = compile_fx  # returns a callable for a GraphModule
    with (
        joined_kernels(),
        plain_strides(),
        slices_of_views(),
        written_slices(),
        descriptors_in_cpp(),
        declared_arrays(),
        renamed_again(),
        tagged(),
        trusted_transforms(known),
        starting_early(TritonScheduling, early),
        launching_quickly(PythonWrapperCodegen),
        functorch_config.patch(enable_autograd_cache=cached),
    ):
        return compile_(gm, list(example_inputs), inner_compile=inner_compile, config_patches=dict(patches))


def cache_directory() -> str:
    """Where Inductor keeps what it compiled, for later processes."""
    return cache_dir()


def depends(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> frozenset[int]:
    """What else the compilation of a graph goes by: the widths whose transforms are known, by their factors' values."""
    on_cuda = any(isinstance(x, torch.Tensor) and x.is_cuda for x in example_inputs) and kernels.install()
    return known_transforms(gm, example_inputs) if on_cuda else frozenset()


def aot_files(module: Any, args: Any, kwargs: Any, options: Mapping[str, Any], *, early: bool) -> list[Any]:
    """Ahead-of-time compilation of an exported program's module: the files of a package; ``early`` as in CUDA graphs above."""
    known = known_transforms(module, ())  # its factors are buffers
    tag = compiler_config.cache_key_tag
    tagged = compiler_config.patch(cache_key_tag=tag + _TAG)
    early = early and any(map(can_start_early, (*args, *kwargs.values())))
    options = {**_WORKAROUNDS, **(_ONE_LAUNCH if early else {}), **options}
    starts, constants = starting_early(TritonScheduling, early), small_constants_in_memory()
    with decompositions_changed(), tagged, trusted_transforms(known), descriptors_in_cpp(), declared_arrays(), starts, constants:
        return torch._inductor.aot_compile(module, args, kwargs, options=options)  # type: ignore[return-value]


def forget_traces() -> None:
    """Let go of the model.

    Torch keeps the last exported trace, with the weights that it read, for messages of errors; and the last nodes that it found
    tiles for on a GPU, each of which has its graph with the weights and copies of the buffers.
    """
    getattr(proxy_tensor, "_FAKE_TENSOR_ID_TO_PROXY_MAP_FOR_EXPORT", {}).clear()
    getattr(getattr(TritonScheduling, "candidate_tilings", None), "cache_clear", lambda: None)()
    gc.collect()


@contextmanager
def decompositions_changed() -> Iterator[None]:
    """What was changed in ``decompositions`` counts in the block, and no longer behind it: Inductor keeps a copy."""
    fast_random_decomps.cache_clear()
    try:
        yield
    finally:
        fast_random_decomps.cache_clear()


def register_decomposition(op: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Trace ``op`` as what the function does with it; where that returns NotImplemented, as itself."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        decompositions[op] = function
        fast_random_decomps.cache_clear()  # a copy of ``decompositions``
        return function

    return register


def convert(x: TensorBox, dtype: torch.dtype) -> TensorBox:
    """X in ``dtype``, without the copy that Inductor makes of a tensor that has it already."""
    return x if x.get_dtype() == dtype else lowerings[torch.ops.prims.convert_element_type.default](x, dtype)


def as_int(size: Any) -> Any:
    """A static size as an int, a symbolic one as it is."""
    return int(size) if isinstance(size, int | Integer) else size


def size_hint(size: Any, fallback: int) -> int:
    """What a symbolic size was when the graph was traced."""
    sizevars: Any = V.graph.sizevars
    hint = getattr(sizevars, "optimization_hint", None) or sizevars.size_hint  # the name before torch 2.12
    return int(hint(size, fallback=fallback))


def at_most(size: Any, bound: int) -> bool:
    """Whether size <= bound is known at compile time."""
    return V.graph.sizevars.statically_known_leq(size, bound)


def static_int(size: Any) -> int:
    """A channel count as an int; a graph compiled with symbolic weights is specialised to it."""
    sizevars: Any = V.graph.sizevars
    guard = getattr(sizevars, "guard_int", None) or sizevars.evaluate_static_shape  # the name before torch 2.13
    return guard(size)


def at_least(size: Any, bound: int) -> bool:
    """Whether size >= bound is known at compile time."""
    return V.graph.sizevars.statically_known_geq(size, bound)


def row_major(x: TensorBox) -> TensorBox:
    """A matrix whose row stride is its width even if it has one row: Inductor's views then say stride 0."""
    if at_least(x.get_size()[0], 2):
        return x
    x = lowerings[torch.ops.aten.clone.default](x)
    x.realize()
    return x


def row_sums(like: TensorBox, dtype: torch.dtype, inner: Callable[..., Any], n: int, reduced: Sequence[int]) -> TensorBox:
    """[n], the sum of ``inner([n], reduced indices)`` over the reduced axes, as a buffer on the device of ``like``."""
    return sums(like, dtype, inner, [n], reduced)


def sums(
    like: TensorBox, dtype: torch.dtype, inner: Callable[..., Any], ranges: Sequence[Any], reduced: Sequence[int]
) -> TensorBox:
    """The same with several axes that stay."""
    total = Reduction.create(
        device=like.get_device_or_error(),
        dst_dtype=dtype,
        src_dtype=dtype,
        inner_fn=inner,
        ranges=[Integer(size) if isinstance(size, int) else size for size in ranges],
        reduction_ranges=[Integer(size) for size in reduced],
        reduction_type="sum",
    )
    total.realize()
    return total


def batched_matmul(a: TensorBox, b: TensorBox) -> TensorBox:
    """``bmm`` as an extern kernel: Inductor's own lowering of it wants to be called for an aten node."""
    a, b = ExternKernel.realize_input(a), ExternKernel.realize_input(b)
    size = [*a.get_size()[:2], b.get_size()[2]]
    node: Any = aten_bmm.bind((a, b), FixedLayout(a.get_device_or_error(), a.get_dtype(), size)).output_node()
    return node


def has_kernel(x: TensorBox) -> bool:
    """Whether there are kernels for x's device: on CUDA."""
    return x.get_device_or_error().type == "cuda" and kernels.install()


class _KnownLaunch(UserDefinedTritonKernel):
    """A Triton kernel that says what it writes: Inductor's own class compiles the kernel once a launch to find that out."""

    def __init__(self, launch: Any, grid: tuple[Any, ...], args: Mapping[str, Any], runs: Any) -> None:
        self.runs, self.early = runs, launch.early
        kernel, descriptors = with_options(launch.kernel, launch.num_warps, launch.num_stages), launch.descriptors
        inputs, kwargs = [], {}
        for name, value in args.items():
            if isinstance(value, IRNode):
                value = InputsKernel.unwrap_storage_for_input(self.realize_input(value))
                if name in descriptors:
                    value = TMADescriptor.create(described(value), ("stable", (descriptors[name],)))
                inputs.append(value)
            kwargs[name] = value
        constants = tuple(v for v in kwargs.values() if not isinstance(v, IRNode))
        device: Any = inputs[0].get_device()
        ExternKernel.__init__(self, None, NoneLayout(device=device), inputs, constants, kwargs)
        self.device, self.grid = device, [grid]
        self.kernel_idx = kernel_side_table.add_kernel(kernel)
        self.ordered_kwargs_for_cpp_kernel = [name for name in kernel.fn.arg_names if name in args]
        self.mutable_args = list({id(args[name]): args[name] for name in launch.outputs}.values())
        self.mutation_outputs = [MutationOutput(NoneLayout(device=device), box, self) for box in self.mutable_args]
        V.graph.register_operation(self)

    def can_fuse_epilogue(self) -> bool:
        return False

    def codegen(self, wrapper: Any) -> None:
        """The launch; in Python, which takes as long for an empty grid as for another, only where it runs."""
        early = early_definitions(wrapper) if self.early and starts_early() else nullcontext()
        with indented(wrapper, None if V.graph.cpp_wrapper else self.runs), early:
            super().codegen(wrapper)


@contextmanager
def indented(wrapper: Any, runs: Any) -> Iterator[None]:
    """What is written to a wrapper in Python meanwhile, under the condition that ``runs`` is not 0; None: always."""
    if runs is not None:
        wrapper.writeline(_Indent(f"if {wrapper.codegen_python_sizevar(runs)}:", 1))
    yield
    if runs is not None:
        wrapper.writeline(_Indent("", -1))


@dataclass
class _Indent(WrapperLine):
    """A line of the generated wrapper, if any, and a change of indentation behind it."""

    line: str
    by: int

    def codegen(self, code: Any) -> None:
        """Write it."""
        if self.line:
            code.writeline(self.line)
        code.do_indent(self.by)


def launch_kernel(launch: Any, grid: tuple[Any, ...], args: Mapping[str, Any], runs: Any = None) -> None:
    """A launch (kernels/launch.py) in the generated code, with this grid and these args in place of its own.

    It runs where ``runs`` is not 0; where it is 0, the grid is empty.
    """
    _KnownLaunch(launch, grid, {**args, **launch.constants}, runs)


def current_node() -> fx.Node:
    """The node that is being lowered."""
    node: Any = V.graph.current_node
    return node


@contextmanager
def trusted_transforms(widths: frozenset[int]) -> Iterator[None]:
    """While a graph is lowered whose Hadamard matrices of these widths are all ours (known_transforms.py)."""
    token = _known.set(widths)
    try:
        yield
    finally:
        _known.reset(token)


def is_known_transform(width: int) -> bool:
    """Whether every Hadamard matrix of this width in the graph is ours (``hadamard_factors``)."""
    return width in _known.get()


def contiguous(x: TensorBox) -> TensorBox:
    """X as a buffer in row-major order; a copy if need be."""
    return ExternKernel.require_contiguous(x)


def empty(size: Sequence[Any], dtype: torch.dtype, device: torch.device) -> TensorBox:
    """Memory that a kernel fills."""
    return lowerings[torch.ops.aten.empty_strided.default](list(size), None, dtype=dtype, device=device)


def constant(name: str, make: Callable[[], torch.Tensor]) -> TensorBox:
    """A tensor that belongs to the compiled graph, one of a name."""
    known = V.graph.__dict__.setdefault("_mmqc_constants", {})
    if name not in known:
        with _disable_current_modes():
            known[name] = V.graph.add_tensor_constant(make(), name)
    return known[name]


def counters(count: int, device: torch.device) -> TensorBox:
    """Zeros for launches that leave zeros: kept between calls, or, in a package that may run twice at once, made by each."""
    if not V.graph.aot_mode:
        return constant(f"mmqc_counters_{count}", lambda: torch.zeros(count, dtype=torch.int32, device=device))
    known = V.graph.__dict__.setdefault("_mmqc_counters", {})
    if count not in known:
        known[count] = lowerings[torch.ops.aten.full.default]([count], 0, dtype=torch.int32, device=device)
        known[count].realize()
    return known[count]


def for_package() -> bool:
    """Whether the code has to run without Python, where an op of ours is unknown."""
    return bool(V.graph.aot_mode)


def call_kernel(op: Any, *args: Any) -> TensorBox:
    """The op as an extern call in the generated code."""
    return fallback_handler(op, add_to_fallback_set=False)(*args)


def as_traced(op: Any) -> None:
    """Operands of this op lie in memory in the order of axes that they were traced in."""
    add_layout_constraint(op, constrain_to_fx_strides)


def mode_patches(mode: str) -> dict[str, Any]:
    """What ``torch.compile(mode=...)`` means to Inductor."""
    modes = torch._inductor.list_mode_options()
    if mode not in modes:
        raise ValueError(f"mode = {mode!r} is unknown; allowed: {sorted(modes)}")
    return dict(modes[mode])


def config_keys() -> set[str]:
    """Every option of Inductor's config, dotted."""
    return set(inductor_config.get_config_copy())
