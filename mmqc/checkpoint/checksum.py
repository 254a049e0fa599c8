"""SHA-256 of every tensor of a checkpoint, and the comparison after loading: a flipped bit is noticed, by name."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor


def digest(tensor: Tensor) -> str:
    """E.g. "int8:9f86d0...": the dtype and the SHA-256 of the tensor's bytes in memory order."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{str(tensor.dtype).removeprefix('torch.')}:{hashlib.sha256(data.data).hexdigest()}"


def hashes(state: Mapping[str, Tensor]) -> dict[str, str]:
    """The digest of every tensor that is in memory; those on the meta device (offloaded) have none."""
    names = [name for name, tensor in state.items() if isinstance(tensor, Tensor) and not tensor.is_meta]
    # hashlib lets go of the interpreter while it hashes
    with ThreadPoolExecutor() as pool:
        return dict(zip(names, pool.map(lambda name: digest(state[name]), names), strict=True))


def verify(expected: Mapping[str, str], state: Mapping[str, Tensor], local: Callable[[str], str | None]) -> int:
    """Compares what was loaded with what was saved.

    Args:
        expected: digests by the name in the checkpoint.
        state: the loaded tensors.
        local: the checkpoint's name as the model spells it; None for what it does not load.

    Returns:
        The number of tensors that could not be compared: cast on the way, or offloaded and not in memory.

    Raises:
        ValueError: a tensor differs or is missing; names it.
    """
    names = {fqn: name for fqn in expected if (name := local(fqn)) is not None}
    missing = [fqn for fqn, name in names.items() if name not in state]
    found = hashes({fqn: state[name] for fqn, name in names.items() if name in state})
    cast = {fqn for fqn, value in found.items() if value.split(":")[0] != expected[fqn].split(":")[0]}
    damaged = [fqn for fqn, value in found.items() if fqn not in cast and value != expected[fqn]]
    if damaged or missing:
        what = f"{damaged[0]} differs from what was saved" if damaged else f"{missing[0]} is missing"
        raise ValueError(
            f"the checkpoint is damaged: {what} ({len(damaged)} tensors differ, {len(missing)} are missing); "
            f"copy or download it again"
        )
    return len(cast) + sum(state[name].is_meta for name in names.values())
