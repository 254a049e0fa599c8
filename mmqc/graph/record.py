"""Record one real forward of a whole model as one straight-line graph.

Every torch call of the forward becomes a node; operands are found by tensor identity, weights by name.  ``.item()``,
``.tolist()`` and Python that depends on data simply run, so no model is too dynamic to record.  The price: numbers
that came from data are baked in, so a recording is for analysis, and only ever replayed on its own inputs.  That
they were taken is a node too: what Python has seen of a float, it may have decided by.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._C._functorch import is_batchedtensor  # type: ignore[import-not-found]
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from mmqc.errors import MmqcError
from mmqc.graph import meta
from mmqc.graph.hooks import hooked_modules
from mmqc.graph.kinds import kind
from mmqc.graph.memory import written
from mmqc.graph.program import KEPT, LOOKS, LOOSE, READ, Program
from mmqc.graph.reads import sizing
from mmqc.graph.runner import check_trace
from mmqc.versions import cache_name, cache_of

# What Python may ask of a tensor without learning anything of its values.
# fmt: off
_ABOUT = frozenset((
    "__get__", "__len__", "__hash__", "size", "dim", "ndimension", "numel", "nelement", "stride",
    "storage_offset", "element_size", "get_device", "type", "data_ptr", "untyped_storage", "storage", "storage_type",
    "is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_conj", "is_neg", "is_inference", "is_pinned", "is_shared",
    "is_same_size", "is_set_to", "is_storage", "is_tensor", "is_distributed", "is_coalesced", "has_names", "result_type",
    "requires_grad_", "retain_grad", "register_hook", "register_post_accumulate_grad_hook", "__dlpack_device__", "__set__",
))
# fmt: on
_METHODS = (types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodType, types.BuiltinMethodType)


class RecordError(MmqcError, RuntimeError):
    """The forward cannot be recorded: names the tensor, the call and the module."""


class Recorder(TorchFunctionMode):
    """A mode that writes each torch call into ``graph``; see ``record``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.weights: dict[str, Tensor] = {}
        self.nodes: Any = WeakTensorKeyDictionary()  # by identity; an activation may die as soon as the model lets it go
        self.modules: list[str] = []
        self.called: set[str] = set()
        self.handed: dict[str, set[fx.Node]] = {}
        self.sketches: dict[fx.Node, Any] = {}
        self.placeholders: list[fx.Node] = []
        self.getters: dict[str, fx.Node] = {}
        self.names: dict[int, list[str]] = {}
        made_anew = _made_anew(model)
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        for name, tensor in named:
            if name not in made_anew:
                self.names.setdefault(id(tensor), []).append(name)
        self.last = ""  # the module that was entered last
        self.without_values = any(p.is_meta for p in model.parameters())
        self.run = meta.call if self.without_values else lambda func, args, kwargs: func(*args, **kwargs)
        self.loose = {
            id(v): f"{m}.{k}".lstrip(".") for m, mod in model.named_modules() for k, v in vars(mod).items() if isinstance(v, Tensor)
        } | {id(tensor): name for name, tensor in model.named_buffers() if name in made_anew}

    # -- operands --------------------------------------------------------------------------------------------------
    def bind(self, tensor: Tensor, node: fx.Node) -> None:
        """From now on ``tensor`` is what ``node`` computes."""
        self.nodes[tensor] = node
        node.meta.setdefault("shape", tuple(tensor.shape))
        node.meta.setdefault("dtype", tensor.dtype)

    def copied(self, value: Any) -> Any:
        """The same input in memory of its own, for a callee that writes into what it is given (BLIP's ``generate``)."""
        if not isinstance(value, Tensor):
            return value
        copy = value.detach().clone()
        if value in self.nodes:
            self.bind(copy, self.nodes[value])
        return copy

    def placeholder(self, name: str) -> fx.Node:
        """A node for an input, behind those that are there."""
        first = next(iter(self.graph.nodes), None)
        if self.placeholders:
            with self.graph.inserting_after(self.placeholders[-1]):
                node = self.graph.placeholder(name)
        else:
            with self.graph.inserting_before(first) if first is not None else self.graph.inserting_after():
                node = self.graph.placeholder(name)
        self.placeholders.append(node)
        return node

    def weight(self, tensor: Tensor) -> fx.Node:
        """The node of a parameter or buffer; one that several modules share goes by the running module's name for it."""
        names = self.names[id(tensor)]
        here = self.modules[-1] if self.modules else ""
        name = next((n for n in names if n.rpartition(".")[0] == here), names[0])
        if name in self.getters:
            return self.getters[name]
        self.weights[name] = tensor
        first = next(iter(self.graph.nodes), None)
        with self.graph.inserting_before(first) if first is not None else self.graph.inserting_after():
            node = self.graph.get_attr(name)
        node.meta.update(shape=tuple(tensor.shape), dtype=tensor.dtype)
        self.getters[name] = node
        return node

    def operand(self, value: Any, func: Any) -> Any:
        """The node for a tensor operand; other values as they are."""
        if not isinstance(value, Tensor):
            return value
        if id(value) in self.names:
            return self.weight(value)
        if value in self.nodes:
            return self.nodes[value]
        if value.numel() <= 1 or not value.is_floating_point():
            return self.constant(value)
        if id(value) in self.loose:
            return self.constant(value)
        where = self.modules[-1] if self.modules else "the model"
        raise RecordError(
            f"a float tensor of shape {tuple(value.shape)} enters {getattr(func, '__name__', func)} in {where} from nowhere: "
            "neither an input, a parameter, a buffer, a module attribute nor the result of a torch call that could be seen. "
            "Make it a buffer, or keep scripted and compiled callees out of the forward."
        )

    def constant(self, tensor: Tensor) -> fx.Node:
        """A node for a tensor that no module owns."""
        name = f"{LOOSE}{len(self.weights)}"
        self.weights[name] = tensor
        node = self.graph.get_attr(name)
        self.bind(tensor, node)
        return node

    # -- calls -----------------------------------------------------------------------------------------------------
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = self.run(func, args, kwargs)
        outputs = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
        name = getattr(func, "__name__", "")
        writes = name in ("__setitem__",) or (name.endswith("_") and not name.endswith("__"))
        writes = writes or kwargs.get("inplace") is True or kwargs.get("out") is not None
        if not outputs and not writes:
            if name not in _ABOUT:
                self.looked_at(func, args, kwargs, LOOKS)
            return result
        operands = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, Tensor)]
        if not writes and outputs and all(any(o is a for a in operands) for o in outputs):
            return result  # .to() and .contiguous() that had nothing to do
        if len(outputs) == 1 and id(outputs[0]) in self.names and not operands:
            return result
        node = self.call(func, args, kwargs)
        node.meta.update(self.frame())
        self.looked_at(_hook, sizing(name, args, kwargs), {}, LOOKS)
        if not any(is_batchedtensor(t) for t in (*operands, *outputs)):  # inside a vmap
            memory = {a.untyped_storage()._cdata for a in operands}
            node.meta["view"] = any(o.untyped_storage()._cdata in memory for o in outputs)
            if not writes:
                self.sketches[node] = meta.sketch(result)
        if isinstance(result, Tensor):
            node.meta.update(shape=tuple(result.shape), dtype=result.dtype)
            self.bind(result, node)
        elif isinstance(result, tuple | list):
            self.unpack(node, result)
        return result

    def looked_at(self, func: Any, args: Any, kwargs: Any, why: str) -> None:
        """Somebody took values out of tensors (item, bool, tolist, a hook, ...): a reader like any other, without a result."""
        seen = [self.nodes[a] for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, Tensor) and a in self.nodes]
        if any(map(_comes_of_floats, seen)):
            node = self.call(func, args, kwargs)
            node.meta.update({**self.frame(), READ: why, KEPT: True})

    def frame(self) -> dict[str, str]:
        """The module whose forward runs, and the one that called it."""
        return {"module": self.modules[-1] if self.modules else "", "caller": self.modules[-2] if self.modules[1:] else ""}

    def call(self, func: Any, args: Any, kwargs: Any) -> fx.Node:
        """The node of one call: a method, an attribute read or a function."""
        to_node = lambda v: self.operand(v, func)  # noqa: E731
        args = map_aggregate(tuple(args), to_node)
        kwargs = map_aggregate(dict(kwargs), to_node)
        name = getattr(func, "__name__", "")
        if name == "__get__":  # x.T, x.mT, x.data: the getter's owner knows the attribute
            return self.graph.call_function(getattr, (args[0], func.__self__.__name__))
        if isinstance(func, _METHODS) and getattr(torch.Tensor, name, None) == func:
            return self.graph.call_method(name, args, kwargs)
        return self.graph.call_function(func, args, kwargs)

    def unpack(self, node: fx.Node, result: Any) -> None:
        """A node for each tensor of a tuple."""
        for i, item in enumerate(result):
            if isinstance(item, Tensor):
                part = self.graph.call_function(_getitem, (node, i))
                part.meta.update(shape=tuple(item.shape), dtype=item.dtype, module=node.meta["module"])
                part.meta["view"] = node.meta.get("view", True)
                self.bind(item, part)


