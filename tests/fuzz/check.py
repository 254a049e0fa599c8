"""Runs a case: quantize, call, compare with the float model; says what came of it.

Accepted: equal outputs; a refusal (an error of mmqc's own before anything changed); a guard (an error of mmqc's own in a call).
Wrong: other outputs in silence, a foreign error out of mmqc, a model that a refusal left changed, a hook that is not called.
"""

from __future__ import annotations

import copy
import tempfile
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._dynamo.exc import InternalTorchDynamoError
from torch.func import functional_call
from transformers.utils import logging

import mmqc
import mmqc.backend
from mmqc.recipes import awq, gptq, mquant, quarot, resq, rotate, rtn, smoothquant
from tests.fuzz.build import Pretrained, batch, build, features
from tests.fuzz.compare import Oracle, decides, distance, leaves
from tests.fuzz.grammar import CHANGES, Data

logging.disable_progress_bar()
HOME = str(Path(mmqc.__file__).parent)
GOOD = ("equal", "refused", "guarded")
BAD = ("wrong", "crash", "changed", "hook", "broken")
VIEW = "view size is not compatible with input tensor's size and stride"
ROUNDS = 4  # of calls by each of two threads
NAMES = {"awq": awq, "gptq": gptq, "mquant": mquant, "quarot": quarot, "resq": resq, "rotate": rotate, "rtn": rtn}


@dataclass
class Outcome:
    """What came of a case.

    Attributes:
        kind: "equal", "refused", "guarded", "rewrite_error" (the net caught what the analysis let through), "wrong", "crash",
            "changed", "hook", "broken": the fuzzer's own error, or "invalid": the float model itself fails.
        detail: what is said of it.
        key: failures of one kind and key are taken for one defect while shrinking.
        rewritten: whether a space was rotated or a gain folded; quantized: how many linears are.
    """

    kind: str
    detail: str = ""
    key: str = ""
    rewritten: bool = False
    quantized: int = 0
    sites: Counter[str] = field(default_factory=Counter)


def config_of(recipe: str) -> mmqc.QuantConfig:
    """The config of a recipe's words."""
    name, _, more = recipe.removesuffix(" without data").partition(" | ")
    config = eval(name, {**NAMES, "smoothquant": smoothquant})  # words of the grammar alone
    if more == "w8":
        config = rtn(8).replace(rewrites=config.rewrites)
    return config


def run(case: Data) -> Outcome:
    """What comes of a case."""
    program, dtype = case["program"], getattr(torch, case["dtype"])
    model, reference = build(program, dtype), build(program, dtype)
    calibration = [batch(program, data, dtype) for data in case["calibration"]]
    try:
        for each in calibration:  # both: a forward may write to its own weights (an embedding's max_norm)
            reference(**copy.copy(each))
            model(**copy.copy(each))
    except Exception as error:
        return Outcome("invalid", f"{type(error).__name__}: {error}", type(error).__name__)
    before = snapshot(model)
    recipe, how = case["recipe"], case.get("compile", "")
    untouched = copy.deepcopy(model) if how.endswith("option") else None
    try:
        data = None if recipe.endswith("without data") else calibration
        report = mmqc.quantize_(model, config_of(recipe), calibration=data, progress=False)
    except Exception as error:
        return after_refusal(error, model, before, dtype is torch.bfloat16 and decides(features(program)))
    if untouched is not None:
        model, options = untouched, {"config": report.config}
    else:
        options = {}
    sites = Counter({record.name: record.n_sites for record in report.passes})
    rewritten = any(sites[name] for name in sites if name.startswith(("fold", "fuse_rotation", "insert")))
    oracle = Oracle(case, model, reference, calibration, rewritten)
    outcome = Outcome("equal", rewritten=rewritten, quantized=len(report.layers), sites=sites)
    with compiling(how, model, options):
        for call in case["calls"]:
            found = compare(case, call, model, reference, oracle)
            if found is not None:
                outcome.kind, outcome.detail, outcome.key = found
            if found is not None and outcome.kind != "guarded":
                break
    return outcome


def after_refusal(error: Exception, model: nn.Module, before: Data, tossed: bool) -> Outcome:
    """What an error out of ``quantize_`` means; ``tossed``: rounding may decide which way the model goes."""
    words, place = f"{type(error).__name__}: {error}", where(error)
    differs = difference(before, snapshot(model))
    if differs:
        return Outcome("changed", f"{differs} after {words} at {place}", differs.split(":")[0])
    if isinstance(error, mmqc.RewriteError) and not tossed:
        return Outcome("rewrite_error", words, place)
    if deliberate(error):
        return Outcome("refused", words, f"{type(error).__name__} at {place}")
    return Outcome("crash", f"{words} at {place}", f"{type(error).__name__} at {place}")


