"""``from_pretrained(directory, tp_plan="auto")`` under torchrun: transformers' plan for the model, done with our modules.

transformers shards parameters as it reads them, by the style that its plan names for a module.  Ours have buffers, which it
reads whole; so every tensor is compared with its hash first, and then each rank keeps its part (nn/split.py).  A packed row cannot
be cut by bytes anyway.  Floats of the plan stay transformers' DTensors; what it does not name is whole on every rank: vision
towers, projectors, norms.  Of stacked experts each rank has a run.  Plans of vision-language models leave out the head, a seventh
of what a 4-bit 7B reads for a token; a quantized one is cut all the same, by its rows, and its outputs are gathered.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from transformers.modeling_utils import PreTrainedModel

from mmqc.experts.modules import QuantExperts
from mmqc.experts.share import can_share, share_experts
from mmqc.kernels.shared.inboxes import OPENED
from mmqc.kv.query_moment import QueryMoment
from mmqc.nn.adapted_linear import AdaptedLinear
from mmqc.nn.integer_weight import PackedLinear
from mmqc.nn.linear import HadamardLinear
from mmqc.nn.split import SplitError, part_of
from mmqc.nn.split_calls import Split, share
from mmqc.versions import find

# By style: whether it adds up, whether it is given whole inputs, whether it gives whole outputs.
STYLES = {
    "colwise": (False, True, False),
    "colwise_rep": (False, True, True),
    "colwise_gather_output": (False, True, True),
    "rowwise": (True, False, True),
    "rowwise_rep": (True, True, True),
    "rowwise_split_input": (True, True, True),
}
HEAD = "colwise_gather_output"
HEADS = ("num_attention_heads", "num_key_value_heads")


def ranks_of(model: PreTrainedModel) -> int:
    """How many ranks are to share the model, which may not have its weights yet."""
    asked: Any = getattr(model.config, "distributed_config", None)
    return int(getattr(asked, "tp_size", None) or 1)


def check(model: PreTrainedModel) -> None:
    """Raise before anything is read for what cannot be shared.

    Raises:
        SplitError: names the module, or the width, and says why.
    """
    ranks, text = ranks_of(model), model.config.get_text_config()
    if ranks == 1:
        return
    if not _plan(model):
        raise SplitError(
            f"transformers has no plan by which ranks share a {type(model).__name__}; pass one, e.g. "
            "tp_plan={'model.layers.*.mlp.up_proj': 'colwise', 'model.layers.*.mlp.down_proj': 'rowwise', ...}"
        )
    for key in HEADS:
        heads = getattr(text, key, None)
        if not _divides(heads, ranks):
            raise SplitError(f"{key} = {heads} cannot be shared evenly by {ranks} ranks; start as many as divide it")
    for name, module in model.named_modules():
        style = _style(model, name)
        if style is None:
            continue
        if isinstance(module, AdaptedLinear):
            raise SplitError(f"{name} has an adapter beside it: merge it, or load the model without it, to share it among ranks")
        if isinstance(module, HadamardLinear) and style.startswith("row") and module.hadamard % ranks:
            raise SplitError(
                f"{name} is a float linear behind an online Hadamard in {int(module.hadamard)} block(s), which {ranks} ranks "
                f"cannot share, and a plan that cuts its inputs ('rowwise'): rewrite with tensor_parallel={ranks}, quantize it "
                "too, or rewrite with hadamard=False"
            )
        if isinstance(module, PackedLinear) and style not in STYLES:
            raise SplitError(f"{name}: no quantized linear is cut as {style!r}; supported: {', '.join(STYLES)}")


def heads_divide(model: nn.Module, ranks: int) -> bool:
    """Whether so many ranks can share the heads of its attention evenly."""
    text: Any = model.config.get_text_config()  # type: ignore[operator,union-attr]
    return all(_divides(getattr(text, key, None), ranks) for key in HEADS)


def _divides(heads: Any, ranks: int) -> bool:
    return not isinstance(heads, int) or heads % ranks == 0


def split(model: PreTrainedModel) -> dict[str, Split]:
    """Leave this rank its part of every linear of ours that the plan names; how, by FQN.

    Raises:
        SplitError: a width cannot be shared evenly.
    """
    mesh: Any = getattr(model, "_device_mesh", None)
    if mesh is None or ranks_of(model) == 1:
        return {}
    mesh = mesh if mesh.ndim == 1 else mesh["tp"]  # newer versions have an axis for each way of sharing
    group = mesh.get_group()
    found: dict[str, Split] = {}
    for name, module in model.named_modules():
        style = _style(model, name)
        if isinstance(module, PackedLinear) and style is not None:
            module.__dict__.pop("forward", None)  # transformers' own, around DTensors
            found[name] = share(module, name, *STYLES[style], group)
        elif isinstance(module, QuantExperts) and style is not None and can_share(module, ranks_of(model)):
            module.__dict__.pop("forward", None)
            found[name] = share_experts(module, name, group)
        elif isinstance(module, HadamardLinear) and style is not None and style.startswith("row"):
            module.in_features //= ranks_of(model)  # its weight's columns are transformers' affair
            module.keep_blocks(ranks_of(model))
    _gather_tied_head(model, mesh)
    for name, module in model.named_modules():
        _cut_heads(model, name, module, mesh.get_local_rank(), ranks_of(model))
    _size_static_caches(model)
    _share_memory(model, found, group)
    return found


def _share_memory(model: PreTrainedModel, found: dict[str, Split], group: Any) -> None:
    """What sums of few rows go through, on GPUs of one host."""
    adding = [model.get_submodule(name) for name, how in found.items() if how.by != "outputs"]
    last: list[Any] = [(m.down or m.up[0]) if isinstance(m, QuantExperts) else m for m in adding]
    if last:
        OPENED.open(group, (m.out_features for m in last), last[0].qweight.device)


def _gather_tied_head(model: PreTrainedModel, mesh: Any) -> None:
    """A float head that shares an embedding's weight has as much of it as the embedding: outputs are gathered where that is a part.

    transformers (5.17) hands it inputs that are no DTensors, and torch refuses to multiply them by one; 5.20 gathers what is whole.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = any(getattr(config, "tie_word_embeddings", False) for config in (model.config, model.config.get_text_config()))
    if not tied or type(head) is not nn.Linear:
        return
    names, plan = {id(module): name for name, module in model.named_modules()}, _plan(model)
    if plan.get(names.get(id(embedding), "")) == "embedding_rowwise":
        if "forward" not in head.__dict__:
            styles = find("transformers.distributed.tensor_parallel:ALL_PARALLEL_STYLES", needed="to share a tied head among ranks")
            styles[HEAD].install_forward(head, mesh)
    elif plan.get(names[id(head)]) == HEAD and not isinstance(head.weight, DTensor):
        head.__dict__.pop("forward", None)