def _comes_of_floats(node: fx.Node) -> bool:
    """Whether a float went into what a node computes; ids and masks steer a forward in any basis."""
    seen: set[fx.Node] = set()
    todo = [node]
    while todo:
        current = todo.pop()
        dtype = current.meta.get("dtype")  # of a tuple there is none, but of what went in and comes out
        if dtype is not None and (dtype.is_floating_point or dtype.is_complex):
            return True
        seen.add(current)
        todo += [n for n in current.all_input_nodes if n not in seen]
    return False


def _getitem(values: Any, index: int) -> Any:
    """operator.getitem, under a name that says it takes an element of a tuple."""
    return values[index]


_getitem.__name__ = "getitem"


def _hook(*values: Any) -> None:
    """Stands for what somebody hung on a module."""


def _track_modules(model: nn.Module, recorder: Recorder) -> list[Any]:
    hooked = hooked_modules(model)

    def leave(name: str, output: Any) -> None:
        if recorder.modules[-1:] == [name]:  # not where an earlier hook raised, and the module was never entered
            recorder.modules.pop()
        hand(name, output)

    def enter(name: str, *values: Any) -> None:
        recorder.modules.append(name)
        recorder.called.add(name)
        recorder.last = name
        hand(name, values)

    def hand(name: str, values: Any) -> None:
        with torch._C.DisableTorchFunction():  # it is the recorder that asks, not the model
            tensors = [t for t in pytree.tree_leaves(values) if isinstance(t, Tensor) and t.is_floating_point()]
        recorder.handed.setdefault(name, set()).update(recorder.nodes[t] for t in tensors if t in recorder.nodes)

    def show(name: str, *values: Any) -> None:
        seen = tuple(t for t in pytree.tree_leaves(values) if isinstance(t, Tensor) and t in recorder.nodes)
        recorder.looked_at(_hook, seen, {}, f"a {hooked[name][0]} of {name} sees it")

    handles = []
    for name, module in model.named_modules():
        entering = lambda m, args, kwargs, name=name: enter(name, args, kwargs)  # noqa: E731
        handles.append(module.register_forward_pre_hook(entering, with_kwargs=True))
        handles.append(module.register_forward_hook(lambda m, a, output, name=name: leave(name, output), always_call=True))
        if name and name in hooked:  # what the model itself takes and gives is never rewritten
            given = lambda m, args, kwargs, name=name: show(name, args, kwargs)  # noqa: E731
            handles.append(module.register_forward_pre_hook(given, prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(lambda m, args, output, name=name: show(name, output), prepend=True))
    return handles


def _run(model: nn.Module, recorder: Recorder, batch: Mapping[str, Any], inputs: list[Any], shown: list[fx.Node]) -> Any:
    """One call under the recorder; its tensors become placeholders, its logits outputs."""
    for name, value in batch.items():
        if isinstance(value, Tensor) and value not in recorder.nodes:
            recorder.bind(value, recorder.placeholder(name))
            inputs.append(value.detach().clone())
    with recorder:
        output = model(**batch)
    seen = output["logits"] if isinstance(output, Mapping) and "logits" in output else output
    leaves = pytree.tree_leaves(dict(seen) if isinstance(seen, Mapping) else seen)
    shown += [recorder.nodes[t] for t in leaves if isinstance(t, Tensor) and t in recorder.nodes]
    return output


def _decode(
    model: nn.Module, recorder: Recorder, batch: Mapping[str, Any], output: Any, inputs: list[Any], shown: list[fx.Node]
) -> list[str]:
    """Record one more token: a plain call on the cache, else whatever ``generate`` makes of the batch.

    Returns:
        A note if the model takes neither; it is analysed without a decode step then.
    """
    cache = cache_of(output)
    ids, mask = batch.get("input_ids"), batch.get("attention_mask")
    reasons = ["its call returns no cache"] if cache is None else []
    if cache is not None and ids is not None:
        step = {"input_ids": ids[:, -1:].clone(), cache_name(): cache, "use_cache": True}
        if mask is not None and not bool(mask.all()):  # padded: without a mask the padding would be attended to
            step["attention_mask"] = torch.cat((mask, mask.new_ones(len(mask), 1)), -1)
        reason = _attempt(recorder, inputs, shown, lambda: _run(model, recorder, step, inputs, shown))
        if not reason:
            return []
        reasons.append(reason)
    can_generate: Any = getattr(model, "can_generate", None)
    if can_generate is not None and can_generate():
        reason = _attempt(recorder, inputs, shown, lambda: _generate(model, recorder, batch, shown))
        if not reason:
            return []
        reasons.append(reason)
    return [f"no decode step was recorded: {'; '.join(reasons)}"]


def _generate(model: Any, recorder: Recorder, batch: Mapping[str, Any], shown: list[fx.Node]) -> None:
    wanted = {name: recorder.copied(value) for name, value in batch.items() if name not in ("use_cache", "labels")}
    with recorder:
        output = model.generate(
            **wanted,
            max_new_tokens=2,
            min_new_tokens=2,
            do_sample=False,
            num_beams=1,
            return_dict_in_generate=True,
            output_logits=True,
        )
    shown += [recorder.nodes[t] for t in output.logits if t in recorder.nodes]


def _attempt(recorder: Recorder, inputs: list[Any], shown: list[fx.Node], call: Callable[[], Any]) -> str:
    """Make a recorded call; if the model's code raises, forget what it recorded and return the reason."""
    last, known, given = next(iter(reversed(recorder.graph.nodes))), len(inputs), len(shown)
    try:
        call()
    except RecordError:
        raise
    except Exception as error:  # the model's own code, whatever it raises
        while (node := next(iter(reversed(recorder.graph.nodes)))) is not last:
            recorder.graph.erase_node(node)
        for node in recorder.placeholders[known:]:
            recorder.graph.erase_node(node)
        del inputs[known:], shown[given:], recorder.placeholders[known:]
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return ""


def _is_linear(module: nn.Linear, fqn: str, graph: fx.Graph) -> bool:
    """Whether the module computes x Wᵀ + b and nothing else, whatever its class (a router's also picks experts)."""
    if type(module).forward is nn.Linear.forward:
        return True
    return {kind(n) for n in graph.nodes if n.meta.get("module") == fqn} <= {"matmul", "getattr:T", "t", "add", "linear"}


def _that_stay(sketches: dict[fx.Node, Any], program: Program) -> dict[fx.Node, Any]:
    """Without integers that are written to and lie in an operand's memory, from which a replay takes them again."""
    changing = {n for n in written(program) if n in sketches and n.meta["view"] and meta.holds_integers(sketches[n])}
    return {n: s for n, s in sketches.items() if n not in changing}


@torch.no_grad()
def record(model: nn.Module, batch: Mapping[str, Any], *more: Mapping[str, Any], decode: bool = False) -> Program:
    """Run ``model(**batch)`` and return what it did as a ``Program``; the model is left as it was.

    Several batches go into one program, one after the other, so that what one of them does not reach another may show.
    The program's outputs are the logits where there are any: features that a model returns beside them
    (``image_hidden_states``) are internal, and may be rotated.

    Args:
        model: what is run.
        batch: keyword arguments of its forward.
        *more: those of further calls.
        decode: also record one more token on the cache of the first batch.

    Raises:
        RecordError: a tensor entered from nowhere (a scripted or compiled callee, a tensor held in a closure).
        TraceError: MMQC_TRACE names a folder that cannot be written.
    """
    check_trace()
    recorder = Recorder(model)
    inputs: list[Any] = []
    shown: list[fx.Node] = []
    notes: list[str] = []
    handles = _track_modules(model, recorder)
    try:
        for i, each in enumerate((batch, *more)):
            wanted = {**each, "use_cache": True} if decode and i == 0 else each
            output = _run(model, recorder, wanted, inputs, shown)
            if decode and i == 0:
                notes += _decode(model, recorder, batch, output, inputs, shown)
    except (NotImplementedError, RuntimeError) as error:
        if not recorder.without_values or isinstance(error, RecordError):
            raise
        raise RecordError(
            f"the forward needs the value of a float, which a model on the meta device does not have (in "
            f"{recorder.last or 'the model'}): {error}. Record a model with weights, random ones if need be."
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    recorder.graph.output(tuple(shown))
    program = Program(recorder.graph, recorder.weights, inputs)
    program.notes = notes
    program.called = recorder.called
    program.sketches = _that_stay(recorder.sketches, program)
    groups: dict[int, list[str]] = {}
    for name, tensor in recorder.weights.items():
        groups.setdefault(id(tensor), []).append(name)
    program.tied = {n: tuple(g) for g in groups.values() if len(g) > 1 for n in g}
    program.hosts = {
        "linear": {n for n, m in model.named_modules() if isinstance(m, nn.Linear) and _is_linear(m, n, recorder.graph)},
        "layer_norm": {
            n for n, m in model.named_modules() if isinstance(m, nn.LayerNorm) and type(m).forward is nn.LayerNorm.forward
        },
    }
    program.clean()
    alive = set(program.graph.nodes)
    program.handed = {name: nodes & alive for name, nodes in recorder.handed.items()}
    return program


def _made_anew(model: nn.Module) -> set[str]:
    """Buffers that no checkpoint has, tables of positions, say: what is written back to them would be lost with the process."""
    others = ((name, m) for name, m in model.named_modules() if not type(m).__module__.startswith("mmqc."))
    return {f"{name}.{buffer}".lstrip(".") for name, m in others for buffer in m._non_persistent_buffers_set}
