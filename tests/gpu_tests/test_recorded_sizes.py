"""Sizes that come again are replayed as CUDA graphs, with the results of the calls before."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CompileConfig, GenerationConfig

import mmqc
from benchmarks.end_to_end.cold_start import prompt, small_model
from mmqc.compiler.cuda_recorder import Cuda
from mmqc.compiler.recorded_sizes import all_graphs

pytestmark = pytest.mark.gpu


class Block(nn.Module):
    """A norm, quantized linears, and a cache that is written to."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(256), nn.Linear(256, 512), nn.Linear(512, 256)

    def forward(self, x: Tensor, cache: Tensor) -> Tensor:
        cache[: x.shape[0]].copy_(x)
        return x + self.down(nn.functional.gelu(self.up(self.norm(x)), approximate="tanh")).sin() + cache[: x.shape[0]].mean()


@torch.no_grad()
def test_replays__equal_the_calls_before_them_for_sizes_in_any_order() -> None:
    draw, model = random.Random(0), Block().eval().cuda().bfloat16()
    cache = torch.zeros(512, 256, device="cuda", dtype=torch.bfloat16)
    torch._dynamo.mark_static_address(cache)
    inputs = {n: [torch.randn(n, 256, device="cuda", dtype=torch.bfloat16) for _ in range(3)] for n in (40, 37, 400)}
    mmqc.quantize_(model, mmqc.recipes.rtn(8, activation_bits=8), [{"x": inputs[400][0], "cache": cache}], progress=False)
    plain: Any = torch.compile(model, backend="mmqc", dynamic=True)
    torch._dynamo.mark_dynamic(inputs[400][0], 0)
    want = {(n, i): (plain(x, cache), cache[:n].clone()) for n, xs in inputs.items() for i, x in enumerate(xs)}
    torch._dynamo.reset()
    kept = all_graphs()
    call: Any = torch.compile(model, backend="mmqc", dynamic=True, options={"recorded_sizes": 2})
    for _ in range(60):
        n, i = draw.choice([*want])
        cache.fill_(torch.nan)
        got = call(inputs[n][i].clone(), cache)
        assert torch.equal(got, want[n, i][0])
        assert torch.equal(cache[:n], want[n, i][1])
    (mine,) = [r for r in all_graphs() if all(r is not k for k in kept)]
    assert mine.replays > 10


def test_record__needs_no_earlier_recording_to_be_there_still() -> None:
    device, x = Cuda(), torch.arange(1000.0, device="cuda")
    first, replay = device.record(lambda: x + 1)
    del replay
    second, replay = device.record(lambda: x + 2)
    replay()
    torch.cuda.synchronize()
    assert torch.equal(second, x + 2)
    assert first.shape == x.shape  # which holds memory of the pool until here


@torch.no_grad()
def test_compiled_loop__replays_give_are_those_of_the_first_calls() -> None:
    torch.manual_seed(0)
    model: Any = small_model().eval().cuda().bfloat16()
    prompts = [prompt(model, grid) for grid in ((8, 8), (12, 8), (8, 8), (12, 8), (8, 12))]
    mmqc.quantize_(model, mmqc.recipes.rtn(8, activation_bits=8), prompts[:2], progress=False)
    config = GenerationConfig(
        do_sample=False, max_new_tokens=8, min_new_tokens=8, pad_token_id=0, cache_implementation="static",
        compile_config=CompileConfig(backend="mmqc", mode="reduce-overhead", fullgraph=False),
    )  # fmt: skip
    kept = all_graphs()

    def answer(which: int) -> list[int]:
        return model.generate(**prompts[which], generation_config=config, custom_generate=mmqc.compiled_loop, prefill="recorded")[
            0
        ].tolist()

    want = [answer(i) for i in range(5)]
    for _ in range(4):
        assert [answer(i) for i in (3, 0, 1, 2)] == [want[i] for i in (3, 0, 1, 2)]
    assert sum(r.replays for r in all_graphs() if all(r is not k for k in kept)) >= 8
    assert model._mmqc_loop.ahead.right >= 6  # towers that were launched while the rest was prepared
    # the same recording's tower with other positions: what was guessed is wrong, and is seen
    for _ in range(3):
        assert [answer(i) for i in (4, 1)] == [want[i] for i in (4, 1)]
