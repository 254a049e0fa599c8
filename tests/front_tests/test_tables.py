"""Rotary tables are left to torch."""

import torch

from mmqc.front.tables import keep_tables


def test_keep_tables__same_numbers_without_a_cosine_for_inductor() -> None:
    def table(x: torch.Tensor) -> torch.Tensor:
        return x.cos() + torch.sin(x)

    gm = torch.fx.symbolic_trace(table)
    assert keep_tables(gm) == 2
    x = torch.randn(5)
    assert torch.equal(gm(x), table(x))
    assert {str(n.target) for n in gm.graph.nodes if n.op == "call_function"} >= {
        "mmqc_front.cos.default",
        "mmqc_front.sin.default",
    }


def test_op__checks() -> None:
    for name in ("cos", "sin"):
        torch.library.opcheck(getattr(torch.ops.mmqc_front, name).default, (torch.randn(3, 4),))
