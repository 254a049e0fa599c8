"""The backend quantizes by itself: the passes of ``quantize_``, on each of Dynamo's graphs as it arrives.

What a graph alone cannot show (other readers of a stream, the ranges of activations) comes with the config: the
``statistics`` that ``QuantReport.config`` carries.  One ``Session`` per ``torch.compile`` call holds what its graphs
share: the model, each derived weight once, and the visual mask: that of the call's inputs, or, where the model is called in
another way, of the token ids that one of its graphs looks up.
"""

from __future__ import annotations

import functools
import logging
import re
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from mmqc.checkpoint.linear_like import NotLinearError, looks_linear, read_linear
from mmqc.compiler.stamp import Stamp
from mmqc.config import ConfigError, QuantConfig
from mmqc.front.front import attached
from mmqc.graph.capture import Captured, from_dynamo, keep_notes, outermost_module, static_examples, to_graph_module
from mmqc.graph.kinds import kind
from mmqc.graph.linear import operands, weight_of
from mmqc.graph.plan import Plan
from mmqc.graph.program import VISUAL, PassRecord, Program
from mmqc.graph.runner import run
from mmqc.nn.modality import ModalityContext
from mmqc.ops import nonfinite
from mmqc.pipeline import FACTS, exact_passes, quantizing_passes
from mmqc.solvers import Quantized

logger = logging.getLogger(__name__)


class _Call(threading.local):
    """The visual mask of the thread's last call."""

    visual: Tensor | None = None


@dataclass
class Session:
    """What the graphs of one compiled model share."""

    config: QuantConfig
    model: weakref.ref[nn.Module]
    weights: dict[tuple[str, tuple[str, ...]], Tensor] = field(default_factory=dict)
    solved: dict[tuple[str, tuple[str, ...]], Quantized] = field(default_factory=dict)
    call: _Call = field(default_factory=_Call)
    stamps: dict[str, tuple[int, Stamp]] = field(default_factory=dict)

    def forget_changed(self, prog: Program) -> None:
        """Drop what was derived from weights that have changed since."""
        now = {fqn: weight for fqn, weight in prog.weights.items() if isinstance(weight, Tensor)}
        changed = {fqn for fqn, weight in now.items() if fqn in self.stamps and not self.is_same(fqn, weight)}
        if changed:
            self.weights.clear()
            self.solved.clear()
        new = (fqn for fqn in now if fqn in changed or fqn not in self.stamps)
        self.stamps.update((fqn, (id(now[fqn]), Stamp([now[fqn]]))) for fqn in new)

    def is_same(self, fqn: str, weight: Tensor) -> bool:
        """Whether a weight that was seen before is that tensor, unchanged."""
        known, stamp = self.stamps[fqn]
        return known == id(weight) and stamp.same([weight])

    @functools.cached_property
    def plan(self) -> Plan | None:
        """The whole model's plan."""
        return Plan.from_dict(self.config.statistics["plan"]) if self.config.statistics is not None else None

    def find_visual(self) -> Tensor | None:
        """The visual mask of the call in progress, from what the model was given; None if that is not known."""
        front = attached(self.owner())
        known = front is not None and front.call.inputs.keys() & {"input_ids", "mm_token_type_ids"}
        if front is not None and known and self.config.statistics is not None:
            context = ModalityContext(self.config.statistics["visual_token_ids"])
            self.call.visual = context.find(self.owner(), (), front.call.inputs)
        return self.call.visual

    def owner(self) -> nn.Module:
        """The model whose call is being compiled."""
        model = self.model()
        assert model is not None
        return model


_SESSIONS: weakref.WeakKeyDictionary[nn.Module, list[Session]] = weakref.WeakKeyDictionary()


