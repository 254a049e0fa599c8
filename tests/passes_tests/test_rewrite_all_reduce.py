"""Sums over ranks that share memory become one operation with what follows; on the CPU that is the collective and what follows."""

from __future__ import annotations

import re
from typing import Any

import torch
from split_ranks import branches

from mmqc.compiler.record import GraphRecord, collect_records
from mmqc.kernels.shared.inboxes import OPENED


@torch.no_grad()
def compiled(group: Any, **options: Any) -> GraphRecord:
    """Two residual branches, each with a sum over ranks, compiled and compared."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    _, part, batch = branches(group)
    with collect_records() as records:
        got = torch.compile(part, backend="mmqc", fullgraph=True, options=options)(**batch)
    assert torch.equal(got, part(**batch))
    (record,) = records
    return record


def test_rewrite_all_reduce__takes_what_follows_along_where_memory_is_shared(group, without_inductor, monkeypatch):
    asked = []
    monkeypatch.setattr(OPENED, "why_not", lambda name, x: asked.append((name, *x.shape)))
    record = compiled(group, collectives="shared")
    assert record.ops["all_reduce_norm_quantize"] == record.ops["all_reduce"] == 1, (
        "the last one has no norm of its branch behind it"
    )
    assert len(asked) == 2
    assert len({x[0] for x in asked}) == 1
    assert asked[0][0] == group.group_name
    (done,) = (p for p in record.passes if p.name == "rewrite_all_reduce")
    assert len(done.sites) == 2


def test_rewrite_all_reduce__says_why_sums_stay_the_groups(group, without_inductor, monkeypatch):
    monkeypatch.setitem(OPENED.closed, group.group_name, "its ranks are on 2 hosts")
    (done,) = (p for p in compiled(group, collectives="shared").passes if p.name == "rewrite_all_reduce")
    assert not done.sites
    assert all(re.search("its ranks are on 2 hosts", str(miss)) for miss in done.misses)
    assert not [p for p in compiled(group).passes if p.name == "rewrite_all_reduce"]
