"""One exported program for a model's whole forward, in which text length, number of images and their grids are dynamic.

    find what reads values ─► find index functions for it ─► torch.export with them in place ─► compare with eager

What runs in front of a compiled region (``front``) is part of an exported one: a package has no front.  So the functions that
read values out of integer inputs are replaced by the rows of ``index_ops`` that were verified to equal them.  Lists of lengths by
which a tensor is split and put together again have no known number of entries: the tensor is then left in one piece.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import Dim, ExportedProgram
from torch.overrides import TorchFunctionMode

from mmqc.aot import sensitivity
from mmqc.aot.fused import fused
from mmqc.aot.index_find import ExportError, Reading, find_lengths, find_readings
from mmqc.front.find import Finder, Packed, Plan, floats
from mmqc.front.front import bound, detach, kind_of
from mmqc.front.handover import RUNNING, Installed, ValueSite, numbers
from mmqc.front.provenance import is_made
from mmqc.graph.environment import environment
from mmqc.graph.tracing import CHECKS_TRACE, NO_CHECKS
from mmqc.kernels.attention import variable_length
from mmqc.versions import ENCODERS

EXACT = {torch.float64: 1e-10, torch.float32: 1e-5}
FIXED = (None, Dim.STATIC)  # in dynamic shapes
logger = logging.getLogger(__name__)

Inputs = dict[str, Any]


def export_program(
    model: nn.Module,
    example_inputs: Mapping[str, Any],
    *,
    more: Sequence[Mapping[str, Any]] = (),
    spare: Sequence[Mapping[str, Any]] = (),
    dynamic_shapes: Mapping[str, Any] | None = None,
) -> ExportedProgram:
    """Export a model's forward with dynamic sizes, verified against eager mode.

    The program takes the tensors of ``example_inputs`` by keyword; everything else in it is fixed.  It returns the tensors of the
    model's output, by name where the output has names (``logits``); a cache is left out.  It holds torch's own ops, and those
    of quantized linears: attention within images is a kernel on a GPU, elsewhere a mask of P x P for P patches.

    Args:
        model: in eval mode; it is as it was afterwards.
        example_inputs: keyword arguments of one forward.
        more: further batches of the same inputs.  Whatever is found is verified on each of them, so they should differ in
            whatever may differ later; a text of another length, other numbers of images, grids that are not square.
        spare: batches with sizes that a trace excludes: admitted if the program is right on all of them, and else left out.
        dynamic_shapes: as of ``torch.export.export``, by input.  By default every axis that differs between the given
            batches is dynamic, and every other is fixed.

    Returns:
        A program for the sizes that its ``range_constraints`` and guards admit.  A trace excludes one, for one visual token in
        all, say, unless one of the given batches has it.

    Raises:
        ExportError: a function that reads values is followed by no index function, the trace needs a value, no given batch has
            at least two in every dynamic axis, or the program's output differs from that of the model.
    """
    batches = [bound(model, (), batch) for batch in (example_inputs, *more)]
    tensors, constants = _parted(batches)
    shapes = derived_shapes(tensors) if dynamic_shapes is None else dict(dynamic_shapes)
    traced = _traced(tensors, shapes)
    with torch.no_grad(), _kept(model):
        plan, sites = _found(model, [{**b, **constants} for b in (traced, *tensors)])
        whole = _Trace(model, plan, sites, constants).export(traced, shapes)
        program = fused(whole).run_decompositions(_decompositions(whole))
        check = _Check(model, constants, rounds(program), tensors)
        # On a GPU attention within segments has a kernel of its own already, and a code may round away.
        check.verify(whole, tensors, strictly=check.on_cpu)
        check.verify(program, tensors)
        if spare:
            check.admit(program, [bound(model, (), batch) for batch in spare])
    return program


def derived_shapes(batches: Sequence[Mapping[str, Tensor]]) -> dict[str, Any]:
    """By input, the axes that differ between the batches."""
    return {
        name: {i: Dim.DYNAMIC for i in range(tensor.dim()) if len({b[name].shape[i] for b in batches}) > 1}
        for name, tensor in batches[0].items()
    }


# --- what is needed ---------------------------------------------------------------------------------------------------


def _parted(batches: list[Inputs]) -> tuple[list[dict[str, Tensor]], Inputs]:
    """The tensors of each batch; the rest, which all batches must share."""
    tensors = [{k: v for k, v in b.items() if isinstance(v, Tensor)} for b in batches]
    rests = [{k: v for k, v in b.items() if not isinstance(v, Tensor)} for b in batches]
    for part, rest in zip(tensors, rests, strict=True):
        if kind_of(part) != kind_of(tensors[0]) or rest != rests[0]:
            raise ExportError([f"the batches differ in more than sizes: {kind_of(tensors[0])} and {kind_of(part)}"])
    return tensors, rests[0]


def _traced(batches: list[dict[str, Tensor]], shapes: Mapping[str, Any]) -> dict[str, Tensor]:
    """A batch with no dynamic axis of size one: torch.export takes such a size for fixed."""
    axes = [(name, axis) for name, dims in shapes.items() for axis, dim in _by_axis(dims) if dim not in FIXED]
    for batch in batches:
        if all(batch[name].shape[axis] > 1 for name, axis in axes):
            return batch
    raise ExportError([f"no batch has at least two in each of {axes}: torch.export takes a size of one for fixed"])


def _by_axis(dims: Any) -> list[tuple[int, Any]]:
    """What an entry of dynamic shapes says of each axis."""
    return list(dims.items() if isinstance(dims, Mapping) else enumerate(dims or ()))


def _found(model: nn.Module, batches: list[Inputs]) -> tuple[Plan, list[IndexSite]]:
    """What reads values, and an index function for each; the first batch decides what is found."""
    plan = _plan(model, batches[0])
    sites, reasons = [], []
    lengths = find_lengths(batches)
    for site in (s for s in plan.sites if isinstance(s, ValueSite)):
        try:
            with Packed(plan.configs):
                sites.append(IndexSite(**vars(site), readings=find_readings(site, batches, lengths)))
        except ExportError as error:
            if any(map(is_made, site.calls)):  # the trace has it as it is, of what index functions give
                logger.info("left in the trace: %s", error)
            else:
                reasons += error.reasons
    if reasons:
        raise ExportError(reasons)
    return plan, sites


def _plan(model: nn.Module, inputs: Inputs) -> Plan:
    """What reads values, found within a call: the model's own hooks may prepare what its modules need."""
    plans: list[Plan] = []
    number = next(numbers)

    def find(module: nn.Module, args: tuple[Any, ...], kwargs: Inputs) -> None:
        del args
        plans.append(Finder(number, module, kwargs).find())

    handle = model.register_forward_pre_hook(find, with_kwargs=True)
    try:
        model(**inputs)
    finally:
        handle.remove()
        RUNNING.table.pop(number, None)
    return plans[0]


