"""The order of all passes, and the only place where order exists.

    quantize_       folding, rotating | measured, each on the data that the ones in front of it have left | quantizing
    plan            folding, rotating
    torch.compile   with options={"config": …}: folding, rotating, quantizing, on each graph; then, on every graph: run_time
    export          run_time, on each program

A function gives the passes of a phase or two; what a pass needs of data comes in as an argument.  Down to ``measured_passes``
the model computes the same function after every pass; what runs at run time keeps it as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from mmqc.config import QuantConfig
from mmqc.graph.runner import Pass
from mmqc.passes.assign_scheme import AssignScheme
from mmqc.passes.facts import FACTS as FACTS
from mmqc.passes.fold_channel_scale import FoldChannelScale
from mmqc.passes.fold_layer_scale import FoldLayerScale
from mmqc.passes.fold_norm_mean import FoldNormMean
from mmqc.passes.fold_norm_scale import FoldNormScale
from mmqc.passes.fold_numbers import FoldNumbers
from mmqc.passes.fold_query_groups import FoldQueryGroups
from mmqc.passes.fold_signs import FoldSigns
from mmqc.passes.fuse_counters import FuseCounters
from mmqc.passes.fuse_epilogues import FuseEpilogues
from mmqc.passes.fuse_hadamard_quantize import FuseHadamardQuantize
from mmqc.passes.fuse_matmuls import FuseMatmuls
from mmqc.passes.fuse_norm_quantize import FuseNormQuantize
from mmqc.passes.fuse_rotation import FuseRotation
from mmqc.passes.insert_hadamard import InsertHadamard
from mmqc.passes.quantize_activations import QuantizeActivations
from mmqc.passes.quantize_mixed import QuantizeMixed
from mmqc.passes.quantize_weights import QuantizeWeights
from mmqc.passes.raise_linear import RaiseLinear
from mmqc.passes.raise_ops import RaiseOps
from mmqc.passes.reorder_reads import ReorderReads
from mmqc.passes.reorder_tokens import ReorderTokens
from mmqc.passes.rewrite_all_reduce import RewriteAllReduce
from mmqc.passes.rewrite_empty_cat import RewriteEmptyCat
from mmqc.passes.rewrite_mask import RewriteMask
from mmqc.passes.rewrite_patch_conv import RewritePatchConv
from mmqc.passes.rewrite_prompt_attention import RewritePromptAttention
from mmqc.passes.rewrite_rope_index import RewriteRopeIndex
from mmqc.passes.rewrite_scatter import RewriteScatter
from mmqc.passes.share_angles import ShareAngles
from mmqc.passes.share_quantize import ShareQuantize
from mmqc.passes.split_attention import SplitAttention
from mmqc.passes.suppress_magnitude import SuppressMagnitude


def exact_passes(config: QuantConfig) -> tuple[Pass, ...]:
    """Recognise, rewrite, assign: all that comes in front of calibration data."""
    return (*folding_passes(config), *rotating_passes(config))


def folding_passes(config: QuantConfig) -> tuple[Pass, ...]:
    """Up to the channel spaces that may be rotated."""
    return (
        # 1 recognise
        RaiseOps(),
        RaiseLinear(),
        # 2 fold what pins channels
        *((FoldLayerScale(),) if config.rewrites.fold_norms else ()),
        *((FoldNormMean(),) if config.rewrites.fold_norms and not config.rewrites.keep_means else ()),
        *((FoldNormScale(),) if config.rewrites.fold_norms else ()),
    )


def rotating_passes(config: QuantConfig) -> tuple[Pass, ...]:
    """Rotate the spaces, and decide what becomes of each linear."""
    rewrites = config.rewrites
    return (
        # 3 rotate
        *((FuseRotation(rewrites.seed, rewrites.hadamard, rewrites.hadamard_everywhere),) if rewrites.rotate else ()),
        *((FoldSigns(rewrites.seed),) if rewrites.hadamard else ()),
        *((InsertHadamard(rewrites.hadamard_everywhere, rewrites.tensor_parallel),) if rewrites.hadamard else ()),
        # 4 decide
        AssignScheme(config),
        *((SuppressMagnitude(),) if rewrites.suppress else ()),
        # in a fragment: the factors that the plan has of the whole model
        *((FoldChannelScale(),) if rewrites.scales is not None else ()),
    )


def measured_passes(
    *,
    scale: Callable[[Any], Any] | None = None,
    average: bool = True,
    seed: int = 0,
    given: Mapping[str, Tensor] | None = None,
) -> tuple[Pass, ...]:
    """Exact rewrites by what was measured, those for which it is there: factors per channel, then bases.

    ``quantize_`` asks for one at a time: bases are measured in the model that has its factors.

    Args:
        scale: AWQ's or SmoothQuant's factors of a site.
        average: whether value heads that several query heads share are scaled.
        seed: of the rotation that the bases continue.
        given: ResQ's bases, by place.
    """
    return (
        # 5 measured rewrites
        *((FoldChannelScale(scale, average),) if scale is not None else ()),
        *((FuseRotation(seed, given=given),) if given is not None else ()),
    )


def quantizing_passes(**given: Any) -> tuple[Pass, ...]:
    """Numerics change from here on; ``given`` goes to the passes that solve weights."""
    return (*weight_passes(**given), *activation_passes())


def weight_passes(**given: Any) -> tuple[Pass, ...]:
    """Solve weights; with inputs by token, both."""
    return (
        # 6 quantize weights
        QuantizeMixed(**given),
        QuantizeWeights(**given),
    )


def activation_passes() -> tuple[Pass, ...]:
    """Place the scales that calibration found."""
    return (
        # 7 quantize activations
        QuantizeActivations(),
    )


def run_time_passes(
    token_order: str,
    attention_order: str = "auto",
    *,
    caches: bool = True,
    counters: bool = True,
    patches: bool = True,
    prompts: bool = True,
    queries: bool = True,
    quantized: bool = True,
    reads: bool = True,
    scatters: bool = True,
    why_not_shared: Callable[[str, Any], str | None] | None = None,
) -> tuple[Pass, ...]:
    """Change where rows lie and what is computed together in a compiled graph, never what is stored.

    Args:
        token_order: "auto" is "sequence", which measured faster: a scale by split index saves a product half a percent over one
            by mask, and a gather of the rows costs more than that (docs/explanation/token_order.md).
        attention_order: how rows in modality order pass attention.  "auto" is "gather", which measured faster for any layout of
            images: with a mask of positions attention loses its causal form, 87 ms for 15 at 6,417 tokens.
        caches: the graph puts the first tokens into a cache.
        counters: it moves several counters.
        patches: it embeds patches by a convolution.
        prompts: it has causal attention without a mask.
        queries: it has attention of one new token.
        quantized: it has quantized linears.
        reads: it has reads of the host.
        scatters: whole rows take the places of others.
        why_not_shared: it has sums over ranks; why the group of a name does not add up a tensor through shared memory.
    """
    attention_order = "gather" if attention_order == "auto" else attention_order
    return (
        # 8 token order
        *(
            (ReorderTokens(attention_order), RewriteMask(attention_order), RewriteRopeIndex(attention_order))
            if token_order == "modality"
            else ()
        ),
        # 9 attention
        *((RewriteEmptyCat(),) if caches else ()),
        *((FoldQueryGroups(), SplitAttention()) if queries else ()),
        *((RewritePromptAttention(),) if prompts else ()),
        # 10 products, rows
        *((RewritePatchConv(),) if patches else ()),
        *((RewriteScatter(),) if scatters else ()),
        # 11 fusion
        *(
            (ShareQuantize(), FuseEpilogues(), FuseMatmuls(), FuseHadamardQuantize(), FuseNormQuantize(), ShareAngles())
            if quantized
            else ()
        ),
        *((RewriteAllReduce(why_not_shared),) if why_not_shared else ()),
        *((FuseCounters(),) if counters else ()),
        # 12 reads
        *((FoldNumbers(), ReorderReads()) if reads else ()),
    )


def phases(config: QuantConfig) -> dict[str, tuple[Pass, ...]]:
    """Every pass that may run under ``config``, in order, for people: measured passes have nothing measured."""
    rewrites, quantized = config.rewrites, bool(config.schemes)
    scaled = rewrites.scales is not None or rewrites.smooth is not None
    return {
        "recognise, fold": folding_passes(config),
        "rotate, decide": rotating_passes(config),
        "measured": measured_passes(
            scale=(lambda site: None) if scaled else None, given={} if rewrites.bases is not None else None
        ),
        "quantize": quantizing_passes() if quantized else (),
        "compiled graphs": run_time_passes("modality", quantized=quantized, why_not_shared=lambda name, x: None),
    }