def compare(case: Data, call: Data, model: nn.Module, reference: nn.Module, oracle: Oracle) -> tuple[str, str, str] | None:
    """Makes one call of both models; the kind, detail and key of what is wrong, or None."""
    given = batch(case["program"], call, getattr(torch, case["dtype"]))
    if call["how"] in CHANGES:
        for each in (model, reference):
            change(each, call["how"], call["seed"])
    expected, failed = attempt(lambda: reference(**given))
    hooks: list[Any] = model.hooks  # type: ignore[assignment]
    counts = [hook.calls for hook in hooks]
    got, error = attempt(lambda: WAYS.get(way_of(case, call), plain)(model, given))
    if failed is not None or error is not None:
        return raised(case, call, reference, given, failed, error)
    if call["how"] in ("plain", "again", "train") and not case.get("compile"):
        fired = [hook.calls - count for hook, count in zip(hooks, counts, strict=True)]
        wanted = [(2 if call["how"] == "again" else 1) * n for n in counted(reference, given)]
        if fired != wanted and not oracle.takes_other_ways:
            return "hook", f"hooks ran {fired} times, with the float model {wanted}: {call}", "hook"
    for result in got:
        what = oracle.objection(call, given, expected, result)
        if what:
            return "wrong", f"{what}: {call}", "outputs"
    return None


def raised(
    case: Data, call: Data, reference: nn.Module, given: Data, failed: Exception | None, error: Exception | None
) -> tuple[str, str, str] | None:
    """The same of a call in which the float model failed, or the other, or both."""
    if error is None and VIEW in str(failed):
        return None  # of a tensor's strides, not its values
    if error is None:
        return "wrong", f"no error, where the float model says {failed!r}: {call}", "no error"
    dynamos = isinstance(error, InternalTorchDynamoError) and where(error) == "the model"  # f"{number:.1f}" of a symbol, say
    if failed is not None or (case.get("compile") and (dynamos or not compiles(reference, given))):
        return None
    words, place = f"{type(error).__name__}: {error} at {where(error)} in {call}", f"{type(error).__name__} at {where(error)}"
    return ("guarded" if deliberate(error) else "crash"), words, place


def counted(model: Any, given: Data) -> list[int]:
    """How often each hook of a model runs in a call."""
    before = [hook.calls for hook in model.hooks]
    if before:
        model(**given)
    return [hook.calls - count for hook, count in zip(model.hooks, before, strict=True)]


