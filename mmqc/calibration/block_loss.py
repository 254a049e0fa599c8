"""The output error of the module around some linears when their weights are rounded: AWQ's loss for q, k, v, gate and up.

    L(s) = sum over rows of  a_m |f(x; Q(W diag(s)) diag(1/s)) - f(x; W)|²      f: the module, run again; a: weight of the modality

Why:     q and k act through the softmax, gate and up through the non-linearity: how much their errors matter, their own outputs
         do not say.
Source:  Lin et al., arXiv:2306.00978, equation 4, and their code: the loss is that of the attention or of the MLP for linears
         behind a norm, and the linear's own otherwise.
Nothing recorded is replayed: the module is called with the arguments that the model's own code gave it for each batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mmqc.calibration.blocks import NotStreamableError, leaves_of
from mmqc.calibration.calibrate import weighted_rows
from mmqc.calibration.observe import Call, Output
from mmqc.calibration.spool import Spool
from mmqc.distributed.ranks import ALONE, Ranks
from mmqc.nn.modality import ModalityContext


def holder(model: nn.Module, linears: Sequence[str], normed: bool, block: str = "") -> str:
    """FQN of the module whose output judges ``linears``: the smallest one around them; empty: the linear itself.

    Args:
        model: has the modules.
        linears: module FQNs.
        normed: they read a norm's output; a single linear (a fused qkv) is then judged by the module around it.
        block: FQN of the module that is run; no larger one can judge.
    """
    if len(linears) == 1 and not normed:
        return ""
    path = linears[0].split(".")[:-1]
    while any(name.split(".")[: len(path)] != path for name in linears):
        path = path[:-1]
    while path and isinstance(model.get_submodule(".".join(path)), nn.ModuleList | nn.ModuleDict):
        path = path[:-1]
    name = ".".join(path)
    return name if name and f"{name}.".startswith(f"{block}." if block else "") else ""


class Calls:
    """The calls of one module, and what it returned; ``errors`` repeats them with other weights.

    Attributes:
        name: FQN of the module.
        reason: why they cannot be repeated; empty if they can.
        ranks: each repeats its own.
    """

    def __init__(
        self,
        model: nn.Module,
        name: str,
        spool: Spool,
        device: torch.device,
        context: ModalityContext | None,
        language: bool,
        ranks: Ranks = ALONE,
    ) -> None:
        self.ranks = ranks
        self.model, self.name, self.spool, self.device = model, name, spool, device
        self.context, self.language = context, language
        self.reason = ""
        self.calls: list[tuple[list[Any], Any, Tensor | None]] = []
        self.wanted: list[Any] = []

    @property
    def places(self) -> dict[Call | Output, Callable[..., None]]:
        """What stores every call, for ``observe``."""
        return {Call(self.name): self._enter, Output(self.name): self._leave}

    def _enter(self, args: Any, kwargs: Any) -> None:
        try:
            leaves, spec = leaves_of(self.name, args, kwargs)
        except NotStreamableError as error:
            self.reason = f"{self.name} cannot be run again: {error.reason}"
            return
        visual = None if self.context is None else self.context.visual
        self.calls.append(([self.spool.put(leaf) for leaf in leaves], spec, None if visual is None else visual.clone()))

    def _leave(self, output: Any, *call: Any) -> None:
        if not self.reason:
            self.wanted.append(self.spool.put(_first(output)))

    def errors(self, tried: Iterable[Mapping[str, Tensor]], row_weights: Mapping[str, float]) -> list[float]:
        """The loss over all calls of all ranks, with each of several ``weights`` (by parameter FQN) for the module's own."""
        known = self.ranks.collected([[self._terms(weights, row_weights) for weights in tried]])
        # of each the terms in the batches' order, whoever has them
        return [sum(term for terms in parts for term in terms) for parts in zip(*known, strict=True)]

    def _terms(self, weights: Mapping[str, Tensor], row_weights: Mapping[str, float]) -> list[float]:
        """What this rank's calls lose, one by one."""
        module = self.model.get_submodule(self.name)
        terms = [torch.zeros((), dtype=torch.float64, device=self.device)]
        with _replaced(self.model, weights):
            for (tickets, spec, visual), wanted in zip(self.calls, self.wanted, strict=True):
                args, kwargs = pytree.tree_unflatten([self.spool.get(t, self.device) for t in tickets], spec)
                with nullcontext() if self.context is None else self.context.during(visual):
                    error = _first(module(*args, **kwargs)) - self.spool.get(wanted, self.device)
                    parts = weighted_rows(error, self.language, self.context, row_weights)
                for weight, rows in parts:
                    terms.append(weight * torch.linalg.vector_norm(rows, dtype=_wide(rows)).double().square())
        return torch.stack(terms).tolist()

    def agree(self) -> None:
        """A reason of one rank is everyone's: all judge by the same loss."""
        self.reason = next(filter(None, self.ranks.collected([self.reason])), "")


def _first(output: Any) -> Tensor:
    """The module's result: attention returns its weights behind it."""
    return next(leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)).detach()


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


@contextmanager
def _replaced(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Other values in parameters, which keep their identity."""
    parameters = {fqn: model.get_parameter(fqn) for fqn in weights}
    before = {fqn: p.data for fqn, p in parameters.items()}
    try:
        for fqn, p in parameters.items():
            p.data = weights[fqn].to(p.data)
        yield
    finally:
        for fqn, p in parameters.items():
            p.data = before[fqn]
