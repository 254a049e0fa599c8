"""A unit that is in the model leaves nothing behind that takes memory."""

from collections.abc import Iterator
from typing import Any

import pytest
from small_vlm import Small, batches, request

from mmqc import recipes
from mmqc.nn.linear import QuantLinear
from mmqc.quantization.job import Job, working
from mmqc.quantization.rewrite import Rewritten, record_model, rewrite
from mmqc.quantization.targets import find_targets
from mmqc.quantization.units import UnitWorker, quantize_units


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
