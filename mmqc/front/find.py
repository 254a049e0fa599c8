"""Find out, by a few eager forwards, what has to run in front of a model's forward; each piece is kept only if it is exact.

1. observe the forward as the trace will see it
2. towers that split their attention by values: one variable-length call, kept if the output stays the same
3. functions of what was made of inputs alone: their results are handed over, kept if the output stays the same; as numbers where
   they are asked for right away
4. methods that still read numbers out of an input: the numbers are handed over, kept if the output stays the same
5. what the last forward left on a module: forgotten, if the output stays the same and this forward leaves it anew

The output is that of the model: what newer transformers add of its encoders (``image_outputs``) has all images in one piece where
their split is handed over.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mmqc.front import attention
from mmqc.front.as_it_was import as_it_was
from mmqc.front.handover import ArgumentSite, Installed, Site, compute, value_sites
from mmqc.front.index_bounds import IndicesInBounds
from mmqc.front.observe import SLICE, Observation, is_metadata, observe
from mmqc.front.places import Call, Read, place_of
from mmqc.front.provenance import leaves, tensors_in
from mmqc.front.sizes import left_on
from mmqc.graph.collections_off import without_collections
from mmqc.graph.tracing import as_traced
from mmqc.nn.uncompiled import uncompiled
from mmqc.ops.define import plain_torch
from mmqc.versions import without_encoders

CHECKS = frozenset(("torch_compilable_check",))  # transformers' placeholder check: it traces as an assertion
EXACT = {torch.float64: 1e-9, torch.float32: 1e-4}
ROUNDED = 3e-2  # of half precision: another order of the same sums
IMAGES = 256  # a vector with more numbers than this has none for each image


@dataclass
class Plan:
    """What runs in front of one kind of call.

    Attributes:
        sites: functions whose results, and methods whose arguments, are handed over.
        configs: of towers that make one variable-length attention call.
        forgets: attributes that a forward leaves on its modules and does not read.
        capture: whether what is left can be traced with symbolic values.
        notes: for the record: what is prepared, what was tried and dropped, what is left.
    """

    sites: list[Site] = field(default_factory=list)
    configs: list[Any] = field(default_factory=list)
    forgets: list[tuple[nn.Module, str]] = field(default_factory=list)
    capture: bool = False
    notes: list[str] = field(default_factory=list)


class Finder:
    """One search, for one model and one batch."""

    def __init__(self, number: int, model: nn.Module, inputs: Mapping[str, Any]) -> None:
        self.number, self.model, self.inputs = number, model, dict(inputs)
        self.given = {k: v for k, v in self.inputs.items() if isinstance(v, Tensor)}
        self.plan = Plan()
        self.expected: list[Tensor] = []

    @property
    def names(self) -> dict[int, str]:
        """Names of the integer inputs that the forward does not write to, by id."""
        return {id(v): k for k, v in self.given.items() if not v.is_floating_point()}

    def find(self) -> Plan:
        """Run the steps."""
        on_device = any(isinstance(v, Tensor) and v.is_cuda for v in self.inputs.values())
        bounds = IndicesInBounds() if on_device else nullcontext()
        with attention.check(), plain_torch(), without_collections(), uncompiled(self.model), bounds:
            return self.search()

    def search(self) -> Plan:
        """The steps."""
        self.warm()
        seen = self.observed()
        self.expected = list(floats(without_encoders(seen.output)))
        seen = self.pack_attention(seen)
        self.hand_over_results(seen)
        left = self.hand_over_arguments(self.hand_over_numbers(seen))
        self.forget()
        self.plan.capture = True
        self.plan.notes += sorted({f"left to the trace: {read}" for read in left})
        return self.plan

    # --- running the forward ------------------------------------------------------------------------------------------

    def forward(self) -> Any:
        """The forward, without a trace on the caller's cache or random state."""
        return self.ready()()

    def ready(self) -> Callable[[], Any]:
        """``forward`` with its copies made: watched, a cache of many layers would take longer to copy than the model to run."""
        inputs = {k: v if isinstance(v, Tensor) else _private(v) for k, v in self.inputs.items()}

        def run() -> Any:
            rng = torch.random.fork_rng(enabled=self.model.training)
            with torch.no_grad(), rng, as_it_was(self.model, self.inputs) as written:
                output = self.model.forward(**inputs)
            for tensor in written:
                self.given = {name: given for name, given in self.given.items() if given is not tensor}
            return output

        return run

    def warm(self) -> None:
        """On a GPU, compile what a first forward compiles: watched, that would take several times as long.

        Its kernels are listed first, by a forward that runs none of them, and compiled together.
        """
        devices = [v.device for v in self.inputs.values() if isinstance(v, Tensor) and v.is_cuda]
        if not devices:
            return
        from mmqc.kernels.shared.compile_ahead import ahead, wait  # and Triton with it
        from mmqc.kernels.shared.launch import listed

        with as_traced():
            with suppress(Exception), listed() as launches:  # its values mean nothing
                self.forward()
            ahead(launches, devices[0])
            wait()
            self.forward()

    def observed(self) -> Observation:
        """The forward with every read."""
        forward = self.ready()
        with as_traced():
            return observe(forward, CHECKS, self.given)

    def exact(self, sites: list[Site]) -> str:
        """Why these sites cannot be used; empty if the output stays the same."""
        installed = Installed(self.number, sites)
        try:
            compute(self.number, sites, self.inputs)
            installed.put()
            with as_traced():
                got = list(floats(without_encoders(self.forward())))
        except Exception as error:
            return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        finally:
            installed.remove()
        return difference(got, self.expected)

    # --- the steps ----------------------------------------------------------------------------------------------------

    def pack_attention(self, seen: Observation) -> Observation:
        """Set the variable-length attention where a tower takes it; the observation with it."""
        configs = _tower_configs(self.left(seen))
        if not configs or not attention.register():
            return seen
        try:
            with Packed(configs), attention.check() as calls:
                self.warm()
                packed = self.observed()
            reason = difference(list(floats(without_encoders(packed.output))), self.expected)
            if calls.other or not calls.packed:
                reason = "the tower calls it without sequence lengths"
        except Exception as error:
            packed, reason = seen, f"{type(error).__name__}: {error}"
        where = ", ".join(type(c).__name__ for c in configs)
        if reason:
            self.plan.notes.append(f"not prepared: variable-length attention for {where}: {reason}")
            return seen
        self.plan.configs = configs
        self.plan.notes.append(f"one variable-length attention call per block: {where}")
        return packed

    def left(self, seen: Observation) -> list[Read]:
        """Reads that no metadata call covers."""
        return [r for r in seen.reads if not self.covering(r)]

    def covering(self, read: Read) -> list[Call]:
        """The metadata calls around a read, innermost first; none that computes activations: those belong to the graph."""
        around = read.call.around() if read.call is not None else ()
        return [c for c in around if is_metadata(c) and {leaf.name for leaf in leaves(c.recipe)} <= set(self.given)]

    def hand_over_results(self, seen: Observation) -> None:
        """Value sites, those that are not exact left out."""
        outermost: dict[int, Call] = {}
        for read in seen.reads:
            covering = [c for c in self.covering(read) if place_of(c) is not None]
            if covering:
                outermost[id(covering[-1])] = covering[-1]
        order = {id(c): i for i, c in enumerate(seen.calls)}
        sites = value_sites(sorted(outermost.values(), key=lambda c: order[id(c)]))
        with self.packed():
            if not sites:
                return
            reason = self.exact([*sites])
            for site in sites:
                if reason and (why := self.exact([site])):
                    self.plan.notes.append(f"not prepared: {site}: {why}")
                else:
                    self.plan.sites.append(site)
                    self.plan.notes.append(f"computed in front: {site}")

    def hand_over_numbers(self, seen: Observation) -> list[Read]:
        """Functions that read nothing, and whose results are asked for their numbers right away; the reads that are left."""
        left = self.left(seen)
        asked = {id(read.giver) for read in left if read.scalar and read.giver is not None}
        calls = [call for call in seen.calls if id(call) in asked and is_metadata(call)]
        for site in value_sites(calls):
            site.as_numbers = True
            with self.packed():
                if self.exact([*self.plan.sites, site]):
                    continue
            self.plan.sites.append(site)
            self.plan.notes.append(f"computed in front: {site}")
            its = {id(call) for call in calls if call.code.co_name == site.name}
            left = [read for read in left if id(read.giver) not in its]
        return left

    def hand_over_arguments(self, left: list[Read]) -> list[Read]:
        """Argument sites for the reads that are left; what is left after them."""
        done: set[tuple[int, str]] = set()
        for read in sorted((r for r in left if r.scalar), key=lambda r: r.op == SLICE):
            readers = list(self.readers_of_inputs(read))
            if read.op == SLICE:  # sizes that cut are reckoned with further out, too: there are the same numbers for all who do
                readers = [] if _is_inside(read, done) else readers[::-1]
            for call, argument in readers:
                place = (id(call.owner), call.code.co_name)
                if place in done:
                    break
                if self.adopt(call, argument):
                    done.add(place)
                    break
        return [r for r in left if not _is_inside(r, done)]

    def is_its_forward(self, call: Call) -> bool:
        """Whether it is the call that all this is in front of."""
        return call.owner is self.model and call.code.co_name == "forward"

    def readers_of_inputs(self, read: Read) -> Iterable[tuple[Call, str]]:
        """Methods around a read that were given an integer matrix input, innermost first, and which argument that is."""
        for call in read.call.around() if read.call is not None else ():
            if call.owner is None or self.is_its_forward(call) or place_of(call) is None:
                continue
            for argument, value in call.arguments.items():
                if self.holds_sizes(value) and value.dim() == 2:
                    yield call, argument

    def holds_sizes(self, value: Any) -> bool:
        """Whether this is an input with a few numbers for each image."""
        if not isinstance(value, Tensor) or id(value) not in self.names or value.dtype == torch.bool:
            return False
        return (value.dim() == 2 and value.shape[1] <= 4) or (value.dim() == 1 and len(value) <= IMAGES)

    def adopt(self, call: Call, argument: str) -> bool:
        """Keep the first form of the argument that leaves the output the same; numbers, of all arguments that hold some."""
        owner, function = place_of(call)  # type: ignore[misc]
        assert isinstance(owner, nn.Module)
        plain = getattr(function, "__func__", function)
        one = {argument: self.names[id(call.arguments[argument])]}
        every = {name: self.names[id(value)] for name, value in call.arguments.items() if self.holds_sizes(value)}
        width = self.inputs[one[argument]].shape[1]
        for form, sources, columns in (("one row", one, range(width)), ("list", one, (0,)), ("numbers", every, (0,))):
            # only the total matters, if it may stand in any column
            sites = [ArgumentSite(owner, call.code.co_name, plain, sources, form, c) for c in columns]
            with self.packed():
                if not any(self.exact([*self.plan.sites, site]) for site in sites):
                    self.plan.sites.append(sites[0])
                    self.plan.notes.append(f"computed in front: {sites[0]}")
                    return True
        return False

    def forget(self) -> None:
        """Attributes that are of the last call: their sizes would be compared with this one's."""
        for module, name in left_on(self.model):
            known = vars(module)[name]
            vars(module)[name] = None
            with self.packed():
                reason = self.exact(self.plan.sites)
            if reason or vars(module).get(name) is None:
                vars(module)[name] = known
            else:
                self.plan.forgets.append((module, name))

    def packed(self) -> Packed:
        """The towers' attention as the plan has it."""
        return Packed(self.plan.configs)


