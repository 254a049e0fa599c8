"""Which modules compute x Wᵀ + b, whatever their class, and with which W and b; of the others, why not.

    nn.Linear, and subclasses that keep its forward               by its class
    weights that torch computes (pruned, weight norm, ...)        W and b as they stand; what computes them is left behind
    own forwards (Conv1D, FalconLinear)                           recorded alone: one product with the weight, one bias, no more

Shapes:  W [N, K] as a view of what the module stores, which may be its transpose   b [N] or none
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrize
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from mmqc.errors import MmqcError
from mmqc.graph.hooks import FLAGS, PLACED, SEEING, hooks_of, is_patched, own_forward, saves
from mmqc.graph.kinds import kind
from mmqc.graph.linear import operands
from mmqc.graph.program import Program
from mmqc.graph.record import record
from mmqc.nn.eval_mode import evaluating
from mmqc.nn.online_hadamard import HadamardLinear, OnlineHadamard

COMPUTING = {BasePruningMethod: "pruned", WeightNorm: "weight-normed", SpectralNorm: "spectrally normed"}  # their pre-hooks
COMPUTED = ("_orig", "_mask", "_g", "_v", "_u")  # what such a weight is computed from
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
CLOSE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}  # relative, of the output
PRODUCTS = ("linear", "matmul", "addmm")
TURNS = ("t", "getattr:T", "getattr:mT", "transpose")
AROUND = ("add", "view", "reshape", "flatten", "unflatten", "contiguous")


class NotLinearError(MmqcError):
    """Why a module that looks like a linear cannot be replaced by one of ours."""


@dataclass(frozen=True)
class Read:
    """What a module multiplies by and adds.

    Attributes:
        weight: [N, K], of the module's own memory unless it is computed.
        bias: [N] or None.
        transposed: whether the module stores the weight as [K, N].
        computed: how the weight came about, in a word; nothing if it is a parameter.
    """

    weight: Tensor
    bias: Tensor | None
    transposed: bool = False
    computed: str = ""

    @property
    def note(self) -> str:
        """For the report."""
        return f"the weight as it was when it was {self.computed}; that is permanent now" if self.computed else ""


def looks_linear(module: nn.Module) -> bool:
    """Whether a module is of a kind that ``quantize_`` has to say something about: a matrix, perhaps a bias, no children."""
    if isinstance(module, nn.Linear | HadamardLinear):
        return True
    own = not type(module).__module__.startswith("torch.") and not isinstance(module, nn.Embedding | OnlineHadamard)
    weight = module._parameters.get("weight")
    alone = not module._modules and set(module._parameters) <= {"weight", "bias"}
    return own and alone and weight is not None and weight.dim() == 2


def read_linear(module: nn.Module) -> Read:
    """Read a module for which ``looks_linear`` is true; weights may be on the meta device if no parameter is computed.

    Raises:
        NotLinearError: it is something else as well, or could not be replaced without a loss.
    """
    why = _attached(module)
    if why:
        raise NotLinearError(why)
    computed = _computed(module)
    _check_tensors(module, computed)
    if type(module).forward is nn.Linear.forward and own_forward(module) is None:
        return _check(_values(module, computed), module)
    if computed:
        raise NotLinearError(f"its weight is {computed} and {type(module).__name__} has a forward of its own")
    return _check(_proved(module), module)


def _attached(module: nn.Module) -> str:
    """What hangs on the module and would be lost."""
    if is_patched(module):
        return "its forward was replaced (module.forward = ...), and what that does is not known"
    if word := saves(module):
        return f"it has a {word}, and the state dict of a quantized linear is another"
    if module._compiled_call_impl is not None:
        return "it is compiled by itself (module.compile()); quantize first, then compile"
    for name in ("__call__", "_wrapped_call_impl", "_call_impl"):
        if getattr(type(module), name) is not getattr(nn.Module, name) or name in vars(module):
            return f"{type(module).__name__} has a {name} of its own"
    if isinstance(module, HadamardLinear):
        return "it has an online Hadamard of an earlier call: say both in one config, config.replace(rewrites=...)"
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return "the module that holds it reads its weight (nn.MultiheadAttention)"
    for name, part in list(module.named_modules())[1:]:  # a parametrization, which a plain linear has no more
        if words := (*hooks_of(part), *filter(None, [saves(part)])):
            return f"there is a {words[0]} on its {name}, which would run no more"
    offload = getattr(getattr(module, PLACED, None), "offload", False)
    return "accelerate offloads its weight: quantize before device_map places the model, or without offloading" if offload else ""


def _computed(module: nn.Module) -> str:
    if parametrize.is_parametrized(module):
        return "parametrized"
    hooks = module._forward_pre_hooks.values()
    return next((word for hook in hooks for cls, word in COMPUTING.items() if isinstance(hook, cls)), "")


def computing_hooks(module: nn.Module) -> list[int]:
    """The ids of pre-hooks by which torch computes the weight."""
    return [key for key, hook in module._forward_pre_hooks.items() if isinstance(hook, tuple(COMPUTING))]


def _check_tensors(module: nn.Module, computed: str) -> None:
    known = {"weight", "bias", *(f"{n}{end}" for n in ("weight", "bias") for end in (COMPUTED if computed else ()))}
    held = [*module._parameters, *module._buffers, *(c for c in module._modules if not computed or c != "parametrizations")]
    extra = next((name for name in held if name not in known), None)
    if extra is not None:
        raise NotLinearError(f"it holds {extra} beside weight and bias, which a quantized linear would not")


def _values(module: nn.Module, computed: str) -> Read:
    if not computed:
        weight, bias = module.get_parameter("weight"), module._parameters.get("bias")
        return Read(weight, bias)
    with torch.no_grad(), evaluating(module):
        for key in computing_hooks(module):
            module._forward_pre_hooks[key](module, ())
        weight: Any = module.weight
        bias: Any = module.bias
    return Read(weight.detach().clone(), None if bias is None else bias.detach().clone(), computed=computed)


def _check(read: Read, module: nn.Module) -> Read:
    weight, bias = read.weight, read.bias
    data = weight.detach()
    plain = type(data) is Tensor and data.layout == torch.strided
    if not plain:
        raise NotLinearError(
            f"its weight is a {type(data).__name__} ({data.layout}), not a plain tensor: quantized or sharded already"
        )
    if weight.dim() != 2 or weight.dtype not in FLOATS:
        raise NotLinearError(f"its weight is {str(weight.dtype).removeprefix('torch.')} {list(weight.shape)}, not a float matrix")
    if not weight.numel():
        raise NotLinearError(f"its weight is empty, {list(weight.shape)}")
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype not in FLOATS):
        raise NotLinearError(f"its bias is {str(bias.dtype).removeprefix('torch.')} {list(bias.shape)}, not a float an output")
    return read


@torch.no_grad()
def _proved(module: nn.Module) -> Read:
    """The weight and bias of a module with an own forward, whose recording shows that it is a linear."""
    name, weight, bias = type(module).__name__, module.get_parameter("weight"), module._parameters.get("bias")
    if weight.dim() != 2 or weight.dtype not in FLOATS or not weight.numel() or type(weight.detach()) is not Tensor:
        raise NotLinearError(f"{name} has a forward of its own, and its weight is no float matrix")
    refusal = NotLinearError(f"{name} has a forward of its own that does more than x Wᵀ + b, or something else")
    parameters = list(inspect.signature(module.forward).parameters.values())
    takes = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    if not takes or any(p.default is p.empty and p.kind is not p.VAR_KEYWORD for p in parameters[1:]):
        raise refusal
    for transposed in (False, True):
        matrix = weight.t() if transposed else weight
        x = torch.sin(torch.arange(6 * matrix.shape[1], device=weight.device)).view(2, 3, -1).to(weight.dtype)
        try:
            with evaluating(module):
                prog = record(_bare(module), {takes[0]: x})
                y = _bare(module)(x)
        except Exception:  # its own code, whatever it raises: the width does not fit, or it is no linear
            continue
        if _is_product(prog, bias is not None, transposed) and _equal(y, F.linear(x, matrix, bias)):
            return Read(matrix, bias, transposed)
    raise refusal


def _bare(module: nn.Module) -> nn.Module:
    """The module without hooks, sharing all else."""
    bare = copy.copy(module)
    for name in (*SEEING, *FLAGS):
        object.__setattr__(bare, name, OrderedDict())
    return bare


def _is_product(prog: Program, biased: bool, transposed: bool) -> bool:
    """Whether the graph multiplies once by the weight, stored like this, and adds the bias once, if there is one."""
    calls = [n for n in prog.graph.nodes if n.op in ("call_function", "call_method")]
    read = [str(n.target) for n in prog.graph.nodes if n.op == "get_attr"]
    products = [n for n in calls if kind(n) in PRODUCTS]
    if len(products) != 1 or sorted(read) != (["bias", "weight"] if biased else ["weight"]):
        return False
    word, turns = kind(products[0]), 0
    weight = products[0].args[-1] if word == "addmm" else operands(products[0]).get("weight")
    while isinstance(weight, fx.Node) and kind(weight) in TURNS:
        weight, turns = weight.args[0], turns + 1
    if getattr(weight, "target", None) != "weight" or (word == "linear") != (turns % 2 == int(transposed)):
        return False
    adds = [n for n in calls if kind(n) == "add"]
    bias_alone = all(any(isinstance(a, fx.Node) and a.target == "bias" for a in n.args) and not n.kwargs for n in adds)
    rest = [n for n in calls if kind(n) not in PRODUCTS and kind(n) not in AROUND]
    return bias_alone and len(rest) == turns


def _equal(y: Any, expected: Tensor) -> bool:
    if not isinstance(y, Tensor) or y.shape != expected.shape or y.dtype != expected.dtype:
        return False
    error = 0.0 if y.is_meta else float((y.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))
    return error < CLOSE[y.dtype]
