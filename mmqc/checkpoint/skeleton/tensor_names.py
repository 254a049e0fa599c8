"""Whether the tensors of a quantized model can have the names that their family's checkpoints have.

transformers writes a model as its family published it, and undoes that when it loads.  Two kinds of conversions do so:

    renaming    model.vision_tower.layers.0.mlp.fc1.weight  <->  vision_tower.encoder.blocks.0.mlp.fc0.weight
    operation   q, k and v, their rows permuted             <->  vision_tower.encoder.blocks.0.wqkv.weight

Both go by patterns in names.  Operations are meant for float weights: codes in words, scales of groups, a scale of inputs have
other shapes and cannot be joined, cut or permuted like them.  So a model of which an operation would take a tensor of ours is
written under its own names, without any conversion, and its config says so; so is one whose renamings do not lead back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)
from transformers.modeling_utils import PreTrainedModel

Renamings = list[WeightRenaming]
Operations = list[WeightConverter]


def come_back(model: PreTrainedModel, names: Collection[str], ours: Collection[str]) -> bool:
    """Whether what transformers writes of ``model`` loads again, tensor by tensor.

    Args:
        model: whose conversions are asked.
        names: all of its tensors that are saved.
        ours: those of them that no operation may take.
    """
    written, by_operation = _written(model, names)
    if len({key for name, key in written.items() if name not in by_operation}) + len(by_operation) < len(written):
        return False  # two under one name
    if any(whole is None for whole in by_operation.values()) or set(ours) & set(by_operation):
        return False
    plain = {key: name for name, key in written.items() if name not in by_operation}
    return all(plain[key] == found and not taken for key, found, taken in loaded(model, plain, names))


def joined(model: PreTrainedModel, weights: Iterable[str]) -> dict[str, str]:
    """Those of ``weights`` that an operation takes, with the name that it writes them under."""
    written, by_operation = _written(model, weights)
    return {name: written[name] for name in by_operation}


def loaded(model: PreTrainedModel, keys: Iterable[str], names: Collection[str]) -> Iterator[tuple[str, str, bool]]:
    """Each key of a checkpoint, the tensor of ``names`` that it is loaded into, and whether an operation takes it there."""
    renamings, operations = _parted(get_model_conversion_mapping(model))
    prefix, there = model.base_model_prefix, dict.fromkeys(names, True)
    for key in sorted(keys, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, operations, prefix, there)
        if name not in there and key in there:
            name, pattern = rename_source_key(key, [], [], prefix, there)
        yield key, name, pattern is not None


def _written(model: PreTrainedModel, names: Iterable[str]) -> tuple[dict[str, str], dict[str, bool | None]]:
    """The names that a save gives; and which tensors an operation takes, None where it lacks others that it needs."""
    renamings, operations = _parted([t.reverse_transform() for t in reversed(_of_save(model))])
    by_pattern = {pattern: operation for operation in operations for pattern in operation.source_patterns}
    written: dict[str, str] = {}
    groups: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for name in sorted(names, key=dot_natural_key):
        written[name], pattern = rename_source_key(name, renamings, operations, reverse=True)
        if pattern is not None:
            groups[written[name]][name] = pattern
    by_operation: dict[str, bool | None] = {}
    for group in groups.values():
        first = by_pattern[next(iter(group.values()))]
        whole = set(group.values()) == set(first.source_patterns)
        by_operation |= dict.fromkeys(group, True if whole else None)
    return written, by_operation


def _of_save(model: PreTrainedModel) -> Sequence[WeightTransform]:
    """As transformers chooses them: those that loaded the model, or what it knows of its class."""
    known = getattr(model, "_weight_conversions", None)
    if known is not None:
        return known
    return [t for t in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(t, PrefixChange)]


def _parted(conversions: Iterable[WeightTransform]) -> tuple[Renamings, Operations]:
    conversions = list(conversions)
    renamings = [t for t in conversions if isinstance(t, WeightRenaming)]
    return renamings, [t for t in conversions if isinstance(t, WeightConverter)]