def session_for(config: QuantConfig) -> Session:
    """The session of the model that is being called and this config.

    Raises:
        ConfigError: no module is being called, or the config needs data that it does not hold.
    """
    model = outermost_module()
    if model is None:
        raise ConfigError("options={'config': ...} needs a torch.nn.Module to be compiled: no module is being called")
    known = _SESSIONS.setdefault(model, [])
    found = next((s for s in known if s.config is config or s.config == config), None)
    if found is None:
        check(config)
        check_layouts(config, model)
        found = Session(config, weakref.ref(model))
        known.append(found)
    return found


@dataclass(frozen=True)
class Rewritten:
    """A rewritten graph and how to call it: which of Dynamo's arguments it takes, and what happens around it."""

    gm: fx.GraphModule
    inputs: list[Any]
    records: list[PassRecord]
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]]


def check(config: QuantConfig) -> None:
    """Raise unless the backend can apply ``config`` without data."""
    if config.needs_calibration:
        missing = "gptq needs the calibration data, as awq_clip does" if config.statistics is not None else "it holds no statistics"
        raise ConfigError(
            f"this config needs calibration and {missing}: calibrate with mmqc.quantize_ (on a copy), then pass report.config, "
            "or compile the quantized model itself; rtn and mse_clip solvers work from report.config"
        )


def check_layouts(config: QuantConfig, model: nn.Module) -> None:
    """Raise where ``config`` was calibrated on a weight that lies the other way round in ``model``'s graphs (a Conv1D's)."""
    for fqn, module in model.named_modules() if config.statistics is not None else ():
        if looks_linear(module) and _is_transposed(module):
            raise ConfigError(
                f"{fqn} is a {type(module).__name__}, whose weight is stored as [K, N]; this config was calibrated on it as "
                "[N, K]: quantize the model with mmqc.quantize_, and compile the result"
            )


def _is_transposed(module: nn.Module) -> bool:
    try:
        return read_linear(module).transposed
    except NotLinearError:
        return False


def quantize_graph(gm: fx.GraphModule, example_inputs: Sequence[Any], session: Session) -> Rewritten | None:
    """Rewrite one of Dynamo's graphs; None where it holds nothing to quantize and nothing that other graphs need."""
    config = session.config
    with unset_fake_temporarily():
        session.find_visual()  # of the first call: its hooks do not run yet
    if _computes_nothing(gm):
        return None
    if not any(kind(n) in ("linear", "conv", "embedding", "add", "layer_norm") for n in gm.graph.nodes):
        return None
    if (inner := _inner_graphs(gm)) is not None:
        logger.warning("a graph is compiled as it is, unquantized: it calls %s, whose body mmqc does not look into", inner)
        return None
    captured = from_dynamo(gm, example_inputs, session.owner())
    publish = _publisher(captured, _token_ids(captured.program, config), session)
    if not _anything_to_do(captured.program, session):
        return None if publish is None else Rewritten(gm, list(example_inputs), [], publish)
    first = _rewrite(captured, session)
    mask = next((n for n in captured.program.graph.nodes if n.op == "placeholder" and n.target == VISUAL), None)
    inputs = [example_inputs[i] for i in captured.arguments]
    if mask is not None:
        inputs.append(_mask_like(mask))
    blocks = _Blocks(gm, list(example_inputs), session, captured, first, mask is not None)

    def wrap(compiled: Callable[..., Any]) -> Callable[..., Any]:
        call = blocks.around(compiled)
        return call if publish is None else publish(call)

    origins = [*captured.arguments, *([] if mask is None else [None]), *([None] * len(first.weights))]
    keep_notes(first.gm, gm, origins, len(first.weights))
    return Rewritten(first.gm, [*inputs, *static_examples(first.weights)], captured.program.records, wrap)


class Outside:
    """Parameters of other graphs that this one's weights were derived from, as the model has them now."""

    def __init__(self, model: nn.Module) -> None:
        self.model = weakref.ref(model)
        self.names: list[str] = []

    def __call__(self, fqn: str) -> Tensor:
        """The parameter of this name: ``Program.outside``."""
        self.names.append(fqn)
        return self.parameter(fqn)

    def parameter(self, fqn: str) -> Tensor:
        """Of the model as it is now."""
        model = self.model()
        assert model is not None
        return model.get_parameter(fqn)

    def now(self) -> list[Tensor]:
        """All that were asked for."""
        return [self.parameter(name) for name in self.names]