class Packed:
    """Sets the variable-length attention on configs, and puts back what they had."""

    def __init__(self, configs: list[Any]) -> None:
        self.configs = configs
        self.before: list[Any] = []

    def __enter__(self) -> Packed:
        if not self.before:
            self.before = [c._attn_implementation for c in self.configs]
            for config in self.configs:
                config._attn_implementation = attention.NAME
        return self

    def __exit__(self, *error: object) -> None:
        for config, name in zip(self.configs, self.before, strict=False):
            config._attn_implementation = name
        self.before = []


def floats(value: Any) -> Iterable[Tensor]:
    """Floating-point tensors of an output, caches included."""
    return (t for t in tensors_in(value) if t.is_floating_point())


def difference(got: list[Tensor], expected: list[Tensor]) -> str:
    """In words, how two outputs differ; empty if they do not."""
    if [t.shape for t in got] != [t.shape for t in expected]:
        return "the output has other shapes"
    for a, b in zip(got, expected, strict=True):
        finite = torch.isfinite(b)
        a, b = a[finite].double(), b[finite].double()
        if (a - b).norm() > EXACT.get(expected[0].dtype, ROUNDED) * b.norm():
            return f"the output differs by {float((a - b).norm() / b.norm()):.1e}"
    return ""


def _tower_configs(reads: list[Read]) -> list[Any]:
    """Configs of the modules that read lengths around an attention call."""
    found: dict[int, Any] = {}
    for read in reads:
        for call in read.call.around() if read.call is not None and read.op == "tolist" else ():
            if call.owner is not None:
                config = getattr(call.owner, "config", None)
                if hasattr(config, "_attn_implementation") and _is_packed(call):
                    found[id(config)] = config
                break
    return list(found.values())


def _is_packed(call: Call) -> bool:
    """Whether the call was given the ends of the sequences packed in one of its activations: 0 = e_0 <= ... <= e_n = T."""
    given = [v for v in call.arguments.values() if isinstance(v, Tensor)]
    lengths = {size for t in given if t.is_floating_point() for size in t.shape}
    ends = [t for t in given if t.dim() == 1 and len(t) > 1 and not t.is_floating_point() and t.dtype != torch.bool]
    return any(int(t[0]) == 0 and bool((t.diff() >= 0).all()) and int(t[-1]) in lengths for t in ends)


def _is_inside(read: Read, places: set[tuple[int, str]]) -> bool:
    """Whether a method in one of these places was running, which gets its numbers."""
    return read.call is not None and any((id(c.owner), c.code.co_name) in places for c in read.call.around())


def _private(value: Any) -> Any:
    """A cache is written to: a copy of it."""
    return copy.deepcopy(value) if hasattr(value, "get_seq_length") else value
