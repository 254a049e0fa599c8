"""Each phase up to the units gives a value that says what is known after it."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from float64 import EXACT, output_of, relative_error, to_float64
from models import tiny_qwen2_vl
from small_vlm import Small, batches, check_unchanged, quantize, request, traces
from torch import nn

from mmqc import recipes
from mmqc.graph.linear import weight_of
from mmqc.nn.modality import ModalityContext, attached
from mmqc.quantization import equivalence
from mmqc.quantization import rewrite as rewriting
from mmqc.quantization.equivalence import FLOORS, RewriteError
from mmqc.quantization.job import Job, working
from mmqc.quantization.rewrite import record_model, rewrite


@pytest.fixture
def job() -> Iterator[Job]:
    model, batch = to_float64(*tiny_qwen2_vl())
    with working(request(model, recipes.mquant(8), [batch])) as job:
        yield job


def test_record__knows_the_program_and_the_context(job: Job) -> None:
    recorded = record_model(job)
    assert len({weight_of(n) for n in recorded.program.nodes("linear")}) == 25, "the head and 24 more"
    assert recorded.context is attached(job.model)
    assert recorded.context.text_only is False
    assert recorded.unseen == {}


def test_rewrite__keeps_the_output_and_says_by_how_much(job: Job) -> None:
    before = output_of(job.model, job.call(job.batches[0]))
    rewritten = rewrite(job, record_model(job))
    assert relative_error(output_of(job.model, job.call(job.batches[0])), before) < EXACT
    assert 0 < rewritten.error < FLOORS[torch.float32]
    assert "lm_head.weight" in rewritten.untied or "model.language_model.embed_tokens.weight" in rewritten.untied
    assert rewritten.towers.keys() == rewritten.incoherence.keys()
    assert set(rewritten.towers.values()) == {"vision", "projector", "language"}
    assert any(a > b for a, b in rewritten.incoherence.values())


def test_rewrite__a_moved_output_is_an_error_and_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Small()
    before = traces(model)
    real = equivalence.Before.of

    def moved(*args: Any) -> equivalence.Before:
        known = real(*args)
        return equivalence.Before(known.calls, [[t + 10 for t in tensors] for tensors in known.outputs], known.handed)

    monkeypatch.setattr(equivalence.Before, "of", moved)
    with pytest.raises(RewriteError, match="the model is as it was"):
        quantize(model, recipes.rotate())
    check_unchanged(model, before)


def test_record__a_failure_leaves_the_context_that_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Small()
    context = ModalityContext.attach(model, (1, 2))
    context.text_only = True
    before = traces(model)
    monkeypatch.setattr(rewriting, "exact_passes", lambda config: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        quantize(model, recipes.rtn(8, 8), batches())
    check_unchanged(model, before)
    assert attached(model) is context
    assert context.text_only
    assert torch.is_grad_enabled()


def test_record__a_later_batch_reaches_what_the_two_recorded_do_not() -> None:
    class Third(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.other, self.head = nn.Embedding(8, 16), nn.Linear(16, 16), nn.Linear(16, 8)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(input_ids)
            return self.head(x + self.other(x) if input_ids.shape[1] == 5 else x)

    model = Third().double()
    given = [{"input_ids": torch.arange(n)[None]} for n in (3, 4, 6, 5, 7)]
    with torch.no_grad():
        expected = [model(**batch) for batch in given]
    report = quantize(model, recipes.rotate(), given)
    assert report.refused == []
    with torch.no_grad():
        for batch, before in zip(given, expected, strict=True):
            assert relative_error(model(**batch), before) < EXACT
