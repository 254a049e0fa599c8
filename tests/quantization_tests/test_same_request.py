"""All ranks have to be asked for the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from small_vlm import Small, batches, request

from mmqc import recipes
from mmqc.config import ConfigError
from mmqc.distributed.ranks import ALONE, Ranks
from mmqc.quantization.same_request import _digests, check_device, check_same


class Second(Ranks):
    rank, size = 1, 2

    def __init__(self, first: Any) -> None:
        self.theirs = first

    def collected(self, own: Sequence[Any]) -> Sequence[Any]:
        return [self.theirs, *own]


def test_check_same__equal_requests_pass():
    first = _digests(request(Small(), recipes.mquant(4), batches()))
    check_same(request(Small(), recipes.mquant(4), batches()), Second(first))
    check_same(request(Small(), recipes.mquant(4), batches()), ALONE)


def test_check_same__says_what_differs():
    first = _digests(request(Small(), recipes.rtn(8), batches()))
    moved = [{**batch, "pixel_values": batch["pixel_values"] + 1} for batch in batches()]
    wider = Small()
    wider.register_parameter("more", torch.nn.Parameter(torch.ones(1)))
    for given, words in (
        (
            request(Small(), recipes.rtn(8), batches(2)),
            r"another calibration set than rank 0 \(2 batches, not 3\); pass all batches",
        ),
        (request(Small(), recipes.rtn(8), moved), "another calibration set than rank 0; pass all batches"),
        (request(Small(), recipes.rtn(4), batches()), "another config than rank 0; pass the same config"),
        (request(wider, recipes.rtn(8), batches()), "another model than rank 0; its parameters"),
        (request(Small(), recipes.rtn(8), batches(), inputs="quantized"), "another list of arguments than rank 0; pass the same"),
    ):
        with pytest.raises(ConfigError, match=f"^rank 1 was given {words}"):
            check_same(given, Second(first))


def test_check_device__each_rank_has_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for passes in (torch.device("cpu"), torch.device("cuda:0")):
        check_device(passes, Second(None))
    check_device(torch.device("cuda:1"), ALONE)
    with pytest.raises(ConfigError, match=r"rank 1 computes on cuda:1, .*: call torch.cuda.set_device\(1\)"):
        check_device(torch.device("cuda:1"), Second(None))


def test_check_same__learned_rounding_is_of_one_process():
    first = _digests(request(Small(), recipes.learned(4), batches()))
    check_same(request(Small(), recipes.learned(4), batches()), ALONE)
    with pytest.raises(ConfigError, match=r'solver "learned" takes the gradients of all batches, .* in one process'):
        check_same(request(Small(), recipes.learned(4), batches()), Second(first))
