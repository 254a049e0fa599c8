"""Sums over ranks of few rows go through memory that the ranks share, with the norm and the quantization behind them.

    q, h = norm_quantize(x, Σ_r y_r, …)  or  (Σ_r y_r, x, …)    ->  q, h = all_reduce_norm_quantize(y, group, x, …)
    Σ_r y_r, read by something else                             ->  all_reduce(y, group)

Shapes:  those of ops/all_reduce.py and ops/all_reduce_norm_quantize.py
Why:     a step has two sums a layer, each of which takes NCCL 7 to 8 microseconds and shared memory 1 to 4
         (docs/explanation/scale.md).
Needs:   nothing
Gives:   nothing
Exact:   yes, the sum of two ranks to the bit; of more, NCCL adds up in another order.
Refuses: as kernels/shared/inboxes.py says: groups without such memory, many rows of more than two ranks, a number of rows that data
         decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from mmqc.graph.kinds import kind
from mmqc.graph.program import Miss, Program, copy_meta
from mmqc.graph.runner import Pass

NORM = "norm_quantize"


@dataclass(frozen=True)
class Site:
    """A collective, what waits for it, and the norm that alone reads that with a residual, if any."""

    call: fx.Node
    wait: fx.Node
    norm: fx.Node | None

    def __str__(self) -> str:
        return self.wait.name if self.norm is None else f"{self.wait.name}, {self.norm.name}"


@dataclass(frozen=True)
class RewriteAllReduce(Pass):
    """``why_not``: of a group's name and an example of what is added up; None where memory is shared."""

    name = "rewrite_all_reduce"
    why_not: Callable[[str, Tensor], str | None]

    def match(self, prog: Program) -> Iterator[Site | Miss]:
        """Every sum that is waited for at once."""
        for wait in prog.nodes("wait_tensor"):
            call = wait.args[0]
            if not isinstance(call, fx.Node) or kind(call) != "all_reduce" or call.args[1] != "sum" or len(call.users) > 1:
                continue
            example = wait.meta.get("example_value")
            if not isinstance(example, Tensor):
                yield Miss(wait.name, "its shape is not known")
            elif reason := self.why_not(str(call.args[2]), example):
                yield Miss(wait.name, reason)
            else:
                yield Site(call, wait, norm_behind(wait))

    def rewrite(self, prog: Program, site: Site) -> None:
        """One operation in place of the last one."""
        x, _, group = site.call.args
        last = site.wait if site.norm is None else site.norm
        with prog.graph.inserting_before(last):
            if site.norm is None:
                new = prog.graph.call_function(torch.ops.mmqc.all_reduce.default, (x, group))
            else:
                a, b, *how = site.norm.args
                op = torch.ops.mmqc.all_reduce_norm_quantize.default
                new = prog.graph.call_function(op, (x, group, b if a is site.wait else a, *how), dict(site.norm.kwargs))
        copy_meta(new, last, self.name, 0)
        new.meta["example_value"] = last.meta.get("example_value")
        last.replace_all_uses_with(new)
        for node in (*(() if site.norm is None else (site.norm,)), site.wait, site.call):  # waiting counts as an effect
            prog.graph.erase_node(node)


def norm_behind(wait: fx.Node) -> fx.Node | None:
    """The norm with a residual that is all that reads a sum."""
    (reader,) = wait.users if len(wait.users) == 1 else (None,)
    if reader is None or kind(reader) != NORM or reader.args[1] is None or reader.args[0] is reader.args[1]:
        return None
    return reader if wait in reader.args[:2] else None
