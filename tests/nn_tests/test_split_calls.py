"""What a rank does around its part, in one process: the other ranks' messages are known."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tolerance import assert_close

from mmqc.config import WeightSpec
from mmqc.nn import split_calls
from mmqc.nn.linear import QuantLinear
from mmqc.nn.split import SplitError, columns_of
from mmqc.nn.split_calls import Split, share
from mmqc.solvers import solve

K, N, RANKS = 48, 20, 2


class Talk:
    """Stands for torch.distributed on one rank; others have sent what is in ``heard``, and what this one sends is in ``said``."""

    def __init__(self, rank: int, heard: list[list[torch.Tensor]]) -> None:
        self.rank, self.heard, self.said = rank, heard, []

    def all_gather(self, out: torch.Tensor, x: torch.Tensor, group: Any) -> None:
        number = len(self.said)
        self.said.append(x.clone())
        out.copy_(torch.cat([x if rank == self.rank else self.heard[rank][number] for rank in range(RANKS)]))

    def all_reduce(self, x: torch.Tensor, group: Any) -> None:
        number = len(self.said)
        self.said.append(x.clone())
        for rank in range(RANKS):
            if rank != self.rank:
                x += self.heard[rank][number]


def linear(hadamard=False):
    solved = solve(torch.randn(N, K), WeightSpec(4, solver="rtn"))
    return QuantLinear.from_parts(solved, weight_bits=4, bias=torch.randn(N), hadamard=hadamard)


def run(whole, xs, monkeypatch, *how):
    """What each rank gives for its input, message by message: a message of all ranks is known when the next one is looked at."""
    heard: list[list[torch.Tensor]] = [[torch.zeros(9 * K)] * 2 for _ in range(RANKS)]
    for _ in range(3):  # each round, one more message is what it will be
        said, given, splits = [], [], []
        for rank in range(RANKS):
            talk, part = Talk(rank, heard), copy.deepcopy(whole)
            monkeypatch.setattr(dist, "get_rank", lambda group, rank=rank: rank)
            monkeypatch.setattr(dist, "get_world_size", lambda group: RANKS)
            monkeypatch.setattr(split_calls, "gather", talk.all_gather)
            monkeypatch.setattr(dist, "all_reduce", talk.all_reduce)
            splits.append(share(part, "up", *how, None))
            try:
                given.append(part(xs[rank]))
            except RuntimeError:  # a first guess of another size
                given.append(None)
            said.append(talk.said)
        heard = [[*s, *h[len(s) :]] for s, h in zip(said, heard, strict=True)]
    return given, splits


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("whole_input", [False, True])
def test_share__what_adds_up_gives_the_whole_output(hadamard, whole_input, monkeypatch):
    whole, x = linear(hadamard), torch.randn(3, K)
    xs = [x if whole_input else columns_of(x, rank, RANKS) for rank in range(RANKS)]
    given, splits = run(whole, xs, monkeypatch, True, whole_input, True)
    assert {s.by for s in splits} == {"outputs" if hadamard else "inputs"}
    for y in given:
        assert_close(y, whole(x))


@pytest.mark.parametrize("whole_output", [False, True])
def test_share__outputs_are_gathered_where_they_are_wanted_whole(whole_output, monkeypatch):
    whole, x = linear(), torch.randn(3, K)
    given, _ = run(whole, [x, x], monkeypatch, False, True, whole_output)
    for rank, y in enumerate(given):
        assert_close(y, whole(x) if whole_output else columns_of(whole(x), rank, RANKS))


def test_after__has_no_gradient():
    with pytest.raises(SplitError, match=r"call the model under torch.no_grad\(\)"):
        Split("outputs", True, False, None).after(torch.nn.Identity(), (), torch.ones(1, requires_grad=True))
