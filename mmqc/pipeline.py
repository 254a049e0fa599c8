"""The ordered list of passes: the only place where order exists."""

from __future__ import annotations

from typing import Any

from mmqc.config import QuantConfig
from mmqc.graph.runner import Pass
from mmqc.passes.assign_scheme import AssignScheme
from mmqc.passes.facts import FACTS
from mmqc.passes.fold_channel_scale import FoldChannelScale
from mmqc.passes.fold_layer_scale import FoldLayerScale
from mmqc.passes.fold_norm_mean import FoldNormMean
from mmqc.passes.fold_norm_scale import FoldNormScale
from mmqc.passes.fold_signs import FoldSigns
from mmqc.passes.fuse_rotation import FuseRotation
from mmqc.passes.insert_hadamard import InsertHadamard
from mmqc.passes.quantize_activations import QuantizeActivations
from mmqc.passes.quantize_mixed import QuantizeMixed
from mmqc.passes.quantize_weights import QuantizeWeights
from mmqc.passes.raise_linear import RaiseLinear
from mmqc.passes.raise_ops import RaiseOps
from mmqc.passes.suppress_magnitude import SuppressMagnitude

__all__ = ["FACTS", "exact_passes", "quantizing_passes"]


def exact_passes(config: QuantConfig) -> tuple[Pass, ...]:
    """Recognise, rewrite, assign: the model computes the same function after these."""
    rewrites = config.rewrites
    return (
        # 1 recognise
        RaiseOps(),
        RaiseLinear(),
        # 2 exact rewrites
        *((FoldLayerScale(), FoldNormMean(), FoldNormScale()) if rewrites.fold_norms else ()),
        *((FuseRotation(rewrites.seed, rewrites.hadamard, rewrites.hadamard_everywhere),) if rewrites.rotate else ()),
        *((FoldSigns(rewrites.seed), InsertHadamard(rewrites.hadamard_everywhere)) if rewrites.hadamard else ()),
        # 3 decide what becomes of each linear
        AssignScheme(config),
        *((SuppressMagnitude(),) if rewrites.suppress else ()),
        # 4 what needs the schemes and the data: quantize_ runs it once more, with factors
        *((FoldChannelScale(),) if rewrites.scales is not None else ()),
    )


def quantizing_passes(**given: Any) -> tuple[Pass, ...]:
    """Numerics change from here on; ``given`` goes to the passes that solve weights."""
    return (QuantizeMixed(**given), QuantizeWeights(**given), QuantizeActivations())
