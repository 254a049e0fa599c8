"""What a packed cache learns from calibration data: the queries' second moment, and the score calibration's tau.

The grid search is CalibQuant's (arXiv:2502.14882, section 4.2):

    tau = argmin over {0, 1, 2, 3}^2 of  mean KL(p || p_tau)        p: next-token probabilities with the plain cache

    "model"   one pair for all layers
    "layer"   that pair, then one sweep over the layers: each takes the best of the 16 while the others stay

Data:    calibration batches with an image.  The tokens from the middle of what follows the last visual token on see packed
         visual tokens, as generated tokens do; those before it attend exactly, as a prompt does.
Why:     the paper searches by task metrics; the divergence of next-token probabilities needs no labels and no generation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmqc.calibration.calibrate import CalibrationError
from mmqc.calibration.observe import observe
from mmqc.config import KVSpec
from mmqc.distributed.ranks import ALONE, Ranks
from mmqc.kv.attention_calls import AttentionCalls
from mmqc.kv.cache import QuantizedCache
from mmqc.kv.layer import ATTENTION, Cached
from mmqc.kv.query_moment import CHILD, QueryMoment, forget
from mmqc.nn.modality import ModalityContext
from mmqc.versions import cache_name

Pair = tuple[float, float]
GRID: tuple[Pair, ...] = tuple((a, b) for a in (0.0, 1.0, 2.0, 3.0) for b in (0.0, 1.0, 2.0, 3.0))
SEARCHED = 16  # batches, evenly chosen, that the search for tau runs on, once for each candidate
Batch = Mapping[str, Any]
Case = tuple[Batch, int]


@torch.no_grad()
def search_tau(
    model: nn.Module,
    spec: KVSpec,
    batches: Sequence[Batch],
    context: ModalityContext,
    done: Callable[[], Any] = int,
    ranks: Ranks = ALONE,
) -> KVSpec:
    """``spec`` with the tau that its ``search`` asks for.

    Args:
        model: prepared for packed caches; in eval mode.
        spec: what to search for; one that asks for nothing comes back as it is.
        batches: keyword batches for ``model.forward``, of one or more sequences.
        context: of the model.
        done: called after every batch.
        ranks: the processes that share the batches; each is given all of them.

    Raises:
        CalibrationError: no batch has visual tokens with text behind them.
    """
    if not spec.searches:
        return spec
    cases = searched(cut_batches(model, batches, context))

    def best_of(candidates: Sequence[tuple[Pair, ...]]) -> KVSpec:
        return best(model, [dataclasses.replace(spec, tau=tau) for tau in candidates], cases, done, ranks)

    found = best_of([(pair,) for pair in GRID])
    layers = len(QuantizedCache(model, spec).layers)
    if spec.search == "layer":
        tau = found.tau * layers
        for i in range(layers):
            found = best_of([(*tau[:i], pair, *tau[i + 1 :]) for pair in GRID])
            tau = found.tau
    return found


@torch.no_grad()
def observe_queries(
    model: nn.Module,
    spec: KVSpec,
    batches: Sequence[Batch],
    context: ModalityContext,
    done: Callable[[], Any] = int,
    ranks: Ranks = ALONE,
) -> None:
    """Give the layers the second moments of the queries of text behind visual tokens, if ``spec`` rounds keys by them.

    Arguments and errors are those of ``search_tau``.
    """
    forget(list(model.modules()))
    if spec.rounding == "nearest":
        return
    queries = QueryMoments()
    for batch, _ in ranks.mine(cut_batches(model, batches, context)):
        visual, mask = context.find(model, (), batch), batch.get("attention_mask")
        behind = visual.flip(1).cumsum(1).flip(1) == 0
        queries.weight = (behind & visual.any(1, keepdim=True)).float()
        if mask is not None:
            queries.weight = queries.weight * mask.to(queries.weight)
        cache = QuantizedCache(model, KVSpec(8))  # of the prompt, whose queries are the same whatever is stored
        with observe(model, {AttentionCalls(ATTENTION): queries}):
            model(**{**batch, "use_cache": True, cache_name(): cache})
        done()
    queries.join(model, ranks)
    queries.attach()


class QueryMoments:
    """Sums of q qᵀ by attention module; ``weight`` [B, L] says which tokens of the prompt in progress count."""

    def __init__(self) -> None:
        self.weight = torch.zeros(0, 0)
        self.sums: dict[nn.Module, Tensor] = {}
        self.counts: dict[nn.Module, float] = {}

    def update(self, module: nn.Module, query: Tensor, key: Any, scaling: float) -> None:
        """The queries [B, H_q, L, D] of one layer, if its keys go into a packed cache."""
        if not isinstance(key, Cached):
            return
        heads, (batch, q_heads, length, width) = key.states.shape[1], query.shape
        q = query.detach().reshape(batch, heads, q_heads // heads, length, width).float()
        rows = (q * self.weight.to(q)[:, None, None, :, None]).transpose(0, 1).reshape(heads, -1, width)
        found = rows.mT @ q.transpose(0, 1).reshape(heads, -1, width)
        self.sums[module] = self.sums.get(module, 0) + found.double()
        self.counts[module] = self.counts.get(module, 0.0) + float(self.weight.sum()) * (q_heads // heads)

    def join(self, model: nn.Module, ranks: Ranks) -> None:
        """Take in what the other ranks saw of ``model``."""
        names = {module: name for name, module in model.named_modules() if module in self.sums}
        sums = ranks.summed({name: self.sums[module] for module, name in names.items()})
        counts = ranks.collected([{name: self.counts[module] for module, name in names.items()}])
        modules = {name: model.get_submodule(name) for name in sums}
        self.sums = {modules[name]: total for name, total in sums.items()}
        self.counts = {module: sum(there.get(name, 0.0) for there in counts) for name, module in modules.items()}

    def attach(self) -> None:
        """Give every module that was seen its moment."""
        for module, found in self.sums.items():
            child = QueryMoment(found.shape[0], found.shape[2], found.device)
            child.moment = (found / max(self.counts[module], 1.0)).float()
            child.train(module.training)
            module.add_module(CHILD, child)


def cut_batches(model: nn.Module, batches: Sequence[Batch], context: ModalityContext) -> list[Case]:
    """The batches that have visual tokens with text behind them, and where to cut them."""
    cases = [(batch, cut) for batch in batches if (cut := where_to_cut(model, batch, context)) is not None]
    if not cases:
        raise CalibrationError(
            "no calibration batch has visual tokens with text behind them, which this kv config needs: pass batches with images "
            "and answers, or use calibquant(search='none', rounding='nearest')"
        )
    return cases


def searched(cases: Sequence[Case]) -> Sequence[Case]:
    """At most 16 of the batches, evenly chosen."""
    return cases[:: max(1, len(cases) // SEARCHED)][:SEARCHED]


def best(
    model: nn.Module, candidates: Sequence[KVSpec], cases: Sequence[Case], done: Callable[[], Any] = int, ranks: Ranks = ALONE
) -> KVSpec:
    """The candidate of the smallest divergence; the first of equals."""
    return candidates[int(total_divergences(model, candidates, cases, done, ranks).argmin())]


def total_divergences(
    model: nn.Module, candidates: Sequence[KVSpec], cases: Sequence[Case], done: Callable[[], Any] = int, ranks: Ranks = ALONE
) -> Tensor:
    """float64 [len(candidates)]: the sums of ``divergences`` over the batches of all ranks."""
    found = []
    for batch, cut in ranks.mine(cases):
        found.append(divergences(model, candidates, batch, cut))
        done()
    totals = torch.zeros(len(candidates), dtype=torch.float64)
    for each in ranks.collected(found):
        totals += each
    return totals


def where_to_cut(model: nn.Module, batch: Batch, context: ModalityContext) -> int | None:
    """The middle of what follows the last visual token; None where there is no such place."""
    visual = context.find(model, (), batch)
    if not bool(visual.any()):
        return None
    last, length = int(visual.any(0).nonzero().max()) + 1, visual.shape[1]
    return (last + length) // 2 if last < length else None


def divergences(model: nn.Module, candidates: Sequence[KVSpec], batch: Batch, cut: int) -> Tensor:
    """float64 [len(candidates)]: KL from the plain to the packed cache, averaged over the tokens from ``cut`` on."""
    exact = model(**{**batch, "use_cache": False}).logits[:, cut:].float().log_softmax(-1)
    mask = batch.get("attention_mask")
    weight = torch.ones(exact.shape[:2], device=exact.device) if mask is None else mask[:, cut:].to(exact.device)
    out = []
    for spec in candidates:
        cache = QuantizedCache(model, spec)
        cache.shared.cut = cut
        got = model(**{**batch, "use_cache": True, cache_name(): cache}).logits[:, cut:].float().log_softmax(-1)
        out.append(float(((exact.exp() * (exact - got)).sum(-1) * weight).sum() / weight.sum()))
    return torch.tensor(out, dtype=torch.float64)
