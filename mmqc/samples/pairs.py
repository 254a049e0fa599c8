"""Two models on the same questions: what one changed, question by question, with intervals of the paired differences.

    difference   of accuracy and of the right answer's NLL, second minus first
    KL           mean over an answer's tokens of KL(first || second), in nats, under teacher forcing
    agreement    share of an answer's tokens at which both models' likeliest token is the same
    flips        questions that one model has right and the other wrong, either way (Dutta et al. 2024, arXiv:2407.09141), and the
                 p-value of McNemar's exact test, that a flip is as likely one way as the other (McNemar 1947)

A question is right where its accuracy is 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from mmqc.samples.scoring import Interval, bootstrap


@dataclass(frozen=True)
class Pair:
    """One question's outcome with the first model and with the second: `accuracy` in 0..1, `nll` per token, `kl`, `agreement`."""

    kind: str
    accuracy: tuple[float, float]
    nll: tuple[float, float]
    kl: float
    agreement: float


@dataclass(frozen=True)
class Flips:
    """How many questions turned from right to wrong, from wrong to right, and McNemar's exact p."""

    lost: int
    won: int

    @property
    def p(self) -> float:
        """Two-sided: of `lost + won` fair coins, how often is the outcome at least as uneven."""
        n, least = self.lost + self.won, min(self.lost, self.won)
        return min(1.0, 2 * sum(math.comb(n, k) for k in range(least + 1)) / 2**n)

    def __str__(self) -> str:
        """E.g. "-7 +2, p 0.18"."""
        return f"-{self.lost} +{self.won}, p {self.p:.2g}"


def divergence(first: Tensor, second: Tensor) -> tuple[float, float]:
    """Mean KL(first || second) of log-probabilities [T, V] and the share of rows whose largest entry is the same."""
    p, q = first.double(), second.double()
    kl = (p.exp() * (p - q)).nan_to_num(posinf=math.inf).sum(-1).mean()
    return max(float(kl), 0.0), float((first.argmax(-1) == second.argmax(-1)).double().mean())


def flips(pairs: Sequence[Pair]) -> Flips:
    """Of these questions."""
    right = [(a == 1, b == 1) for a, b in (pair.accuracy for pair in pairs)]
    return Flips(right.count((True, False)), right.count((False, True)))


def compared(pairs: Sequence[Pair], alike: bool = True) -> dict[str, Any]:
    """The figures "accuracy difference", "nll difference", "KL" and "agreement" as `Interval`, and "flips" as `Flips`.

    Args:
        pairs: At least one.
        alike: Kinds of question weigh the same, however many there are of each (as in a sample's accuracy); else questions do.
    """
    kinds = list(dict.fromkeys(pair.kind if alike else "" for pair in pairs))
    values = {
        "accuracy difference": [pair.accuracy[1] - pair.accuracy[0] for pair in pairs],
        "nll difference": [pair.nll[1] - pair.nll[0] for pair in pairs],
        "KL": [pair.kl for pair in pairs],
        "agreement": [pair.agreement for pair in pairs],
    }
    out: dict[str, Any] = {}
    for name, row in values.items():
        groups = [np.array([v for v, pair in zip(row, pairs, strict=True) if not alike or pair.kind == kind]) for kind in kinds]
        out[name] = bootstrap(*groups)
    return out | {"flips": flips(pairs)}


def by_kind(pairs: Sequence[Pair]) -> dict[str, dict[str, Any]]:
    """`compared` of each kind of question by itself, in the order of their first; a kind without a name is "all"."""
    kinds = dict.fromkeys(pair.kind for pair in pairs)
    return {kind or "all": compared([pair for pair in pairs if pair.kind == kind]) for kind in kinds}


def flat(figures: dict[str, Any]) -> dict[str, float]:
    """Numbers for JSON: "KL", "KL low", "KL high", "flips lost", "flips won", "flips p"."""
    out: dict[str, float] = {}
    for name, value in figures.items():
        if isinstance(value, Interval):
            out |= {name: value.mean, f"{name} low": value.low, f"{name} high": value.high}
        elif isinstance(value, Flips):
            out |= {f"{name} lost": value.lost, f"{name} won": value.won, f"{name} p": value.p}
        else:
            out[name] = value
    return out