def _cut_heads(model: PreTrainedModel, name: str, module: nn.Module, rank: int, ranks: int) -> None:
    """The moments of this rank's KV heads, where its keys are."""
    if isinstance(module, QueryMoment) and any(_style(model, f"{name.rpartition('.')[0]}.{n}") for n, _ in _siblings(model, name)):
        module.moment = module.moment[part_of(len(module.moment), rank, ranks, name)].clone()


def _size_static_caches(model: PreTrainedModel) -> None:
    """Room for all heads where a plan gathers keys, as OLMo 2's, which norms them whole: older versions count a rank's share."""
    styles = {_style(model, name) for name, _ in model.named_modules() if name.endswith("k_proj")}
    shape, text = model._get_static_cache_init_shape(), model.config.get_text_config(decoder=True)  # type: ignore[operator]
    if shape is None or not any(style in STYLES and STYLES[style][2] for style in styles):
        return
    (heads, width), whole = shape, getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    if isinstance(heads, int) and heads * ranks_of(model) == whole:
        model.__dict__["_get_static_cache_init_shape"] = lambda: (whole, width)


def _siblings(model: PreTrainedModel, name: str) -> list[tuple[str, nn.Module]]:
    return list(model.get_submodule(name.rpartition(".")[0]).named_children())


def is_split(model: nn.Module) -> bool:
    """Whether a rank has parts of its linears only."""
    return any(isinstance(getattr(module, "split", None), Split) for module in model.modules())


def _plan(model: PreTrainedModel) -> dict[str, str]:
    """The caller's, else the model's own; newer versions take a caller's rules beside the model's, or none for none."""
    asked: Any = getattr(model.config, "distributed_config", None)
    given, own = getattr(asked, "tp_plan", None), model.tp_plan or {}
    if not isinstance(given, dict):
        return own
    return own | given if given and hasattr(model, "_resolve_parallel_plans") else given


def starred(name: str) -> str:
    """A name as plans write it: its numbers between dots are stars."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _style(model: PreTrainedModel, name: str) -> str | None:
    """The plan's word for a module.  A head that no plan names is our affair."""
    word = _plan(model).get(starred(name))
    return HEAD if word is None and _is_head(model, model.get_submodule(name)) else word


def _is_head(model: PreTrainedModel, module: nn.Module) -> bool:
    """Whether it is a quantized head whose rows the ranks can share, under a plan that is not the caller's own."""
    if not isinstance(module, PackedLinear) or model.get_output_embeddings() is not module:
        return False
    asked: Any = getattr(model.config, "distributed_config", None)
    return not isinstance(getattr(asked, "tp_plan", None), dict) and module.out_features % ranks_of(model) == 0
