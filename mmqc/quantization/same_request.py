"""Whether all ranks were asked for the same: one that was handed its own part of the data, say, would wait for others for ever."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import Tensor

from mmqc.checkpoint.checksum import hashes
from mmqc.config import ConfigError
from mmqc.distributed.ranks import Ranks
from mmqc.quantization.request import Request

PARTS = {
    "model": "its parameters have other names, shapes or dtypes",
    "config": "pass the same config on every rank",
    "calibration set": "pass all batches on every rank: quantize_ divides them itself",
    "list of arguments": "pass the same on every rank",
}


def check_same(request: Request, ranks: Ranks) -> None:
    """Compare what each rank was given with what the first one was.

    Raises:
        ConfigError: names the rank, what differs, and what to do; or the solver that one process has to run.
    """
    if ranks.size == 1:
        return
    learned = [place for place, scheme in request.config.schemes.items() if scheme.weight.solver == "learned"]
    if learned:
        raise ConfigError(
            f'{learned[0]}: the solver "learned" takes the gradients of all batches, which ranks do not share yet: '
            'quantize in one process, or with solver="gptq"'
        )
    known = ranks.collected([_digests(request)])
    for rank, digests in enumerate(known):
        differing = next((name for name in PARTS if digests[name] != known[0][name]), None)
        if differing is not None:
            counts = (
                f" ({digests['batches']} batches, not {known[0]['batches']})" if digests["batches"] != known[0]["batches"] else ""
            )
            raise ConfigError(f"rank {rank} was given another {differing} than rank 0{counts}; {PARTS[differing]}")


def check_device(device: torch.device, ranks: Ranks) -> None:
    """Whether what other ranks send comes to the device that computes.

    Raises:
        ConfigError: another one is the current one.
    """
    if ranks.size > 1 and device.type == "cuda" and device.index != torch.cuda.current_device():
        raise ConfigError(
            f"rank {ranks.rank} computes on {device}, but its current device is cuda:{torch.cuda.current_device()}: call "
            f"torch.cuda.set_device({device.index}) before quantize_, so that each rank has a GPU of its own"
        )


def _digests(request: Request) -> dict[str, Any]:
    batches = request.batches or ()
    flat = {f"{i}.{name}": value for i, batch in enumerate(batches) for name, value in batch.items()}
    data = hashes({name: value for name, value in flat.items() if isinstance(value, Tensor)})
    others = {name: repr(value) for name, value in flat.items() if not isinstance(value, Tensor)}
    parameters = [(name, tuple(p.shape), str(p.dtype)) for name, p in request.model.named_parameters()]
    options = (request.inputs, request.generate_tokens, [dict(weights) for weights in request.row_weights], request.allow_nothing)
    kept = (request.resume_dir is None, request.filter_fn is None)
    kv = None if request.kv is None else vars(request.kv)
    return {
        "batches": len(batches),
        "model": _text(parameters),
        "config": _text([request.config.to_dict(), kv]),
        "calibration set": _text([data, others]),
        "list of arguments": _text([options, kept]),
    }


def _text(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
