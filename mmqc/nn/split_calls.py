"""What a rank does around its part of a linear: hooks that gather, cut or add up.

    whole inputs  -> by outputs  -> parts          nothing is sent             ("colwise")
    whole inputs  -> by outputs  -> whole outputs  outputs are gathered        ("colwise_gather_output")
    parts         -> by inputs   -> whole outputs  outputs are added up        ("rowwise")
    parts         -> by outputs  -> whole outputs  both are gathered           ("rowwise", where inputs cannot be cut: nn/split.py)

The last way adds nothing up, so integer products keep every bit, and sends more: K + N numbers a token, where a sum takes 2 N.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from mmqc.nn.integer_weight import PackedLinear
from mmqc.nn.split import SplitError, columns_of, cut_inputs, cut_outputs, joined, why_not_by_inputs
from mmqc.traced import is_traced

NO_GRADIENT = "a linear that ranks share has no gradient: call the model under torch.no_grad()"
# torch 2.13 has a new name for it, and warns of the old one
gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True, eq=False)
class Split:
    """How a linear is shared; it is the linear's attribute ``split``.

    Attributes:
        by: "outputs" or "inputs"; of a mixture "experts".
        whole_input, whole_output: whether every rank is given, and gives, all channels.
        group: of torch.distributed.
        reason: why a linear that could add up gathers; empty otherwise.
    """

    by: str
    whole_input: bool
    whole_output: bool
    group: Any
    reason: str = ""

    def before(self, linear: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Forward pre-hook: the channels that this rank's part reads."""
        x = args[0]
        if self.by == "outputs" and not self.whole_input:
            x = self._gathered(x)
        elif self.by == "inputs" and self.whole_input:
            x = columns_of(x, dist.get_rank(self.group), dist.get_world_size(self.group)).contiguous()
        return (x, *args[1:])

    def after(self, linear: torch.nn.Module, args: tuple[Any, ...], y: Tensor) -> Tensor:
        """Forward hook: the outputs as the model goes on with them.

        Raises:
            SplitError: a gradient is asked for.
        """
        if self.by == "inputs":
            return self.added_up(y)
        if y.requires_grad:
            raise SplitError(NO_GRADIENT)
        return self._gathered(y) if self.whole_output else y

    def added_up(self, y: Tensor) -> Tensor:
        """The sum over ranks: in place; in a trace a new value, for passes look at what nodes give, not at what is written later.

        Raises:
            SplitError: a gradient is asked for.
        """
        if y.requires_grad:
            raise SplitError(NO_GRADIENT)
        y = y.contiguous()
        if is_traced():
            return functional.all_reduce(y, "sum", self.group)
        dist.all_reduce(y, group=self.group)
        return y

    def _gathered(self, x: Tensor) -> Tensor:
        flat = x.contiguous().view(-1)
        if is_traced():
            parts = functional.all_gather_tensor(flat, 0, self.group)
        else:
            parts = x.new_empty(dist.get_world_size(self.group) * x.numel())
            gather(parts, flat, group=self.group)
        return joined(parts.view(-1, *x.shape))

    def __str__(self) -> str:
        ranks = dist.get_world_size(self.group)
        if self.by != "outputs":
            return f"{ranks} parts of the {self.by}, outputs added up"
        sent = [what for what, whole in (("inputs", not self.whole_input), ("outputs", self.whole_output)) if whole]
        return f"{ranks} parts of the outputs, {' and '.join(sent) + ' gathered' if sent else 'nothing sent'}"

    def __deepcopy__(self, memo: Any) -> Split:
        return self  # a process group has no copy


def shared_linears(model: torch.nn.Module) -> list[str]:
    """By kind of linear: how many there are, their names with stars for numbers, what is sent, and why if more than has to be."""
    found: Counter[str] = Counter()
    for name, module in model.named_modules():
        split = getattr(module, "split", None)
        if isinstance(split, Split):
            why = f" ({split.reason})" if split.reason else ""
            found[f"{re.sub(r'(?<=[.])[0-9]+(?=[.]|$)', '*', name)}: {split}{why}"] += 1
    return [f"{count} x {text}" for text, count in found.items()]


def share(linear: PackedLinear, name: str, adds_up: bool, whole_input: bool, whole_output: bool, group: Any) -> Split:
    """Leave this rank its part of a linear, in place, and hook what has to be sent.

    Args:
        linear: with its values.
        name: its FQN, for errors.
        adds_up: its inputs are cut if they can be; else its outputs are.
        whole_input: the model gives every rank all channels.
        whole_output: it expects all of them.
        group: the ranks that share it.

    Raises:
        SplitError: its width cannot be shared evenly.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    reason = why_not_by_inputs(linear, ranks) if adds_up else ""
    if adds_up and not reason:
        cut_inputs(linear, rank, ranks, name)
    else:
        cut_outputs(linear, rank, ranks, name)
    split = Split("inputs" if adds_up and not reason else "outputs", whole_input, whole_output, group, reason)
    linear.split = split  # type: ignore[assignment]
    linear.register_forward_pre_hook(split.before)
    linear.register_forward_hook(split.after)
    return split
