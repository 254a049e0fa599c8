"""Experts divided among ranks: each has a run of them, and what they give is added up.

    y[t] = sum over ranks r of  sum over the experts e of t's choice that r has:  w[t, e] expert_e(x[t])

A row whose expert another rank has belongs to none here (``ExpertCall.first``): it is not multiplied, and comes out as 0.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch.distributed as dist

from mmqc.experts.call import ROUTED
from mmqc.experts.modules import QuantExperts, QuantStack
from mmqc.nn.split import part_of
from mmqc.nn.split_calls import Split


def can_share(experts: QuantExperts, ranks: int) -> bool:
    """Whether so many ranks can: evenly, and where the call says which row goes to which expert."""
    return experts.call.form == ROUTED and experts.call.experts % ranks == 0


def cut_experts(experts: QuantExperts, rank: int, ranks: int, name: str = "a mixture") -> None:
    """Leave a rank its run of experts, in place.

    Raises:
        SplitError: they cannot be shared evenly; ``name`` is whose.
    """
    part = part_of(experts.call.experts, rank, ranks, f"the stack of experts of {name}")
    own = part.stop - part.start
    for stack in experts.modules():
        if isinstance(stack, QuantStack):
            saved = set(stack.state_dict())  # all but the factors of a Hadamard, which are those of a width
            for key in saved:
                stack._buffers[key] = stack.get_buffer(key)[part].clone()
            stack.experts = own
    experts.call = dataclasses.replace(experts.call, experts=own, first=part.start)


def share_experts(experts: QuantExperts, name: str, group: Any) -> Split:
    """Leave this rank its run of experts, in place, and add up what all give.

    Raises:
        SplitError: they cannot be shared evenly; ``name`` is whose.
    """
    cut_experts(experts, dist.get_rank(group), dist.get_world_size(group), name)
    experts.split = Split("experts", True, True, group)
    return experts.split