@dataclass
class IndexSite(ValueSite):
    """A function that index functions stand for, one for each of its calls."""

    readings: list[Reading] = field(default_factory=list)
    inputs: Inputs = field(default_factory=dict)
    taken: int = 0

    def begin(self, inputs: Inputs) -> None:
        """A forward begins."""
        self.inputs, self.taken = inputs, 0

    def reader(self, number: int, index: int) -> Any:
        """What stands in the function's place."""
        del number, index

        def read(*args: Any, **kwargs: Any) -> Any:
            del args, kwargs
            if self.taken >= len(self.readings):
                raise ExportError([f"{self.name} is called more often than before"])
            reading = self.readings[self.taken]
            self.taken += 1
            return reading.compute(self.inputs)

        return read


# --- the trace --------------------------------------------------------------------------------------------------------


class _Trace:
    """One export: stand-ins, packed attention and a forward that takes tensors by keyword are in place meanwhile."""

    def __init__(self, model: nn.Module, plan: Plan, sites: list[IndexSite], constants: Inputs) -> None:
        self.model, self.plan, self.sites, self.constants = model, plan, sites, constants
        self.plain = model.forward

    def export(self, inputs: dict[str, Tensor], shapes: dict[str, Any]) -> ExportedProgram:
        """Trace without Dynamo: what runs is the model's own Python, on tensors without values."""
        forward: Any = self.forward_of(list(inputs))
        checks = environment({} if CHECKS_TRACE else NO_CHECKS)
        try:
            with Packed(self.plan.configs), mock.patch.object(self.model, "forward", forward), checks:
                return torch.export.export(self.model, (), inputs, dynamic_shapes=shapes, strict=False)
        except Exception as error:
            lines = [line for line in str(error).splitlines() if line.strip()]
            raise ExportError([f"torch.export: {type(error).__name__}: {' '.join(lines[:2])}", *self.plan.notes]) from error

    def forward_of(self, names: list[str]) -> Callable[..., Any]:
        """A forward with these keywords, whose output is tensors in plain containers."""

        def forward(**inputs: Tensor) -> Any:
            for site in self.sites:
                site.begin(inputs)
            installed = Installed(-1, list(self.sites))
            with _kept(self.model), mock.patch.object(FakeTensor, "tolist", _tolist), _Unsplit():
                installed.put()
                try:
                    return plain_output(self.plain(**inputs, **self.constants))
                finally:
                    installed.remove()

        keywords = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
        setattr(forward, "__signature__", inspect.Signature(keywords))  # noqa: B010  (what torch.export names inputs by)
        return forward


