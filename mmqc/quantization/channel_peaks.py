"""The largest magnitude of every input channel, and what baselines do with it: SmoothQuant's factors, QUIK's outlier channels.

    p_k = max over tokens of |x_k|
    SmoothQuant   s_k = p_k^α / (max over rows of |w_k|)^(1-α), moved by fold_channel_scale    (arXiv:2211.10438, equation 4)
    QUIK          the channels of the largest p_k stay in more bits                            (arXiv:2310.09259, section 3)

Shapes:  x [*, K]   w [N, K]   p, s [K]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from mmqc.calibration.observe import observe
from mmqc.distributed.ranks import ALONE, Ranks
from mmqc.graph.linear import weight_of
from mmqc.graph.program import Program
from mmqc.graph.runner import run
from mmqc.passes.fold_channel_scale import Chosen, Site
from mmqc.pipeline import FACTS, measured_passes
from mmqc.solvers.principal_basis import high_width

LEAST = 1e-5
Batches = Callable[[], Iterable[Mapping[str, Any]]]


class Peak:
    """Running maximum of |x| by channel."""

    value: Tensor | None = None

    def update(self, x: Tensor) -> None:
        """Take in a forward's input."""
        if x.numel():
            found = x.reshape(-1, x.shape[-1]).abs().amax(0).double()
            self.value = found if self.value is None else torch.maximum(self.value, found)


@torch.no_grad()
def channel_peaks(model: nn.Module, weights: Iterable[str], batches: Batches, ranks: Ranks = ALONE) -> dict[str, Tensor]:
    """P float64 [K] of the linears with these weights, by FQN; without those that no row reached.

    Args:
        model: runs the batches.
        weights: FQNs.
        batches: those of this rank.
        ranks: who sees the others.
    """
    with observe(model, {fqn.removesuffix(".weight"): Peak() for fqn in weights}) as peaks:
        for batch in batches():
            model(**batch)
    return ranks.largest({f"{name}.weight": peak.value for name, peak in peaks.items() if peak.value is not None})


def _linears(prog: Program) -> dict[str, fx.Node]:
    return {weight_of(n): n for n in prog.nodes("linear") if "scheme" in n.meta}


def mark_outliers(model: nn.Module, prog: Program, batches: Batches, ranks: Ranks = ALONE) -> None:
    """Say on every linear whose scheme has outlier channels which of its inputs they are."""
    wanted = {f: d for f, n in _linears(prog).items() if (d := n.meta["scheme"].dynamic) is not None and d.high == "outliers"}
    peaks = channel_peaks(model, [f for f, d in wanted.items() if d.high_fraction], batches, ranks)
    for node in prog.nodes("linear"):
        peak = peaks.get(weight_of(node))
        if peak is not None:
            high = high_width(len(peak), wanted[weight_of(node)].high_fraction)
            node.meta["high"] = peak.argsort(descending=True, stable=True)[:high].sort()[0].cpu()


def smooth(model: nn.Module, prog: Program, alpha: float, batches: Batches, ranks: Ranks = ALONE) -> None:
    """Run ``fold_channel_scale`` on ``prog`` with SmoothQuant's factors of strength ``alpha``."""
    peaks = channel_peaks(model, _linears(prog), batches, ranks)

    def scale(site: Site) -> Chosen | None:
        x, w = (torch.zeros(site.width, dtype=torch.float64, device=prog.device) for _ in "xw")
        for part in (p for p in site.parts if p.reads and p.fqn in peaks):
            columns = part.index.to(x.device), part.channel.to(x.device)
            for total, values in ((x, peaks[part.fqn]), (w, prog.value(part.fqn).double().abs().amax(0))):
                total.scatter_reduce_(0, columns[1], values.to(x.device)[columns[0]], "amax")
        if not bool(x.any()):
            return None
        return x.clamp(min=LEAST) ** alpha / w.clamp(min=LEAST) ** (1 - alpha), f"alpha {alpha:g}"

    run(prog, measured_passes(scale=scale), FACTS, text=True)
