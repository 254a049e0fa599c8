"""The quarantine: every import of Inductor's private names, every version check, every use of its entry points.

    compile_graph(gm, inputs, patches, observe)  ->  callable          observe(graph, source) per compiled graph
    kernel_names(source)                         ->  names in call order

Tested with torch 2.11 to 2.13.  The other files of this package import from here and from nowhere else in torch._inductor.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._inductor
from sympy import Integer
from torch import fx
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.decomposition import decompositions, fast_random_decomps
from torch._inductor.ir import ExternKernel, FixedLayout, Pointwise, Reduction, TensorBox
from torch._inductor.kernel.bmm import aten_bmm
from torch._inductor.lowering import fallback_handler, lowerings, register_lowering
from torch._inductor.package import load_package, package_aoti
from torch._inductor.virtualized import V, ops
from torch.compiler import config as _compiler_config
from torch.utils._sympy import functions as _sympy

from mmqc import kernels

__all__ = [
    "FloorDiv", "ModularIndexing", "Pointwise", "TensorBox", "aot_files", "at_least", "batched_matmul",
    "call_kernel", "compile_graph", "config_keys", "convert", "decompositions", "fallback_handler",
    "has_kernel", "kernel_names", "load_package", "lowerings", "mode_patches", "ops", "package_aoti",
    "register_lowering", "row_major", "row_sums", "static_int",
]  # fmt: skip

SUPPORTED = ((2, 11), (2, 13))

FloorDiv: Any = _sympy.FloorDiv
ModularIndexing: Any = _sympy.ModularIndexing

compiler_config: Any = _compiler_config  # a module that turns itself into an object with ``patch``
_version = tuple(int(part) for part in torch.__version__.split(".")[:2])
if not SUPPORTED[0] <= _version <= SUPPORTED[1]:
    low, high = (".".join(map(str, v)) for v in SUPPORTED)
    raise ImportError(
        f"mmqc lowers through Inductor's internals of torch {low} to {high}; this is torch {torch.__version__}"
    )

_CALL = re.compile(
    r"^[ \t]+(?:\w+ = )?(?:(?P<extern>extern_kernels\.\w+|torch\.ops\.\w+\.\w+)|(?P<fused>(?:cpp|triton)_\w+))(?:\.\w+)?\(",
    re.MULTILINE,
)


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


# torch 2.11's C++ backend emits bounds checks of indirect indices that name a variable of another scope and do not compile.
_WORKAROUNDS: dict[str, Any] = {"assert_indirect_indexing": False} if _version < (2, 12) else {}


def compile_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    patches: Mapping[str, Any],
    observe: Callable[[fx.GraphModule, str], None] | None,
) -> Callable[..., Any]:
    """Inductor's ``compile_fx`` under ``patches`` of its config.

    ``observe`` sees every graph that reaches code generation, forward or backward, with the generated wrapper's source;
    AOTAutograd's cache would skip it, so that cache is off while somebody observes.
    """

    def tagged() -> Any:
        tag = compiler_config.cache_key_tag
        return compiler_config.patch(cache_key_tag=tag if tag.endswith(_TAG) else tag + _TAG)

    def inner_compile(graph: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        with tagged():
            code = compile_fx_inner(graph, inputs, **kwargs)
        if observe is not None:
            observe(graph, getattr(code, "source_code", None) or "")
        return code

    for device in {x.device for x in example_inputs if isinstance(x, torch.Tensor) and x.is_cuda}:
        if kernels.install():  # here, and not in a lowering: a cached graph is not lowered again
            kernels.prepare(device, _transforms(gm))
    cached = functorch_config.enable_autograd_cache and observe is None
    patches = {**_WORKAROUNDS, **patches}
    compile_: Any = compile_fx  # returns a callable for a GraphModule
    with tagged(), functorch_config.patch(enable_autograd_cache=cached):
        return compile_(gm, list(example_inputs), inner_compile=inner_compile, config_patches=dict(patches))


def aot_files(module: Any, args: Any, kwargs: Any, options: Mapping[str, Any]) -> list[Any]:
    """Ahead-of-time compilation of an exported program's module: the files of a package."""
    fast_random_decomps.cache_clear()  # a copy of ``decompositions``, which a caller may have changed
    try:
        tag = compiler_config.cache_key_tag
        with compiler_config.patch(cache_key_tag=tag + _TAG):
            return torch._inductor.aot_compile(module, args, kwargs, options={**_WORKAROUNDS, **options})  # type: ignore[return-value]
    finally:
        fast_random_decomps.cache_clear()


