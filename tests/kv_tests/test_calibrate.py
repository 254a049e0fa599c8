"""What a packed cache learns from data: tau by the smallest divergence, and the queries' second moments."""

from typing import Any

import pytest
import torch
from models import IMAGE, tiny_qwen2_vl
from tolerance import assert_close
from torch import Tensor

import mmqc
from mmqc import KVSpec, QuantizedCache
from mmqc.calibration.calibrate import CalibrationError
from mmqc.kv import calibrate as calibrate_kv
from mmqc.kv.query_moment import moment_of
from mmqc.nn.modality import ModalityContext


@pytest.fixture
def vlm() -> tuple[Any, dict[str, Tensor]]:
    return tiny_qwen2_vl()


def test_where_to_cut__the_middle_of_what_follows_the_last_visual_token() -> None:
    model, context = torch.nn.Module(), ModalityContext((9,))
    ids = torch.tensor([[1, 9, 9, 1, 1, 1, 1, 1], [1, 9, 1, 1, 1, 1, 1, 1]])
    assert calibrate_kv.where_to_cut(model, {"input_ids": ids}, context) == 5
    assert calibrate_kv.where_to_cut(model, {"input_ids": ids[1:]}, context) == 5
    assert calibrate_kv.where_to_cut(model, {"input_ids": ids[:, 3:]}, context) is None
    assert calibrate_kv.where_to_cut(model, {"input_ids": ids[:, :3]}, context) is None
    usable = {"input_ids": ids}
    assert calibrate_kv.cut_batches(model, [{"input_ids": ids[:, 3:]}, usable], context) == [(usable, 5)]
    with pytest.raises(CalibrationError, match="visual tokens with text behind them"):
        calibrate_kv.cut_batches(model, [{"input_ids": ids[:, 3:]}], context)


def test_best__takes_the_first_of_equals(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = {1: [3.0, 1.0, 2.0], 2: [1.0, 2.0, 1.0]}
    monkeypatch.setattr(calibrate_kv, "divergences", lambda model, specs, batch, cut: torch.tensor(losses[cut]).double())
    candidates = [KVSpec(1, tau=((float(i), 0.0),)) for i in range(3)]
    done: list[int] = []
    found = calibrate_kv.best(torch.nn.Module(), candidates, [({}, 1), ({}, 2)], lambda: done.append(1))
    assert found == candidates[1], "4, 3 and 3 in the sum"
    assert len(done) == 2


@torch.no_grad()
def test_search__takes_the_smallest_divergence(vlm) -> None:
    model, batch = vlm
    context = mmqc.kv.cache.prepare(model)
    cut = calibrate_kv.where_to_cut(model, batch, context)
    length = batch["input_ids"].shape[1]
    last = int((batch["input_ids"][0] == IMAGE).nonzero().max())
    assert last < cut < length
    candidates = [KVSpec(1, search="model", tau=(pair,)) for pair in calibrate_kv.GRID]
    losses = calibrate_kv.divergences(model, candidates, batch, cut)
    found = calibrate_kv.search_tau(model, KVSpec(1, search="model"), [batch], context)
    assert found == candidates[int(losses.argmin())]
    by_layer = calibrate_kv.search_tau(model, KVSpec(1, search="layer"), [batch], context)
    assert len(by_layer.tau) == 2
    assert float(calibrate_kv.divergences(model, [by_layer], batch, cut)) <= float(losses.min())


@torch.no_grad()
def test_search__sees_what_decoding_sees(vlm) -> None:
    """The tokens behind the cut, run as a prompt, have the logits that they have one by one behind a packed prompt."""
    model, batch = vlm
    spec = KVSpec(2, tau=((1, 2), (0, 1)))
    context = mmqc.kv.cache.prepare(model)
    cut = calibrate_kv.where_to_cut(model, batch, context)
    assert cut is not None
    at_once = QuantizedCache(model, spec)
    at_once.shared.cut = cut
    got = model(**batch, past_key_values=at_once, use_cache=True).logits[:, cut:]
    position, _ = model.model.get_rope_index(**{k: v for k, v in batch.items() if k != "pixel_values"})
    steps, want = QuantizedCache(model, spec), []
    start = {k: v[:, :cut] if v.shape[:2] == batch["input_ids"].shape else v for k, v in batch.items()}
    model(**start, past_key_values=steps, use_cache=True)
    for i in range(cut, batch["input_ids"].shape[1]):
        token = batch["input_ids"][:, i : i + 1]
        want.append(model(input_ids=token, past_key_values=steps, use_cache=True, position_ids=position[..., i : i + 1]).logits)
    assert_close(got, torch.cat(want, 1))


@torch.no_grad()
def test_rounding__moments_are_those_of_text_behind_the_images(vlm, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = vlm
    context, spec = mmqc.kv.cache.prepare(model), KVSpec(1, rounding="queries")
    seen: list[tuple[Tensor, int]] = []
    behind = int((batch["input_ids"][0] == IMAGE).nonzero().max()) + 1

    class Everything(calibrate_kv.QueryMoments):
        def update(self, module: Any, query: Tensor, key: Any, scaling: float) -> None:
            seen.append((query[0, :, behind:].double(), key.states.shape[1]))
            super().update(module, query, key, scaling)

    monkeypatch.setattr(calibrate_kv, "QueryMoments", Everything)
    calibrate_kv.observe_queries(model, spec, [batch], context)
    moments = [m for m in map(moment_of, model.modules()) if m is not None]
    assert len(moments) == 2
    for moment, (q, heads) in zip(moments, seen, strict=True):
        rows = q.reshape(heads, -1, q.shape[-1])
        assert_close(moment, (rows.mT @ rows / rows.shape[1]).float())
