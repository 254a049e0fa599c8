"""Where a changed space is seen: the modules that touch it, their callers, and what lies between."""

import pytest
from float64 import to_float64
from models import tiny_qwen2_vl

from mmqc.graph.record import record
from mmqc.graph.spaces.frames import _between, seen_from


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