def attempt(work: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """The result of a call, or its error."""
    try:
        with torch.no_grad():
            return work(), None
    except Exception as error:
        return None, error


def where(error: BaseException) -> str:
    """The function of mmqc that is innermost on the way to an error."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(HOME)]
    return f"{frames[-1].filename.removeprefix(HOME)}:{frames[-1].name}" if frames else "the model"


def deliberate(error: Exception) -> bool:
    """Whether mmqc itself raised it, and in words."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    own = last.filename.startswith(HOME) and str(last.line).startswith("raise ")  # not by torch, on mmqc's behalf
    return isinstance(error, mmqc.MmqcError) or (own and isinstance(error, ValueError | RuntimeError) and len(str(error)) > 20)


# --- ways to call a model -----------------------------------------------------------------------------------------------


def plain(model: nn.Module, given: Data) -> list[Any]:
    return [model(**given)]


def again(model: nn.Module, given: Data) -> list[Any]:
    return [model(**given), model(**given)]


def both(other: nn.Module, model: nn.Module, given: Data) -> list[Any]:
    """Of another model and of this one, also where the other raises: a forward may write to its own weights."""
    try:
        first = other(**given)
    finally:
        own = model(**given)
    return [first, own]


def copied(model: nn.Module, given: Data) -> list[Any]:
    return both(copy.deepcopy(model), model, given)


def state(model: nn.Module, given: Data) -> list[Any]:
    other = copy.deepcopy(model)
    for tensor in other.state_dict().values():
        tensor.zero_()
    other.load_state_dict(model.state_dict())
    return both(other, model, given)


def saved(model: nn.Module, given: Data) -> list[Any]:
    if not isinstance(model, Pretrained) or model.hooks or "tied" in features_of(model):
        return [model(**given)]
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = Pretrained.from_pretrained(folder, dtype=model.net.dtype)
    return both(loaded.eval(), model, given)


def way_of(case: Data, call: Data) -> str:
    """How the model is called: not by threads where they race in the float model, too, whose embedding writes to its weights."""
    races = call["how"] == "threads" and case["program"].get("embed") == "max_norm"
    return "plain" if races else call["how"]


def threads(model: nn.Module, given: Data) -> list[Any]:
    """Two threads at once; the other one's batch is cut to other sizes, and what it gets is not looked at."""
    short = {k: v[:, 1:] if isinstance(v, Tensor) and k != "images" and "images" not in given else v for k, v in given.items()}
    got: list[Any] = []
    errors: list[Exception] = []

    def work(arguments: Data, into: list[Any]) -> None:
        for _ in range(ROUNDS):
            result, error = attempt(lambda: model(**arguments))
            into.append(result) if error is None else errors.append(error)

    pair = [threading.Thread(target=work, args=(given, got)), threading.Thread(target=work, args=(short, []))]
    for thread in pair:
        thread.start()
    for thread in pair:
        thread.join()
    if errors and not got:
        raise errors[0]
    return got


def train(model: nn.Module, given: Data) -> list[Any]:
    """Through train mode and back, as trainers do between evaluations."""
    return [model.train().eval()(**given)]


def functional(model: nn.Module, given: Data) -> list[Any]:
    """With its own parameters and buffers as arguments."""
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return [functional_call(model, own, args=(), kwargs=given)]


WAYS: dict[str, Callable[[nn.Module, Data], list[Any]]] = {
    "plain": plain,
    "again": again,
    "threads": threads,
    "copied": copied,
    "state": state,
    "saved": saved,
    "train": train,
    "functional": functional,
}


def features_of(model: Any) -> set[str]:
    found = features(model.config.program)
    return found | {"tied"} if any("tied" in word or "again" in word for word in found) else found


@contextmanager
def compiling(how: str, model: nn.Module, options: Data) -> Iterator[None]:
    """Calls of the model are compiled; with "traced", the graphs that mmqc made run as they are."""
    if not how:
        yield
        return
    torch._dynamo.reset()
    model.compile(backend="mmqc", options=options)
    without = patch.object(mmqc.backend, "_lower", lambda gm, inputs, request, record: gm.forward)
    with without if how.startswith("traced") else nullcontext():
        yield
    torch._dynamo.reset()


def compiles(model: nn.Module, given: Data) -> bool:
    """Whether Dynamo can compile a call of the float model at all."""
    torch._dynamo.reset()
    return attempt(lambda: torch.compile(model, backend="eager")(**given))[1] is None


@torch.no_grad()
def change(model: nn.Module, how: str, seed: int) -> None:
    """Weights change behind a compiled model's back, as trainers and users change them."""
    linears = [(name, m) for name, m in model.named_modules() if type(m) is nn.Linear]
    if not linears:
        return
    name, linear = linears[seed % len(linears)]
    if how == "in_place":
        linear.weight.mul_(1.5)
    elif how == "data":
        linear.weight.data = linear.weight.data * 1.5
    elif how == "assign":
        linear.load_state_dict({n: t * 1.5 for n, t in linear.state_dict().items()}, assign=True)
    elif how == "parameter":
        linear.weight = nn.Parameter(linear.weight * 1.5, requires_grad=False)
    else:
        made = nn.Linear(linear.in_features, linear.out_features, linear.bias is not None).to(linear.weight)
        made.load_state_dict({n: t * 1.5 for n, t in linear.state_dict().items()})
        model.set_submodule(name, made.eval().requires_grad_(False))


# --- whether a refusal left the model alone -----------------------------------------------------------------------------


def snapshot(model: nn.Module) -> Data:
    """All that a refusal must leave alone, by name."""
    found: Data = {}
    for name, module in model.named_modules(remove_duplicate=False):
        hooks = (module._forward_hooks, module._forward_pre_hooks)
        found[f"module: {name}"] = (id(module), type(module), module.training, [list(map(id, h.values())) for h in hooks])
    own = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding) and m.max_norm}  # its forward writes to it
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        if id(tensor) in own:
            continue
        found[f"tensor: {name}"] = (id(tensor), tensor.requires_grad, tensor.detach().clone())
    return found


def difference(before: Data, after: Data) -> str:
    """The first thing that differs, or nothing."""
    if before.keys() != after.keys():
        return f"names: {sorted(before.keys() ^ after.keys())[:3]}"
    for name, old in before.items():
        new = after[name]
        same = old[:2] == new[:2] and torch.equal(old[2], new[2]) if name.startswith("tensor") else old == new
        if not same:
            return name
    return ""


__all__ = ["BAD", "GOOD", "Outcome", "distance", "leaves", "run"]
