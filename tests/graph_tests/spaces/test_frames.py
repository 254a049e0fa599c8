"""Where a changed space is seen: the modules that touch it, their callers, and what lies between."""

import pytest
from float64 import to_float64
from models import tiny_qwen2_vl

from mmqc import QuantConfig, recipes
from mmqc.graph.record import record
from mmqc.graph.runner import run
from mmqc.graph.spaces.frames import _between, changed_frames
from mmqc.pipeline import FACTS, exact_passes


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


@pytest.mark.parametrize(("config", "everywhere"), [(recipes.rotate(), True), (QuantConfig(), False)])
def test_changed_frames__a_rotated_stream_is_seen_where_the_towers_meet(config: QuantConfig, everywhere: bool) -> None:
    model, batch = to_float64(*tiny_qwen2_vl())
    prog = record(model, {**batch, "use_cache": False})
    run(prog, exact_passes(config), FACTS)
    frames = changed_frames(prog)
    assert ("model" in frames) is everywhere
    assert ("model.visual" in frames) is everywhere
    assert bool(frames) is everywhere
