"""Plain linears in the place of their relatives while a recorded model is quantized: Conv1D, FalconLinear, pruned linears.

    stand_in     before the model is recorded: whatever read_linear can read becomes an nn.Linear with the same parameters
    step_back    at the end: what is still a float linear gets its own module back, with the weights as they are by then

In between all phases know one kind of linear; a filter function sees it too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from mmqc.checkpoint.linear_like import NotLinearError, Read, computing_hooks, looks_linear, read_linear
from mmqc.config import HEAD
from mmqc.graph.hooks import carry_over, saves
from mmqc.graph.linear import weight_of
from mmqc.nn.plain_linear import PlainLinear
from mmqc.quantization.convert import Journal
from mmqc.quantization.job import Job
from mmqc.quantization.rewrite import Recorded, record_model
from mmqc.report.report import LayerReport, Refusal


@dataclass(frozen=True, eq=False)
class Relative:
    """A module, what was read of it, the linear in its place with the parameters that it had at first, and the way back."""

    module: nn.Module
    read: Read
    linear: nn.Linear
    parameters: dict[str, nn.Parameter | None]
    rehook: Callable[[], None]


@dataclass(frozen=True, eq=False)
class StandIns:
    """The relatives that were replaced, and why others cannot be, by FQN."""

    relatives: dict[str, Relative] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


def stand_in(model: nn.Module, journal: Journal) -> StandIns:
    """Read every module that looks like a linear, and replace those that are no plain ``nn.Linear``."""
    found = StandIns()
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    for fqn, module in list(model.named_modules()):
        if not looks_linear(module):
            continue
        try:
            read = read_linear(module)
            if read.transposed and owners[id(module._parameters["weight"])] > 1:
                raise NotLinearError("its weight is stored as [K, N] and another module has it too")
        except NotLinearError as why:
            found.refused[fqn] = str(why)
            continue
        if type(module) is not nn.Linear or read.computed:
            found.relatives[fqn] = _replace(fqn, module, read, journal)
    return found


def _replace(fqn: str, module: nn.Module, read: Read, journal: Journal) -> Relative:
    linear = nn.Linear(*read.weight.shape[::-1], bias=read.bias is not None, device="meta", dtype=read.weight.dtype)
    for name, value in (("weight", read.weight), ("bias", read.bias)):
        own = None if read.computed else module._parameters.get(name)
        if value is not None:  # the parameter itself, so that whoever shares or moves it goes on doing so
            linear._parameters[name] = nn.Parameter(value, requires_grad=False) if own is None else own
    if read.transposed:
        _transpose(linear.get_parameter("weight"), journal)
    rehook = drop_computing(module, journal)
    carry_over(module, linear)
    journal.place({fqn: linear})
    return Relative(module, read, linear, dict(linear._parameters), rehook)


def drop_computing(module: nn.Module, journal: Journal) -> Callable[[], None]:
    """Take torch's own pre-hooks, which compute a weight, out of the table that a module leaves to the one in its place.

    Returns:
        What puts them back.
    """
    hooks, before = module._forward_pre_hooks, dict(module._forward_pre_hooks)
    for key in computing_hooks(module):
        del hooks[key]

    def restore() -> None:
        if len(hooks) < len(before):
            hooks.clear()
            hooks.update(before)

    journal.note(restore)
    return restore


def _transpose(parameter: nn.Parameter, journal: Journal) -> None:
    parameter.data = parameter.data.t()
    journal.note(lambda: setattr(parameter, "data", parameter.data.t()))


def record_linears(job: Job, found: StandIns) -> Recorded:
    """The recording, in which no pass swaps what cannot be swapped.

    Raises:
        RecordError: the forward cannot be recorded.
    """
    model = job.model
    recorded = record_model(job)
    hosts = recorded.program.hosts
    assert hosts is not None
    for fqn, module in model.named_modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            _keep_fused(fqn, module, recorded, found)
    _mark_head(model, recorded)
    hosts["linear"] -= set(found.refused)
    for fqn in list(hosts["layer_norm"]):
        module = model.get_submodule(fqn)
        if "forward" in vars(module) or saves(module):
            hosts["layer_norm"].discard(fqn)
    return recorded


def _mark_head(model: nn.Module, recorded: Recorded) -> None:
    """Say which linear is the head where the model knows: a recorded ``generate`` leads from its logits to the next token."""
    output_head: Any = getattr(model, "get_output_embeddings", None)
    head = output_head() if output_head is not None else None
    names = {f"{name}.weight" for name, module in model.named_modules() if module is head}
    for node in recorded.program.nodes("linear"):
        if weight_of(node) in names:
            node.meta[HEAD] = True


def _keep_fused(fqn: str, layer: nn.TransformerEncoderLayer, recorded: Recorded, found: StandIns) -> None:
    """Leave a layer alone that reads its parameters in one fused operation whenever it is not recorded."""
    why, hosts = "nn.TransformerEncoderLayer reads its weight in one fused operation", recorded.program.hosts
    assert hosts is not None
    prefix = f"{fqn}." if fqn else ""
    recorded.program.unsure |= {prefix + name: why for name, _ in layer.named_parameters()}
    hosts["layer_norm"] -= {prefix + name for name, _ in layer.named_modules()}
    found.refused.update({prefix + name: why for name, module in layer.named_modules() if isinstance(module, nn.Linear)})


def step_back(model: nn.Module, journal: Journal, found: StandIns, layers: Sequence[LayerReport]) -> list[Refusal]:
    """Give float linears their own modules back; returns those that could not be given back."""
    left, quantized = [], {layer.fqn: layer for layer in layers}
    for fqn, relative in found.relatives.items():
        read, linear, layer = relative.read, relative.linear, quantized.get(fqn)
        if layer is not None:
            layer.note = "; ".join(filter(None, (layer.note, read.note)))
        if model.get_submodule(fqn) is not linear:
            continue
        same = all(linear._parameters[name] is value for name, value in relative.parameters.items())
        if same and read.transposed:
            _transpose(linear.get_parameter("weight"), journal)
        why = "" if same else _write_back(relative, journal)
        if why:
            PlainLinear.of(linear)
            left.append(Refusal(fqn, "", f"it is an nn.Linear now and no {type(relative.module).__name__}: {why}"))
        else:
            relative.rehook()
            journal.place({fqn: relative.module})
    return left


def _write_back(relative: Relative, journal: Journal) -> str:
    """Give a relative the rewritten values in its own layout; or why that cannot be."""
    own, linear = relative.module._parameters, relative.linear
    if relative.read.computed:
        return f"the rewrites changed its weight, which is no longer {relative.read.computed}"
    before = dict(own)
    journal.note(lambda: (own.clear(), own.update(before)))
    if relative.read.transposed:
        grad = linear.weight.requires_grad
        own["weight"] = nn.Parameter(linear.weight.detach().t().contiguous(), requires_grad=grad)
    else:
        own["weight"] = linear.get_parameter("weight")
    own["bias"] = linear._parameters["bias"]
    try:
        biased = read_linear(relative.module).bias is not None
    except NotLinearError:
        biased = own["bias"] is None
    return "" if biased == (own["bias"] is not None) else "the rewrites gave it a bias, of which its class knows nothing"