@dataclass(frozen=True)
class _Variant:
    """A graph rewritten for one block's parameters: its text without names, to compare, its derived weights, and the block."""

    gm: fx.GraphModule
    shape: str
    weights: list[Tensor]
    outside: Outside
    place: tuple[bool, weakref.ref[nn.Module], tuple[str, ...]]


def _rewrite(captured: Captured, session: Session) -> _Variant:
    """Run all passes and compute the weights, each once per session."""
    prog, config = captured.program, session.config
    session.forget_changed(prog)
    place = nonfinite.propagating, session.model, tuple(prog.weights)
    prog.statistics = config.statistics
    prog.plan = session.plan
    prog.outside = outside = Outside(session.owner())
    run(prog, exact_passes(config), FACTS, text=True)
    run(prog, quantizing_passes(cache=session.solved), FACTS, text=True)
    if nonfinite.propagating:
        _poison(prog)
    gm, names = to_graph_module(prog)

    def value(fqn: str) -> Tensor:
        key = (fqn, tuple(step.formula for step in prog.derived(fqn)))
        if not key[1]:
            return prog.weights[fqn].detach()
        if key not in session.weights:
            session.weights[key] = prog.value(fqn).detach()
        return session.weights[key]

    weights = [value(name) for name in names]
    text = str(gm.code)
    for i, name in enumerate(names):
        text = text.replace("w_" + re.sub(r"\W", "_", name), f"w{i}")
    return _Variant(gm, text + str([tuple(w.shape) for w in weights]), weights, outside, place)


def _poison(prog: Program) -> None:
    """Let NaN and infinity through static scales, as the modules do (ops/nonfinite.py)."""
    for node in prog.nodes("scaled_matmul"):
        codes = node.args[0]
        assert isinstance(codes, fx.Node)
        with prog.graph.inserting_after(node):
            new = prog.graph.call_function(nonfinite.poisoned, (node, codes.args[0]))
        new.meta.update(node.meta)
        node.replace_all_uses_with(new, delete_user_cb=lambda user, new=new: user is not new)