def _transforms(gm: fx.GraphModule) -> set[tuple[int, torch.dtype]]:
    """(Width, dtype) of every Hadamard transform."""
    ops = (torch.ops.mmqc.hadamard, torch.ops.mmqc.hadamard_quantize)
    nodes = (n for n in gm.graph.nodes if n.target in (*ops, *(op.default for op in ops)))
    values = (n.args[0].meta.get("example_value") for n in nodes)
    return {(int(x.shape[-1]), x.dtype) for x in values if x is not None}


def convert(x: TensorBox, dtype: torch.dtype) -> TensorBox:
    """X in ``dtype``, without the copy that Inductor makes of a tensor that has it already."""
    return x if x.get_dtype() == dtype else lowerings[torch.ops.prims.convert_element_type.default](x, dtype)


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


def row_sums(
    like: TensorBox, dtype: torch.dtype, inner: Callable[..., Any], n: int, reduced: Sequence[int]
) -> TensorBox:
    """[n], the sum of ``inner([n], reduced indices)`` over the reduced axes, as a buffer on the device of ``like``."""
    total = Reduction.create(
        device=like.get_device_or_error(), dst_dtype=dtype, src_dtype=dtype, inner_fn=inner, ranges=[Integer(n)],
        reduction_ranges=[Integer(size) for size in reduced], reduction_type="sum",
    )  # fmt: skip
    total.realize()
    return total


def batched_matmul(a: TensorBox, b: TensorBox) -> TensorBox:
    """``bmm`` as an extern kernel: Inductor's own lowering of it wants to be called for an aten node."""
    a, b = ExternKernel.realize_input(a), ExternKernel.realize_input(b)
    size = [*a.get_size()[:2], b.get_size()[2]]
    node: Any = aten_bmm.bind((a, b), FixedLayout(a.get_device_or_error(), a.get_dtype(), size)).output_node()
    return node


def has_kernel(x: TensorBox) -> bool:
    """Whether the op's implementation for x's device is a kernel to call: on CUDA, unless the package has to run without Python."""
    return x.get_device_or_error().type == "cuda" and not V.graph.aot_mode and kernels.install()


def call_kernel(op: Any, *args: Any) -> TensorBox:
    """The op as an extern call in the generated code."""
    return fallback_handler(op, add_to_fallback_set=False)(*args)


def kernel_names(source: str) -> list[str]:
    """Names of the kernels that a generated wrapper calls, in order: "cpp_fused_…", "triton_…", "extern _int_mm"."""
    found = []
    for match in _CALL.finditer(source):
        extern = match["extern"]
        found.append(
            f"extern {extern.removeprefix('extern_kernels.').removeprefix('torch.ops.')}" if extern else match["fused"]
        )
    return found


def mode_patches(mode: str) -> dict[str, Any]:
    """What ``torch.compile(mode=...)`` means to Inductor."""
    modes = torch._inductor.list_mode_options()
    if mode not in modes:
        raise ValueError(f"mode = {mode!r} is unknown; allowed: {sorted(modes)}")
    return dict(modes[mode])


def config_keys() -> set[str]:
    """Every option of Inductor's config, dotted."""
    return set(inductor_config.get_config_copy())
