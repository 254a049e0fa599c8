"""A model at work, and as it was afterwards."""

import pytest
import torch
from models import tiny_qwen2_vl
from small_vlm import Small, batches, check_unchanged, request, traces

from mmqc import recipes
from mmqc.quantization.convert import size_of
from mmqc.quantization.job import takes_cache, working


def test_working__in_eval_mode_and_as_it_was_afterwards() -> None:
    model = Small().train()
    model.model.vision.eval()
    before = traces(model)
    with working(request(model, recipes.rtn(8, 8), batches())) as job:
        assert not any(m.training for m in model.modules())
        assert job.size == size_of(model)
        assert job.seen is None
        assert len(job.forwards(job.batches)) == 3
    check_unchanged(model, before)


def raise_behind(_: None) -> None:
    raise ZeroDivisionError


def test_working__an_error_takes_back_what_the_journal_knows() -> None:
    model = Small()
    before = traces(model)
    with pytest.raises(ZeroDivisionError), working(request(model, recipes.rtn(8, 8), batches())) as job:
        raise_behind(job.journal.parameter("model.merger.mlp.up.weight", torch.zeros(2)))
    check_unchanged(model, before)


def test_working__attention_is_seen_before_anything_changes() -> None:
    model, batch = tiny_qwen2_vl()
    with working(request(model, recipes.calibquant(2), [batch])) as job:
        assert job.seen is not None
        assert list(job.seen.layers) == [0, 1]
        assert job.size == 0
        placed = job.place(batch)
        assert placed is not batch
        assert all(placed[name] is value for name, value in batch.items()), "the cache alone: batches stay where they are"


def test_differing__the_first_batch_and_the_one_least_like_it() -> None:
    like, longer = batches(3), {k: torch.cat((v, v)) for k, v in batches()[0].items()}
    with working(request(Small(), recipes.rtn(8, 8), [*like, longer])) as job:
        assert [b["input_ids"].shape for b in job.differing()] == [like[0]["input_ids"].shape, longer["input_ids"].shape]
    with working(request(Small(), recipes.rtn(8, 8), like)) as job:
        assert job.differing() == [job.batches[0]]


def test_call__no_cache_where_the_forward_knows_one() -> None:
    model = Small()
    assert takes_cache(model)
    assert not takes_cache(torch.nn.Linear(2, 2))
    with working(request(model, recipes.rtn(8, 8), batches())) as job:
        assert job.call(job.batches[0])["use_cache"] is False
        assert torch.equal(job.forward(job.batches[0]), model(**batches()[0]))