class _Blocks:
    """One compiled graph, called with the parameters of several blocks of the model.

    Dynamo passes parameters as arguments and guards their shapes alone, so the graph of block 0 also runs block 1.
    Each set of parameters gets derived weights of its own, at its first call and whenever one of them has changed.
    """

    def __init__(
        self, gm: fx.GraphModule, example_inputs: list[Any], session: Session, captured: Captured, first: _Variant, masked: bool
    ) -> None:
        self.gm, self.examples, self.session = gm, example_inputs, session
        self.arguments, self.parameters, self.first, self.masked = (captured.arguments, captured.parameters, first, masked)
        self.known: dict[tuple[int, ...], tuple[Stamp, _Variant]] = {}
        self.keep([example_inputs[p] for p in self.parameters], first)

    def keep(self, parameters: list[Tensor], variant: _Variant) -> None:
        """Remember the weights for these parameters, and forget those of tensors that were in their place before."""
        gone = [key for key, (_, old) in self.known.items() if old.place == variant.place or old.place[1]() is None]
        for key in gone:
            del self.known[key]
        tensors = [*parameters, *variant.outside.now()]
        self.known[variant.place[0], *map(id, parameters)] = Stamp(tensors), variant

    def variant(self, args: Sequence[Any]) -> _Variant:
        """The weights for these parameters."""
        parameters = [args[p] for p in self.parameters]
        key = (nonfinite.propagating, *map(id, parameters))
        stamp, variant = self.known.get(key, (None, self.first))
        if stamp is None or not stamp.same(parameters + variant.outside.now()):
            examples = list(self.examples)
            for position, parameter in zip(self.parameters, parameters, strict=True):
                examples[position] = parameter
            session = session_for(self.session.config)  # Dynamo runs one graph for every model of a class
            with torch.no_grad():
                variant = _rewrite(from_dynamo(self.gm, examples, session.owner()), session)
            self.keep(parameters, variant)
        return variant

    def around(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Dynamo's calling convention outside, the compiled graph's inside."""

        def call(*args: Any) -> Any:
            variant = self.variant(args)
            # a block with other outlier channels, say, has other shapes: it runs its own graph, uncompiled
            run_it = compiled if variant.shape == self.first.shape else variant.gm
            mask = (_visual_of(self.session),) if self.masked else ()
            return run_it(*(args[i] for i in self.arguments), *mask, *variant.weights)

        return call


def _anything_to_do(prog: Program, session: Session) -> bool:
    """Whether the graph has a linear to quantize, or starts or normalises a stream whose mean the plan removes."""
    if session.config.statistics is None:
        return bool(prog.nodes("linear"))
    assert session.plan is not None
    ours = {fqn for stream in session.plan.streams for fqn in (*stream.roots, *stream.norms)}
    return any(weight_of(n) in session.config.statistics["linears"] for n in prog.nodes("linear")) or bool(ours & set(prog.weights))


def _inner_graphs(gm: fx.GraphModule) -> str | None:
    """An operation that is given a function (checkpointing, a condition), if the graph has one."""
    inner = {n for n in gm.graph.find_nodes(op="get_attr") if isinstance(getattr(gm, str(n.target), None), fx.GraphModule)}
    return next((str(user.target) for n in inner for user in n.users), None)


def _computes_nothing(gm: fx.GraphModule) -> bool:
    """Whether every result is empty, that of a batch without rows: there is no value from which a space could be found."""
    results = [
        v for n in gm.graph.find_nodes(op="output")[0].all_input_nodes if isinstance(v := n.meta.get("example_value"), Tensor)
    ]
    return bool(results) and all(any(type(n) is int and n == 0 for n in v.shape) for v in results)


def _token_ids(prog: Program, config: QuantConfig) -> fx.Node | None:
    """The placeholder with the token ids: what the token embedding is looked up with."""
    names = (config.statistics or {}).get("token_embeddings", ())
    for node in prog.nodes("embedding"):
        weight = operands(node)["weight"]
        index = operands(node)["input"]
        if isinstance(weight, fx.Node) and weight.target in names and isinstance(index, fx.Node) and index.op == "placeholder":
            return index
    return None


def _publisher(captured: Captured, token_ids: fx.Node | None, session: Session) -> Any:
    if token_ids is None or session.config.statistics is None:
        return None
    placeholders = [n for n in captured.program.graph.nodes if n.op == "placeholder"]
    position = captured.arguments[placeholders.index(token_ids)]
    visual_ids = torch.tensor(session.config.statistics["visual_token_ids"])

    def wrap(compiled: Callable[..., Any]) -> Callable[..., Any]:
        def publish(*args: Any) -> Any:
            ids = args[position]
            if attached(session.owner()) is None:
                session.call.visual = torch.isin(ids, visual_ids.to(ids.device))
            return compiled(*args)

        return publish

    return wrap


def _visual_of(session: Session) -> Tensor:
    visual = session.find_visual()
    if visual is None:
        raise RuntimeError(
            "a graph with per-modality scales ran before any graph that looks up token ids, so the visual tokens are unknown: "
            "call the model with input_ids"
        )
    return visual


def _mask_like(mask: fx.Node) -> Tensor:
    """An example of the mask with the (possibly symbolic) sizes of the activations that it is for."""
    user = next(iter(mask.users))
    source = user.args[0]
    while isinstance(source, fx.Node):
        example = source.meta.get("example_value")
        if isinstance(example, Tensor) and example.dim() >= 2:
            return example.new_empty(example.shape[:-1], dtype=torch.bool)
        source = next((n for n in source.all_input_nodes if n.op != "get_attr"), None)
    raise RuntimeError(f"no shape is known for the input of {user.name}")
