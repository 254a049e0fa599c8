"""Steps that are one launch give the tokens of steps that are not, in any order of prompts and batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CompileConfig, GenerationConfig

import mmqc
from benchmarks.end_to_end.cold_start import prompt, small_model
from mmqc.compiler import step_replay

pytestmark = pytest.mark.gpu


def config_of(new: int, cache: str | None) -> GenerationConfig:
    return GenerationConfig(
        do_sample=False, max_new_tokens=new, min_new_tokens=new, pad_token_id=0, cache_implementation=cache,
        compile_config=CompileConfig(backend="mmqc", mode="reduce-overhead", fullgraph=False),
    )  # fmt: skip


def assert_recorded_or_not_alike(
    model: Any, calls: list[tuple[dict[str, torch.Tensor], int]], patch: pytest.MonkeyPatch, **more: Any
) -> None:
    """Tokens of steps that are recorded are those of steps that are not, and all steps of a call but three are replays."""

    def answers() -> list[list[list[int]]]:
        how: Any = {"custom_generate": mmqc.compiled_loop, **more}
        cache = "static" if "prefill" in more else None
        return [model.generate(**inputs, generation_config=config_of(new, cache), **how).tolist() for inputs, new in calls]

    with patch.context() as plain:
        plain.setattr(step_replay.StepReplays, "begin", lambda *_: None)
        want = answers()
    for _ in range(3):
        assert answers() == want
    steps = model._mmqc_loop.steps
    before = steps.replays
    assert answers() == want
    assert not steps.refusals()
    assert steps.replays == before + sum(new - 1 - 3 for _, new in calls)


@torch.no_grad()
@pytest.mark.parametrize("bits", [8, 4])
def test_steps__replayed_and_not(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model: Any = small_model().eval().cuda().bfloat16()
    seen = [prompt(model, grid) for grid in ((8, 8), (12, 8))]
    mmqc.quantize_(model, mmqc.recipes.rtn(bits, activation_bits=8, group_size=None if bits == 8 else 128), seen, progress=False)
    calls = [
        ({name: torch.cat([t] * rows) for name, t in prompt(model, grid).items()}, new)
        for rows, grid, new in ((1, (8, 8), 20), (3, (12, 8), 9), (1, (12, 8), 40), (3, (8, 8), 30), (1, (8, 8), 12))
    ]
    assert_recorded_or_not_alike(model, calls, monkeypatch, prefill="eager")


@torch.no_grad()
def test_steps__over_a_quantized_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model: Any = small_model().eval().cuda().bfloat16()
    mmqc.quantize_(model, mmqc.recipes.calibquant(4), [prompt(model, (8, 8))], progress=False)
    calls = [({name: torch.cat([t] * rows) for name, t in prompt(model, (8, 8)).items()}, new) for rows, new in ((1, 20), (2, 30))]
    assert_recorded_or_not_alike(model, calls, monkeypatch)
