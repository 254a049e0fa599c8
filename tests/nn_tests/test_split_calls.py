"""What a rank does around its part, in one process: the other ranks' messages are known."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from split_ranks import branches
from tolerance import assert_close

from mmqc.compiler.options import CompileOptions
from mmqc.compiler.run_time import AtRunTime, rewrite_at_run_time
from mmqc.config import WeightSpec
from mmqc.explain import Explanation
from mmqc.graph.kinds import kind, mutates
from mmqc.nn import split_calls
from mmqc.nn.linear import QuantLinear
from mmqc.nn.split import SplitError, columns_of
from mmqc.nn.split_calls import Split, share, shared_linears
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


@torch.no_grad()
@pytest.mark.parametrize("recipe", ["w8a8", "mquant"])
def test_share__a_trace_has_one_sum_and_is_fused_behind_it(recipe, group):
    seen: list[AtRunTime] = []

    def look(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.append(rewrite_at_run_time(gm, inputs, CompileOptions.read(None, None)))
        return seen[-1].gm.forward

    whole, part, batch = branches(group, recipe)
    assert_close(torch.compile(part, backend=look, fullgraph=True)(**batch), whole(**batch))
    (found,) = (f for f in seen if any(kind(n) == "all_reduce" for n in f.gm.graph.nodes))
    names = [kind(n) for n in found.gm.graph.nodes]
    assert names.count("all_reduce") == 2, "one for each of the linears that are cut by inputs"
    assert not any(mutates(n) for n in found.gm.graph.nodes)
    (norm,) = (n for n in found.gm.graph.nodes if kind(n) == "norm_quantize" and n.args[1] is not None)
    assert kind(norm.args[1]) == "wait_tensor", "the sum over ranks is the residual's branch, added, normed and quantized at once"
    behind = [n for n in found.gm.graph.nodes if kind(n) in ("scaled_matmul_epilogue", "hadamard_quantize")]
    assert len(behind) == 2, "nothing is sent between the gated product and down"


def test_shared_linears__says_who_has_what_and_what_is_sent(group):
    _, part, _ = branches(group)
    assert shared_linears(part) == [
        "2 x blocks.*.bodies.*.up: 1 parts of the outputs, nothing sent",
        "2 x blocks.*.bodies.*.down: 1 parts of the inputs, outputs added up",
        "2 x blocks.*.bodies.*.gate: 1 parts of the outputs, nothing sent",
    ]
    assert "shared by ranks\n  2 x blocks.*.bodies.*.up" in str(Explanation(shared=shared_linears(part)))
    reason = "its online Hadamard mixes all its inputs"
    part.head = torch.nn.Linear(2, 2)
    part.head.split = Split("outputs", False, True, group, reason)
    assert shared_linears(part)[-1] == f"1 x head: 1 parts of the outputs, inputs and outputs gathered ({reason})"
