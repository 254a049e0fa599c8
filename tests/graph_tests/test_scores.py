import re

import pytest
import torch
from float64 import passed, recorded
from pass_cases import EXACT_PASSES
from tiny_families import FAMILIES
from torch import Tensor, nn

from mmqc.graph.scores import score_weights

MADE = re.compile(r"(\.|_)(q|k|qkv|query|key|query_key_value|Wqkv|c_attn|qkv_proj)(_proj)?\.weight$")


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_score_weights__are_those_of_queries_and_keys(family: str, attention: str) -> None:
    model, batch = FAMILIES[family]()
    try:
        model.set_attn_implementation(attention)
    except ValueError as refused:
        pytest.skip(str(refused).splitlines()[0])
    prog = recorded(model, {**batch, "use_cache": False})
    linears = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    expected = {name for name in linears if MADE.search(name)} & {str(n.target) for n in prog.graph.nodes if n.op == "get_attr"}
    assert score_weights(prog) == expected != set()


def test_score_weights__a_cache_a_norm_of_heads_and_rotations_stand_in_between() -> None:
    model, batch = FAMILIES["gemma3_text"]()
    prog = passed(recorded(model, {**batch, "use_cache": True}), EXACT_PASSES[:5])
    found = score_weights(prog)
    assert len(found) == 4
    assert all(re.search(r"(q|k)_proj", name) for name in found)


class Router(nn.Module):
    """A softmax over a linear's output, whose products mix no tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(x).softmax(-1) * self.up(x)


def test_score_weights__of_a_router_there_are_none() -> None:
    assert score_weights(recorded(Router(), {"x": torch.randn(3, 8)})) == set()
