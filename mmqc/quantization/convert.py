"""Write what the passes decided back into the model, and take it back if anything fails.

Three carriers only: a module is swapped for one of ours, a parameter is replaced, a bias is added.  Every edit goes
through a ``Journal``; leaving its ``with`` block by an exception puts every tensor and module back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from mmqc.graph.hooks import carry_over
from mmqc.graph.kinds import kind
from mmqc.graph.linear import operands, weight_of
from mmqc.graph.program import Program
from mmqc.nn.float4_linear import Float4Linear
from mmqc.nn.integer_weight import PackedLinear
from mmqc.nn.linear import HadamardLinear, QuantLinear, RMSNorm
from mmqc.nn.mixed_linear import MixedLinear
from mmqc.nn.modality import ModalityContext
from mmqc.nn.online_hadamard import hadamard_of
from mmqc.nn.rotated_norm import RotatedNorm
from mmqc.nn.token_linear import TokenLinear
from mmqc.passes.quantize_mixed import Stored
from mmqc.quantization.eviction import Evicted, Eviction

QUANTIZED = ("weight_only_matmul", "float4_matmul", "scaled_matmul", "mixed_matmul")


class Journal:
    """Edits of a model that can be undone; what an accelerator held is kept in host memory meanwhile (eviction.py)."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.undo: list[Any] = []
        self.eviction = Eviction()
        self.buffers: set[tuple[int, str]] = set()  # that were replaced: the id of the module, and the name
        self.ours: dict[int, Any] = {}  # parameters that were put in place of others: undoing brings those back

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: Any, trace: Any) -> None:
        failed = True
        try:
            self.eviction.close()
            failed = kind is not None
        finally:  # an interrupt may come while the last copies end
            if failed:
                for step in reversed(self.undo):
                    step()
                self.buffers.clear()
            self.undo.clear()
            self.ours.clear()

    def parameter(self, fqn: str, value: Tensor, shared: bool = False) -> None:
        """Replace or add a parameter or a buffer, keeping device and requires_grad of what was there.

        One that is ``shared`` with another name is kept as it is, so that undoing shares it again.
        """
        owner, _, name = fqn.rpartition(".")
        module = self.model.get_submodule(owner)
        store: dict[str, Any] = module._buffers if name in module._buffers else module._parameters
        old = store.get(name)
        new = value.detach().contiguous()
        if store is module._buffers:
            self.buffers.add((id(module), name))
        else:
            new = nn.Parameter(new, requires_grad=old is not None and old.requires_grad)
        if self.ours.pop(id(old), None) is None:
            self._keep(store, name, shared)
        # else undoing brings back what that one had replaced; kept any longer, it would be a second model in memory
        store[name] = new
        self.ours[id(new)] = new

    def _keep(self, store: dict[str, Any], name: str, shared: bool) -> None:
        """Undoing brings back what a module's store has now; that is, until then, where ``Journal`` says."""
        old = store.get(name)
        if old is None or shared or not _evictable(old):
            self.undo.append(lambda: store.__setitem__(name, old))
            return
        remade = functools.partial(nn.Parameter, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else lambda t: t
        restore = lambda evicted: store.__setitem__(name, remade(evicted.back()))  # noqa: E731
        self.eviction.evict(old.detach(), lambda evicted: self.undo.append(lambda: restore(evicted)))

    def swap(self, modules: Mapping[str, nn.Module]) -> None:
        """Replace submodules by ours, by FQN; each takes over the hooks and the attributes of the one whose place it takes."""
        old = [self.model.get_submodule(fqn) for fqn in modules]
        for before, new in zip(old, modules.values(), strict=True):
            carry_over(before, new)
        self.place(modules)
        own = {id(part): part for module in old for part in module._parameters.values() if part is not None and _evictable(part)}
        left = {id(part) for module in _modules(self.model) for part in module._parameters.values()} if own else set()
        for part in own.values():
            if id(part) not in left:
                self._evict(part)

    def place(self, modules: Mapping[str, nn.Module]) -> None:
        """Put modules in the submodules' places wherever those are registered; each takes over the training flag."""
        known = [(self.model.get_submodule(fqn), new) for fqn, new in modules.items()]
        places: dict[int, list[tuple[dict[str, nn.Module | None], str]]] = {id(old): [] for old, _ in known}
        for module in _modules(self.model):
            for name, child in module._modules.items():
                if id(child) in places:
                    places[id(child)].append((module._modules, name))
        for old, new in known:
            new.train(old.training)
            for children, name in places[id(old)]:
                children[name] = new
                self.undo.append(lambda children=children, name=name, old=old: children.__setitem__(name, old))

    def _evict(self, part: nn.Parameter) -> None:
        """Take a parameter that no module uses any more off its accelerator."""
        if id(part) in self.ours:  # that replaced another is never needed again: undoing goes back to the one before
            part.data = torch.empty(0, dtype=part.dtype)
            return

        def left(evicted: Evicted) -> None:
            self.undo.append(lambda: setattr(part, "data", evicted.back()))
            part.data = evicted.host

        self.eviction.evict(part.data, left)

    def child(self, fqn: str, name: str, new: nn.Module) -> None:
        """Add a submodule to a module."""
        owner = self.model.get_submodule(fqn)
        new.train(owner.training)
        owner.add_module(name, new)
        self.undo.append(lambda: owner._modules.pop(name))

    def attribute(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute (of a nested config, say)."""
        old = getattr(owner, name)
        setattr(owner, name, value)
        self.undo.append(lambda: setattr(owner, name, old))

    def note(self, undo: Callable[[], Any]) -> None:
        """An edit of another kind (hooks, say), which ``undo`` takes back."""
        self.undo.append(undo)


def _modules(model: nn.Module) -> Iterator[nn.Module]:
    """As ``model.modules()``, in any order and without their names, which is most of its time: twice for every edit."""
    seen, waiting = {id(model)}, [model]
    while waiting:
        module = waiting.pop()
        yield module
        for child in module._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                waiting.append(child)


def _evictable(tensor: Tensor) -> bool:
    return tensor.device.type not in ("cpu", "meta")


def _aliases(model: nn.Module) -> dict[int, list[str]]:
    groups: dict[int, list[str]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(tensor), []).append(name)
    return groups


def write_exact(model: nn.Module, prog: Program, journal: Journal) -> list[str]:
    """Write the exact rewrites: weights, new biases, RMSNorms for LayerNorms, online rotations and Hadamards.

    Returns:
        Names whose tensor was shared with another name and is not any more.
    """
    untied = write_weights(model, prog, journal)
    for node in prog.graph.nodes:
        if node.meta.get("was") == "layer_norm":
            _to_rms_norm(model, node.meta["module"], prog, journal)
    for module, (seed, sides) in _rotations(prog).items():
        journal.swap({module: RotatedNorm(model.get_submodule(module), seed=seed, **sides)})  # type: ignore[arg-type]
    for node in prog.nodes("linear", "weight_only_matmul", "float4_matmul"):
        x = operands(node)["input"]
        if kind(node) == "linear" and kind(x) == "hadamard":
            module = weight_of(node).removesuffix(".weight")
            linear = model.get_submodule(module)
            if not isinstance(linear, HadamardLinear):
                blocks = prog.decided.blocks.get(weight_of(node), 1)
                journal.swap({module: HadamardLinear.from_parts(linear.weight, linear.bias, blocks)})  # type: ignore[arg-type]
    return untied


def write_weights(model: nn.Module, prog: Program, journal: Journal) -> list[str]:
    """Write the weights that passes derived, and take them as given from here on; returns as ``write_exact``."""
    aliases = _aliases(model)
    untied: list[str] = []
    parameters = dict(model.named_parameters(remove_duplicate=False))
    # biases first: what a fold moved into one is computed from its weight as it was
    for name in sorted(prog.changed, key=lambda n: prog.weights[n].dim()):
        old = parameters.pop(name, None)
        shared = old is not None and len(aliases[id(old)]) > 1
        if shared:
            untied.append(name)
        value = prog.value(name).to(old.device if old is not None else prog.weights[name].device)
        prog.forget(name, value)
        del old  # one weight at a time
        journal.parameter(name, value, shared)
    return untied


def _rotations(prog: Program) -> dict[str, tuple[int, dict[str, bool]]]:
    """Norm modules that rotate at run time: the seed, and for each side that is rotated whether its mean is kept."""
    found: dict[str, tuple[int, dict[str, bool]]] = {}
    for node in prog.nodes("rotate"):
        seed, keep_mean = node.meta["rotation"]
        found.setdefault(node.meta["module"], (seed, {}))[1]["before" if node.args[3] else "after"] = keep_mean
    return found


def _to_rms_norm(model: nn.Module, fqn: str, prog: Program, journal: Journal) -> None:
    """Swap a LayerNorm whose input has no mean any more; a bias that was folded is dropped."""
    norm = model.get_submodule(fqn)
    if isinstance(norm, nn.LayerNorm):
        read = any(n.target == f"{fqn}.bias" and n.users for n in prog.nodes("get_attr"))
        weight, bias = norm.weight, norm.bias if read else None
        parts = {n: None if p is None else _copy(p) for n, p in (("weight", weight), ("bias", bias))}
        journal.swap({fqn: RMSNorm(norm.normalized_shape[0], norm.eps, **parts)})


def _copy(parameter: Tensor) -> Tensor:
    return parameter.detach().clone().requires_grad_(parameter.requires_grad)


def build_quantized(
    model: nn.Module, prog: Program, context: ModalityContext | None, only: Container[str]
) -> dict[str, PackedLinear]:
    """A module of ours for every quantized weight in ``only``, by module FQN; the model is not touched."""
    built: dict[str, PackedLinear] = {}
    known: Any = {} if prog.statistics is None else prog.statistics["linears"]
    quantized = [node for node in prog.graph.nodes if node.meta.get("fqn") in only]
    for node in (n for n in quantized if kind(n) in ("weight_only_matmul", "float4_matmul")):
        fqn = node.meta["fqn"]
        module = fqn.removesuffix(".weight")
        if module in built:
            continue
        old = model.get_submodule(module)
        scheme, solved = node.meta["scheme"], prog.solved[fqn]
        found = known.get(fqn, {}).get("input_scale") if scheme.static else None
        static = found is not None
        weight = old.get_parameter("weight")
        device = weight.device
        bias = getattr(old, "bias", None)
        if scheme.by_token:
            built[module] = TokenLinear.from_parts(
                solved.to(device),
                weight_bits=scheme.weight.bits,
                bias=None if bias is None else bias.detach(),
                hadamard=hadamard_of(old),
                float8=scheme.float8,
                dtype=weight.dtype,
            )
            continue
        index, columns = (prog.weights.get(f"{fqn}.{part}") for part in ("outliers", "outlier_weight"))
        outliers = None if index is None or columns is None else (index.to(device), columns.to(device))
        if scheme.weight.float4:
            built[module] = Float4Linear.from_parts(
                solved.to(device),
                bias=None if bias is None else bias.detach(),
                hadamard=hadamard_of(old),
                outliers=outliers,
                dtype=weight.dtype,
            )
            continue
        scale = torch.tensor(found, dtype=torch.float32) if static else None
        built[module] = QuantLinear.from_parts(
            solved.to(device),
            weight_bits=scheme.weight.bits,
            activation_bits=scheme.activation.bits if static and scheme.activation is not None else None,
            bias=None if bias is None else bias.detach(),
            input_scale=None if scale is None else scale.to(device),
            outliers=outliers,
            hadamard=hadamard_of(old),
            modality=context if scale is not None and scale.numel() == 2 else None,
            dtype=weight.dtype,
            float8=static and scheme.float8,
        )
    return built | _build_mixed(model, prog, quantized)


def _build_mixed(model: nn.Module, prog: Program, nodes: Iterable[fx.Node]) -> dict[str, PackedLinear]:
    """A MixedLinear for every weight with dynamic activations."""
    built: dict[str, PackedLinear] = {}
    for fqn, node in {n.meta["fqn"]: n for n in nodes if kind(n) == "mixed_matmul"}.items():
        old = model.get_submodule(fqn.removesuffix(".weight"))
        scheme, weight = node.meta["scheme"], old.get_parameter("weight")
        stored, bias = Stored.of(prog.solved[fqn], scheme), getattr(old, "bias", None)
        built[fqn.removesuffix(".weight")] = MixedLinear.from_stored(
            [c.to(weight.device) for c in stored.codes],
            stored.scale.to(weight.device),
            stored.sum.to(weight.device),
            widths=stored.widths,
            stored=stored.bits,
            activation=stored.activation_bits,
            weight_bits=scheme.weight.bits,
            order=None if stored.order is None else stored.order.to(weight.device),
            bias=None if bias is None else bias.detach(),
            hadamard=hadamard_of(old),
            dtype=weight.dtype,
        )
    return built


def size_of(model: nn.Module) -> int:
    """Bytes of all parameters and buffers, shared ones once."""
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return sum(t.numel() * t.element_size() for t in tensors.values())


def first_bad_weight(model: nn.Module) -> str | None:
    """Name of a floating-point parameter that holds NaN or infinity; codes of other libraries are not looked into."""
    for name, p in model.named_parameters():
        floats = p.is_floating_point() and p.itemsize > 1 and type(p.detach()) is Tensor
        if floats and not p.is_meta and p.numel():
            ends = torch.stack(torch.aminmax(p.detach()))  # NaN reaches both; no mask of the weight's size is made
            if not bool(torch.isfinite(ends).all()):
                return name
    return None
