"""SHA-256 of every tensor of a checkpoint, and the comparison after loading: a flipped bit is noticed, by name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from mmqc.errors import MmqcError

OFFLOADED = "offloaded"  # in place of a digest: the tensor was not in memory when it was saved
AGAIN = "copy or download it again"


class CheckpointError(MmqcError, ValueError):
    """A checkpoint that is not as it was saved, or cannot be read: says which file and what in it, and what to do."""


def json_digest(value: Any) -> str:
    """The SHA-256 of plain data, whatever the order of keys and the white space of its file."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def digest(tensor: Tensor) -> str:
    """E.g. "int8:9f86d0...": the dtype and the SHA-256 of the tensor's bytes in memory order."""
    data = whole(tensor).detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{str(tensor.dtype).removeprefix('torch.')}:{hashlib.sha256(data.data).hexdigest()}"


def hashes(state: Mapping[str, Tensor]) -> dict[str, str]:
    """The digest of every tensor that is in memory; those on the meta device (offloaded) have none.

    What ranks share is put together on each of them, one tensor after the other, in the order of the state.
    """
    names = [name for name, tensor in state.items() if isinstance(tensor, Tensor) and not tensor.is_meta]
    shared = {name: digest(state[name]) for name in names if is_shared(state[name])}
    # hashlib lets go of the interpreter while it hashes
    with ThreadPoolExecutor() as pool:
        found = pool.map(lambda name: shared.get(name) or digest(state[name]), names)
        return dict(zip(names, found, strict=True))


def is_shared(tensor: Tensor) -> bool:
    """Whether ranks have a part of it each (a DTensor, whose module takes most of a second to import)."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: Any) -> Tensor:
    """The tensor; of one that ranks share, all of it, for which all of them have to ask."""
    return tensor.full_tensor() if is_shared(tensor) else tensor


def inventory(state: Mapping[str, Tensor]) -> dict[str, str]:
    """Every tensor's name with its digest, ``OFFLOADED`` for those that are not in memory: the set, and what is in it."""
    known = hashes(state)
    return {name: known.get(name, OFFLOADED) for name, tensor in state.items() if isinstance(tensor, Tensor)}


def verify(expected: Mapping[str, str], state: Mapping[str, Tensor], local: Callable[[str], str | None]) -> int:
    """Compares what was loaded with what was saved.

    Args:
        expected: digests by the name in the checkpoint.
        state: the loaded tensors.
        local: the checkpoint's name as the model spells it; None for what it does not load.

    Returns:
        The number of tensors that could not be compared: cast on the way, or offloaded and not in memory.

    Raises:
        CheckpointError: a tensor differs or is missing; names it.
    """
    names = {fqn: name for fqn in expected if (name := local(fqn)) is not None}
    missing = [fqn for fqn, name in names.items() if name not in state]
    found = hashes({fqn: state[name] for fqn, name in names.items() if name in state and expected[fqn] != OFFLOADED})
    cast = {fqn for fqn, value in found.items() if _is_cast(expected[fqn], value)}
    damaged = [fqn for fqn, value in found.items() if fqn not in cast and value != expected[fqn]]
    if damaged or missing:
        what = f"{damaged[0]} differs from what was saved" if damaged else f"{missing[0]} is missing"
        raise CheckpointError(
            f"the checkpoint is damaged: {what} ({len(damaged)} tensors differ, {len(missing)} are missing); {AGAIN}"
        )
    return len(names) - len(found) + len(cast)


def _is_cast(saved: str, found: str) -> bool:
    """Whether a tensor came in another floating-point dtype, as ``from_pretrained(dtype=...)`` makes it; codes never do."""
    dtypes = [getattr(torch, value.split(":")[0], None) for value in (saved, found)]
    return dtypes[0] != dtypes[1] and all(isinstance(dtype, torch.dtype) and dtype.is_floating_point for dtype in dtypes)


def check_set(missing: Collection[str], extra: Collection[str], unlisted: Collection[str]) -> None:
    """Whether model and files have the same tensors, all of them known.

    Args:
        missing: what the model has and the files do not: transformers gave it random values.
        extra: what the files have and the model does not.
        unlisted: what the model has and the ``hashes`` of config.json do not.

    Raises:
        CheckpointError: one of them is not empty; names a tensor.
    """
    kinds = (
        (missing, "the model has {}, and the checkpoint does not: it would run with random values"),
        (extra, "its files have {}, which was not saved"),
        (unlisted, "{} has no hash in quantization_config"),
    )
    for names, words in kinds:
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise CheckpointError(
                f"the checkpoint is damaged or does not fit its config: {words.format(min(names) + more)}; {AGAIN}, "
                "or take back what was changed in config.json or passed to from_pretrained"
            )