class _Lengths(list):  # type: ignore[type-arg]
    """The values of a tensor whose size is dynamic, as a list of which nothing is known."""

    def __iter__(self) -> Iterator[Any]:
        raise ExportError(["a list of dynamic length is read entry by entry; only splitting by it can be exported"])

    def __len__(self) -> int:
        raise ExportError(["the length of a list of dynamic length is read"])


class _Unsplit(TorchFunctionMode):
    """A tensor that is split by such a list, or image by image, stays whole: its pieces would only be concatenated again."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in ("split", "split_with_sizes"):
            sizes = [*args[1:2], *kwargs.values()]
            if any(isinstance(s, _Lengths) for s in sizes):
                return (args[0],)
        name = getattr(func, "__name__", "")
        if name in ("unbind", "__len__") and _images(*args, **kwargs):  # list(x) asks for the length, too
            return 1 if name == "__len__" else (args[0].flatten(0, 1),)
        return func(*args, **kwargs)


def _images(value: Tensor, dim: int = 0) -> bool:
    """Whether a tensor is unbound that holds features [n, T, D] of a number of images that is dynamic."""
    return dim == 0 and value.dim() == 3 and value.is_floating_point() and not isinstance(value.shape[0], int)


_plain_tolist = FakeTensor.tolist


def _tolist(tensor: FakeTensor) -> Any:
    """The values of a tensor; opaque where their number is dynamic."""
    return _plain_tolist(tensor) if all(isinstance(s, int) for s in tensor.shape) else _Lengths()


def _decompositions(program: ExportedProgram) -> dict[Any, Callable[..., Tensor]]:
    """Of packed attention: none where a package has a kernel for it."""
    from mmqc.lowering.segment_attention import OP, why_not_packaged

    packed = [n for n in program.graph.nodes if n.target is OP]
    reason = next(filter(None, map(why_not_packaged, packed)), None)
    if reason is not None and packed[0].meta["val"].is_cuda:
        logger.warning("attention within images is a mask of P x P, all of whose scores are computed: %s", reason)
    return {} if reason is None else {OP: _one_mask}


def _one_mask(
    q: Tensor, k: Tensor, v: Tensor, ends_q: Tensor, ends_k: Tensor, scale: float | None, causal: bool, longest: Any
) -> Tensor:
    """Packed attention in torch's own ops."""
    del longest
    return variable_length.masked(q, k, v, None, ends_q, ends_k, scale, 0.0, causal)


def plain_output(output: Any) -> Any:
    """The tensors of an output in plain containers: by name if it has names, and without caches and the outputs of encoders."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        kept = {str(k): plain_output(v) for k, v in output.items() if k not in ENCODERS}
        return {k: v for k, v in kept.items() if v is not None}
    if isinstance(output, (tuple, list)):
        return tuple(v for v in map(plain_output, output) if v is not None)
    return None


@contextmanager
def _kept(model: nn.Module) -> Iterator[None]:
    """The attributes of every module, and the model's hooks, as they were: a forward may store tensors of a trace."""
    modules = list(model.modules())
    before = [(m.__dict__, dict(m.__dict__)) for m in modules]
    places = [d for m in modules for n, d in m.__dict__.items() if n.startswith("_forward") and isinstance(d, dict)]
    hooks = [(d, dict(d)) for d in places if d]
    for module in modules:
        detach(module)
    try:
        yield
    finally:
        for place, values in before:
            for name in [n for n in place if n not in values]:
                del place[name]
            place.update(values)
        for place, values in hooks:  # in their order
            place.clear()
            place.update(values)


