"""Steps of the loop that are replayed give the tokens of steps that are not, and who is left alone.

The recorder here needs no GPU: it runs the step once more for its outputs, and undoes what that wrote to the cache.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import tiny_qwen2_vl
from quantized_vlm import quantized_vlm
from torch import Tensor
from transformers import CompileConfig
from transformers.cache_utils import Cache, StaticCache
from transformers.modeling_outputs import CausalLMOutputWithPast

import mmqc
from mmqc.compiler import step_replay
from mmqc.compiler.compiled_loop import _State
from mmqc.compiler.cuda_recorder import Replay
from mmqc.compiler.step_replay import StepReplays, noted
from mmqc.kv.cache import QuantizedCache

MORE: dict[str, Any] = {"do_sample": False, "cache_implementation": "static", "max_new_tokens": 9, "min_new_tokens": 9}
GRAPHS = {"custom_generate": mmqc.compiled_loop, "compile_config": CompileConfig(backend="mmqc", mode="reduce-overhead")}


class Recorder:
    """Records by running again on the same inputs."""

    kind = "cpu"

    def __init__(self, fails: str = "") -> None:
        self.fails, self.recorded = fails, 0

    def usable(self) -> bool:
        return True

    def timed(self, run: Callable[[], Any]) -> Any:
        raise AssertionError("a step is not timed")

    beside: Any = timed
    joined: Any = timed

    def record(self, run: Callable[[], Any], beside: bool = False) -> tuple[Any, Replay]:
        if self.fails:
            raise RuntimeError(f"{self.fails}\nand more lines")
        self.recorded += 1
        caches = [c for c in run.__closure__ or () if isinstance(c.cell_contents, dict)]
        written = [t for c in caches for v in c.cell_contents.values() if isinstance(v, Cache) for t in tensors_of(v)]
        before = [t.clone() for t in written]
        output = run()
        for tensor, value in zip(written, before, strict=True):
            tensor.copy_(value)
        output.logits.fill_(torch.nan)  # nothing is computed in a capture
        return output, lambda: output.logits.copy_(run().logits)


def tensors_of(cache: Cache) -> list[Tensor]:
    if isinstance(cache, QuantizedCache):
        return [t for layer in cache.packed for t in layer.tensors()]
    return [t for layer in cache.layers for t in vars(layer).values() if isinstance(t, Tensor)]


def vlm(recorder: Any = None, **more: Any) -> tuple[Any, dict[str, Tensor], StepReplays]:
    model, batch = quantized_vlm(depth=1, layers=1, **more)
    steps = _State.of(model).steps = StepReplays(recorder or Recorder())
    return model, batch, steps


def text(rows: int, length: int, seed: int = 0) -> dict[str, Tensor]:
    ids = torch.randint(5, 30, (rows, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[1::2, :3] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def check(model: Any, inputs: dict[str, Any], **more: Any) -> None:
    got = model.generate(**inputs, **{**MORE, **GRAPHS, **more})
    more.pop("compile_config", None)
    expected = model.generate(**inputs, **{**MORE, **more})
    assert torch.equal(getattr(got, "sequences", got), getattr(expected, "sequences", expected))


def test_step_replay__tokens_of_sizes_and_batches_in_mixed_order(without_inductor: None) -> None:
    model, batch, steps = vlm()
    recorder: Any = steps.device
    check(model, batch)
    assert (recorder.recorded, steps.replays) == (1, 5), "8 steps: two that are prepared, one that is noted, five replayed"
    for i, inputs in enumerate((text(1, 12), batch, text(3, 20), text(1, 30, 1), text(3, 9, 2), batch, text(1, 12, 3))):
        before = steps.replays
        check(model, inputs, max_new_tokens=9 - i % 3, min_new_tokens=9 - i % 3)
        assert steps.replays == before + 5 - i % 3
    assert not steps.refusals()
    assert recorder.recorded <= 6, "kept from call to call while the cache stays"


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2])
def test_step_replay__quantized_cache(rows: int, without_inductor: None) -> None:
    _, batch = quantized_vlm(depth=1, layers=1)
    model, _ = tiny_qwen2_vl(depth=1, layers=1)
    mmqc.quantize_(model, mmqc.recipes.calibquant(4), [batch], progress=False)
    batch = {name: torch.cat([t] * rows) for name, t in batch.items()}
    steps = _State.of(model).steps = StepReplays(Recorder())
    more: dict[str, Any] = {name: value for name, value in MORE.items() if name != "cache_implementation"}
    want = model.generate(**batch, **more)
    for _ in range(3):
        assert torch.equal(model.generate(**batch, **more, **GRAPHS), want)
    assert steps.replays == 3 * 5
    assert steps.device.recorded == 1, "in the kept cache"  # type: ignore[attr-defined]


@pytest.mark.slow
def test_step_replay__quantized_caches_of_several_batches_are_kept(without_inductor: None) -> None:
    model, _ = tiny_qwen2_vl(depth=1, layers=1)
    _, batch = quantized_vlm(depth=1, layers=1)
    mmqc.quantize_(model, mmqc.recipes.calibquant(4), [batch], progress=False)
    steps = _State.of(model).steps = StepReplays(Recorder())
    more: dict[str, Any] = {name: value for name, value in MORE.items() if name != "cache_implementation"}
    batches = [{name: torch.cat([t] * rows) for name, t in batch.items()} for rows in (1, 2)]
    for inputs in (*batches, *batches, *batches):
        assert torch.equal(model.generate(**inputs, **more, **GRAPHS), model.generate(**inputs, **more))
    assert steps.device.recorded == 2  # type: ignore[attr-defined]


@pytest.mark.slow
def test_step_replay__a_call_whose_tensors_lie_elsewhere_is_recorded_anew(
    without_inductor: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch, steps = vlm()
    recorder: Any = steps.device
    check(model, batch)
    check(model, batch)
    assert recorder.recorded == 1
    moved = copy.deepcopy(model.lm_head.weight)
    with torch.no_grad():
        moved.neg_()
    model.lm_head.weight = torch.nn.Parameter(moved, requires_grad=False)
    check(model, batch)
    assert recorder.recorded == 2
    monkeypatch.setattr(step_replay, "UNUSED", 1)
    for _ in range(3):
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone(), requires_grad=False)
        check(model, batch)
    assert steps.refusals() == ["what it reads lies elsewhere in every call"]


@pytest.mark.slow
def test_step_replay__a_step_that_cannot_be_recorded_runs(without_inductor: None) -> None:
    model, batch, steps = vlm(Recorder("no memory"))
    for _ in range(2):
        check(model, batch)
    assert (steps.replays, steps.refusals()) == (0, ["no memory"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "reason"),
    [
        (
            {"output_hidden_states": True, "return_dict_in_generate": True},
            "the model gives more than tensors and its cache",
        ),
        ({"compile_config": CompileConfig(backend="mmqc", mode=None)}, step_replay.OTHERS),
    ],
)
def test_step_replay__who_is_left_alone(how: dict[str, Any], reason: str, without_inductor: None) -> None:
    model, batch, steps = vlm()
    check(model, batch, **how)
    assert (steps.replays, steps.refusals()) == (0, [reason])


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True])
def test_step_replay__with_a_users_hook_no_step_is_recorded(late: bool, without_inductor: None) -> None:
    model, batch, steps = vlm()
    if late:  # by then Dynamo has compiled a step without it, and compiles another
        check(model, batch)
        torch._dynamo.reset()
        model._mmqc_loop.prefills.clear()
        del model._compiled_call
    before = steps.replays
    model.lm_head.register_forward_hook(lambda *_: None)
    model.generate(**batch, **{**MORE, **GRAPHS})
    assert steps.replays == before
    assert "would not call the hook" in steps.refusals()[0]


@pytest.mark.slow
def test_step_replay__another_cache_is_not_kept_alive(without_inductor: None) -> None:
    model, batch, steps = vlm()
    check(model, batch)
    kept = next(iter(steps.kept.values()))
    assert not any(isinstance(v, StaticCache) for v in kept.outputs.values())


def test_noted__what_a_graph_is_called_with() -> None:
    graph = noted(lambda *_: (), recordable=True)
    x, y = torch.zeros(3), torch.zeros(3)
    with step_replay._noting(torch.nn.Module()) as calls:
        for args in ((x, 2), (x, 2), (y, 2), (x, 3)):
            graph(*args)
    assert calls[0] == calls[1]
    assert calls[0] != calls[2]
    assert calls[0] != calls[3]
    other = noted(lambda *_: (), recordable=False)
    with step_replay._noting(torch.nn.Module()) as calls:
        other(x)
        other(x)
    assert calls[0] != calls[1], "a graph without CUDA graphs"
    there = torch.zeros(2, device="meta")
    with step_replay._noting(torch.nn.Module()) as calls:
        for value in (torch.tensor(1), torch.tensor(1), torch.tensor(2), x, x):
            graph(there, value)
    assert calls[0][2] == calls[1][2] == (1,), "a number on the CPU, beside another device"
    assert calls[1] != calls[2]
    assert calls[3] != calls[4], "values on the CPU, which a recording would not see change"


@pytest.mark.slow
def test_step_replay__what_a_mode_of_inference_made_is_used_in_no_other(without_inductor: None) -> None:
    model, batch, steps = vlm()
    check(model, batch)
    with torch.inference_mode():
        steps.begin(model, {"input_ids": torch.zeros(1, 1, dtype=torch.int64)}, ())
    assert len(steps.kept) == 2
    with torch.enable_grad():
        assert steps.begin(model, {"input_ids": torch.zeros(1, 1, dtype=torch.int64)}, ()) is None


def test_step_replay__a_step_of_several_graphs_runs() -> None:
    steps = StepReplays(Recorder())
    graph = noted(lambda x: (x,), recordable=True)
    place = torch.zeros(1, 1, dtype=torch.int64)
    inputs: dict[str, Any] = {"input_ids": place}
    with torch.no_grad():
        steady = steps.begin(torch.nn.Module(), inputs, ())
    assert steady is not None

    def call(input_ids: Tensor) -> Any:
        return CausalLMOutputWithPast(logits=graph(graph(input_ids)[0])[0].float())  # type: ignore[arg-type]

    for _ in range(3):
        assert steady.run(call, inputs).logits.shape == (1, 1)
    assert steps.refusals() == ["a step calls 2 graphs"]
