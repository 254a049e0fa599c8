"""Where a changed space is seen: the modules that touch it, their callers, and what lies between."""

from collections.abc import Callable

import pytest
import torch
from float64 import to_float64
from models import tiny_qwen2_vl
from torch import Tensor, nn

from mmqc.graph.record import record
from mmqc.graph.spaces.frames import _between, deciding, seen_from


@pytest.mark.parametrize(
    ("modules", "frames"),
    [
        (["a.b.c"], {"a.b.c"}),
        (["a.b.c", "a.d"], {"a", "a.b", "a.b.c", "a.d"}),
        (["a.b", "c"], {"", "a", "a.b", "c"}),
        (["", "a.b"], {"", "a", "a.b"}),
        (["layers.1.x", "layers.10.x"], {"layers", "layers.1", "layers.1.x", "layers.10", "layers.10.x"}),
        ([], set()),
    ],
)
def test_between__everything_up_to_what_holds_both(modules: list[str], frames: set[str]) -> None:
    assert _between(modules) == frames


def test_seen_from__the_stream_is_seen_where_the_towers_meet_and_what_a_layer_keeps_is_not() -> None:
    model, batch = to_float64(*tiny_qwen2_vl())
    prog = record(model, {**batch, "use_cache": False})
    layer, stream = "model.language_model.layers.0", ("model.language_model.layers.0.mlp.down_proj.weight", 0)
    inside = {(f"{layer}.mlp.down_proj.weight", 1), (f"{layer}.self_attn.q_proj.weight", 1)}
    seen = seen_from(prog, {"model", layer})
    assert stream in seen["model"]
    assert not inside & seen["model"]
    assert {stream, *inside} - {(f"{layer}.mlp.down_proj.weight", 1)} <= seen[layer]
    assert seen_from(prog, set()) == {}


class Looking(nn.Module):
    """An embedding, behind which Python looks at a number."""

    def __init__(self, number: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.number, self.embed, self.head = number, nn.Embedding(9, 8), nn.Linear(8, 9)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        if self.number(input_ids, x).item() < 0:
            raise ValueError
        return self.head(x)


LOOKS = {
    "expand_as": (lambda ids, x: (ids == 3).unsqueeze(-1).expand_as(x).sum(), False),
    "view_as": (lambda ids, x: (ids == 3).repeat_interleave(8).view_as(x).sum(), False),
    "zeros_like": (lambda ids, x: torch.zeros_like(x).sum(), False),
    "new_ones": (lambda ids, x: (x.new_ones(2) * 2).sum(), False),
    "its values": (lambda ids, x: x.square().sum(), True),
    "its values, in another shape": (lambda ids, x: x.square().view_as(x).expand_as(x).sum(), True),
}


@pytest.mark.parametrize("look", LOOKS)
def test_deciding__a_shape_is_no_value(look: str) -> None:
    number, decides = LOOKS[look]
    assert deciding(record(Looking(number), {"input_ids": torch.arange(6)[None]})) == ({""} if decides else set())