# --- the check --------------------------------------------------------------------------------------------------------


class _Check:
    """Programs against the model that they are of.

    Args:
        model: that model.
        constants: inputs that are no tensors.
        rounds: whether it rounds activations.
        batches: of inputs that are.
    """

    def __init__(self, model: nn.Module, constants: Inputs, rounds: bool, batches: list[dict[str, Tensor]]) -> None:
        self.model, self.constants, self.rounds, self.first = model, constants, rounds, batches[0]
        self.on_cpu = all(t.device.type == "cpu" for batch in batches for t in batch.values())

    def expected(self, **batch: Tensor) -> list[Tensor]:
        """The model's floats."""
        return list(floats(plain_output(self.model(**batch, **self.constants))))

    @functools.cached_property
    def moves(self) -> float:
        """How far rounding errors move the model's own outputs."""
        return sensitivity.moved(self.expected, self.first, self.model)

    def verify(self, program: ExportedProgram, batches: list[dict[str, Tensor]], *, strictly: bool = False) -> None:
        """Compare the program with the model on every batch; ``strictly``: although it rounds.

        Raises:
            ExportError: it fails, or differs.
        """
        _admit(program, batches)
        run = program.module()
        for batch in batches:
            sizes = {name: tuple(t.shape) for name, t in batch.items()}
            expected = self.expected(**batch)
            try:
                got = list(floats(run(**batch)))
            except Exception as error:
                raise ExportError([f"for {sizes} the program fails: {type(error).__name__}: {error}"]) from error
            if [t.shape for t in got] != [t.shape for t in expected]:
                raise ExportError([f"for {sizes} the program's output has other shapes than the model's"])
            error = max((sensitivity.relative_error(a, b) for a, b in zip(got, expected, strict=True)), default=0.0)
            logger.info("relative error %.1e for %s", error, sizes)
            rounds, dtype = self.rounds and not strictly, expected[0].dtype if expected else torch.float64
            most = sensitivity.bound(dtype, EXACT, lambda: self.moves, rounds=rounds, on_cpu=self.on_cpu)
            if not error <= most:
                told = f"differs from the model's by {error:.1e}, more than {most:.0e}"
                raise ExportError([f"for {sizes} the program's output {told}"])

    def admit(self, program: ExportedProgram, batches: list[dict[str, Tensor]]) -> None:
        """Admit the sizes of these batches if the program is right on them."""
        ranges, guards = dict(program.range_constraints), list(getattr(program, "_guards_code", []))
        try:
            self.verify(program, batches)
        except Exception as error:  # the model's own code may know no such batch either
            logger.info("sizes left out: %s", error)
            program.range_constraints.clear()
            program.range_constraints.update(ranges)
            program._guards_code = guards


def _admit(program: ExportedProgram, batches: list[dict[str, Tensor]]) -> None:
    """Admit sizes that the given batches have but the trace excluded, such as one; the comparison with the model decides.

    An equality stays: it says that the trace holds for one size only, or for one number of rounds of a loop.
    """
    ranges = program.range_constraints
    nodes = {n.name: n for n in program.graph.find_nodes(op="placeholder")}
    for name, node in zip(batches[0], program.graph_signature.user_inputs, strict=True):
        for axis, size in enumerate(nodes[str(node)].meta["val"].shape):
            known = ranges.get(size.node.expr) if isinstance(size, torch.SymInt) else None
            if known is not None:
                smallest = min(known.lower, *(b[name].shape[axis] for b in batches))
                ranges[size.node.expr] = type(known)(smallest, known.upper)
    program._guards_code = [g for g in getattr(program, "_guards_code", []) if "==" in g or all(eval(g, {"L": b}) for b in batches)]


def rounds(program: ExportedProgram) -> bool:
    """Whether the program rounds activations: then another order of a sum may flip a code."""
    ops = [n.target for n in program.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]
    return any(op.namespace != "aten" or "round" in op.name() for op in ops)
