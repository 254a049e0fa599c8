"""How many bits each layer of a packed cache has, where they differ: as many as are allowed on average, where they count.

    minimise  sum over layers l of D_l(b_l)      b_l in {1, 2, 4, 8},  sum of b_l <= B L
    D_l(b)    mean KL(p || p') of the next token: layer l has b bits, the others 8 (calibrate.py says over which tokens)

Why:     a decoder may read its images in a few layers, and rounding costs much there and next to nothing elsewhere
         (docs/explanation/calibquant.md has the figures): bits that are moved cost no memory.
Exact:   the minimum of the sum, by dynamic programming.  That costs add up is an assumption: where all layers can have B bits,
         both are compared on the same batches, and the layers stay alike where that has the smaller divergence.
Source:  not in CalibQuant (arXiv:2502.14882), whose layers are alike; costs of one layer at a time and a budget for their bits
         are what HAWQ-V3 (arXiv:2011.10680) has for weights.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from mmqc.calibration.calibrate import CalibrationError
from mmqc.config import KVSpec
from mmqc.distributed.ranks import ALONE, Ranks
from mmqc.kv.cache import decoder_config
from mmqc.kv.calibrate import Batch, best, cut_batches, searched, total_divergences
from mmqc.kv.layer_types import kinds_of
from mmqc.nn.modality import ModalityContext
from mmqc.specs import KV_BITS

MOST = KV_BITS[-1]


@torch.no_grad()
def search_bits(
    model: nn.Module,
    spec: KVSpec,
    batches: Sequence[Batch],
    context: ModalityContext,
    done: Callable[[], Any] = int,
    ranks: Ranks = ALONE,
) -> KVSpec:
    """``spec`` with the layers' bits, if it asks for them.

    Arguments are those of ``search_tau``; the model has the queries' moments, if ``spec`` rounds by them.

    Raises:
        CalibrationError: no batch has visual tokens with text behind them, or the model's probabilities are no numbers.
    """
    if not spec.searches_bits:
        return spec
    text = decoder_config(model)
    layers, kinds = text.num_hidden_layers, kinds_of(text)
    packed = [i for i, kind in enumerate(kinds) if kind == "full_attention"]

    def with_bits(bits: Sequence[int], mean: int = spec.bits) -> KVSpec:
        """``bits`` of the packed layers; the others have none, and the least is written down for them."""
        every = [KV_BITS[0]] * layers
        for i, b in zip(packed, bits, strict=True):
            every[i] = b
        return dataclasses.replace(spec, bits=mean, layer_bits=tuple(every), tau=())

    cases = searched(cut_batches(model, batches, context))
    fewer = [(place, bits) for place in range(len(packed)) for bits in KV_BITS[:-1]]
    full = [MOST] * len(packed)
    asked = [full, *([*full[:place], bits, *full[place + 1 :]] for place, bits in fewer)]
    costs = total_divergences(model, [with_bits(bits, MOST) for bits in asked], cases, done, ranks).tolist()
    if not all(map(math.isfinite, costs)):
        raise CalibrationError(
            "the bits of the KV cache's layers are chosen by the divergence of next-token probabilities, which is not finite here: "
            "check the model's logits on the calibration batches, or give layer_bits yourself"
        )
    table = [{MOST: costs[0]} for _ in packed]
    for (place, bits), cost in zip(fewer, costs[1:], strict=True):
        table[place][bits] = cost
    found = with_bits(cheapest(table, spec.bits * len(packed)))
    if spec.bits in KV_BITS:
        found = best(model, [found, with_bits([spec.bits] * len(packed))], cases, done, ranks)
    return dataclasses.replace(found, tau=spec.tau)


def cheapest(costs: Sequence[dict[int, float]], budget: int) -> tuple[int, ...]:
    """For each layer one of its bits: the smallest sum of costs of those whose bits add up to ``budget`` at most.

    Args:
        costs: by layer, what each number of bits costs.
        budget: at least the sum of the layers' fewest bits.
    """
    ways: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}  # by the bits spent: the smallest sum so far
    for layer in costs:
        longer: dict[int, tuple[float, tuple[int, ...]]] = {}
        for spent, (sum_so_far, bits) in ways.items():
            for b, cost in layer.items():
                total = sum_so_far + cost
                if spent + b <= budget and total < longer.get(spent + b, (math.inf,))[0]:
                    longer[spent + b] = (total, (*bits, b))
        ways = longer
    return min(ways.values())[1]
