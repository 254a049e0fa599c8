"""A unit that is in the model leaves nothing behind that takes memory."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from often import often
from small_vlm import Small, batches, quantize, request

from mmqc import recipes
from mmqc.nn.linear import QuantLinear
from mmqc.quantization.job import Job, working
from mmqc.quantization.rewrite import Rewritten, record_model, rewrite
from mmqc.quantization.targets import find_targets
from mmqc.quantization.units import LEARNED, NOT_LEARNED, UnitWorker, quantize_units


@pytest.fixture
def started() -> Iterator[tuple[Job, Rewritten]]:
    with working(request(Small(), recipes.mquant(4), batches())) as job:
        yield job, rewrite(job, record_model(job))


def test_units__leave_shapes_and_rows_only(started: tuple[Job, Rewritten], monkeypatch: pytest.MonkeyPatch) -> None:
    job, rewritten = started
    workers: list[UnitWorker] = []
    first = UnitWorker.__init__
    monkeypatch.setattr(UnitWorker, "__init__", lambda self, *args: (workers.append(self), first(self, *args))[1])
    targets = find_targets(job, rewritten)
    quantized = quantize_units(job, rewritten, targets)
    (worker,) = workers
    held: tuple[dict[Any, Any], ...] = (worker.solved, worker.seen, worker.moments, worker.earlier)
    assert held == ({}, {}, {}, {})
    assert [layer.fqn for layer in quantized.layers] == [t.module for t in targets.linears.values()]
    assert all(isinstance(job.model.get_submodule(layer.fqn), QuantLinear) for layer in quantized.layers)
    weights = rewritten.program.weights
    assert all(weights[fqn].untyped_storage().nbytes() == weights[fqn].element_size() for fqn in targets.linears)
    assert quantized.config.statistics is not None
    assert list(quantized.config.statistics["linears"]) == list(targets.linears)


LEARN = recipes.learned(2, 8, steps=40)


@pytest.mark.parametrize("inputs", often(("float", "quantized", "asymmetric"), "quantized", "asymmetric"))
def test_learned__blocks_lose_less_than_gptqs_and_the_rest_is_said(inputs: str) -> None:
    torch.manual_seed(0)
    model, other = Small(), Small()
    other.load_state_dict(model.state_dict())
    report = quantize(model, LEARN, inputs=inputs)
    plain = quantize(other, recipes.gptq(2, 8), inputs=inputs)
    learned = {layer.fqn for layer in report.layers if LEARNED in layer.note}
    assert learned
    assert {layer.fqn for layer in report.layers if NOT_LEARNED in layer.note} == {layer.fqn for layer in report.layers} - learned
    ratios = [float(layer.note.split(" x ")[1].split()[0]) for layer in report.layers if layer.fqn in learned]
    assert min(ratios) < 0.95
    assert max(ratios) <= 1
    moved = {a.fqn for a, b in zip(report.layers, plain.layers, strict=True) if a.weight_error != b.weight_error}
    assert moved & learned


@pytest.mark.slow
def test_learned__resumes_to_the_same_model(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    whole, cut = Small(), Small()
    cut.load_state_dict(whole.state_dict())
    again = Small()
    again.load_state_dict(whole.state_dict())
    quantize(whole, LEARN)
    first, done = UnitWorker.learn, []

    def once(self: Any, *args: Any) -> Any:
        if done:
            raise RuntimeError("stopped")
        done.append(args)
        return first(self, *args)

    monkeypatch.setattr(UnitWorker, "learn", once)
    with pytest.raises(RuntimeError, match="stopped"):
        quantize(cut, LEARN, resume_dir=str(tmp_path))
    monkeypatch.setattr(UnitWorker, "learn", first)
    quantize(again, LEARN, resume_dir=str(tmp_path))
    assert all(torch.equal(a, b) for a, b in zip(whole.state_dict().values(), again.state_dict().values(), strict=True))
