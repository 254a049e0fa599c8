"""Scores of visual tokens: what is observed is what the model attends with, and what is rounded is what the cache stores."""

from typing import Any

import pytest
import torch
from models import IMAGE, tiny_qwen2_vl
from tolerance import assert_close

import mmqc
from mmqc import KVSpec, QuantizedCache
from mmqc.kv import scores as kv_scores
from mmqc.recipes import calibquant, rtn
from mmqc.report.score_histogram import CALIBRATED, EXACT, ROUNDED, ScoreHistogram


@pytest.fixture
def vlm() -> tuple[Any, dict[str, torch.Tensor]]:
    return tiny_qwen2_vl()


def test_observe__queries_behind_the_last_image_and_all_visual_keys(vlm) -> None:
    model, batch = vlm
    text = model.model.language_model.config
    before = text._attn_implementation
    seen = kv_scores.observe(model, [batch])
    assert text._attn_implementation == before
    assert not model._forward_pre_hooks
    ids = batch["input_ids"][0]
    visual = int((ids == IMAGE).sum())
    behind = len(ids) - 1 - int((ids == IMAGE).nonzero().max())
    assert list(seen.layers) == [0, 1]
    for ((q, k, scaling),) in seen.layers.values():
        assert q.shape == (6, behind, 16)
        assert k.shape == (2, visual, 16)
        assert scaling == 16**-0.5


def test_observe__leaves_out_padding_and_sequences_without_text_behind(vlm) -> None:
    visual = torch.tensor([[0, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0], [1, 0, 0, 0, 0]]).bool()
    mask = torch.tensor([[1, 1, 1, 1, 0], [1] * 5, [1] * 5, [0, 1, 1, 1, 1]])
    rows = kv_scores.which(visual, mask)
    assert list(rows) == [0], "row 1 has no text behind its image, row 2 no image, row 3 only a padded one"
    assert rows[0].visual.tolist() == [1, 2]
    assert rows[0].queries.tolist() == [3]
    assert kv_scores.observe(vlm[0], [{"input_ids": torch.arange(10, 20)[None]}]).layers == {}


def test_exact_scores__are_those_of_attention(vlm) -> None:
    """Softmax over all keys of the first layer, from a model that gives its attentions out."""
    model, batch = vlm
    seen = kv_scores.observe(model, [batch])
    model.set_attn_implementation("eager")
    with torch.no_grad():
        p = model(**batch, output_attentions=True, use_cache=False).attentions[0][0]
    ((q, k, t),) = seen.layers[0]
    at = (batch["input_ids"][0] == IMAGE).nonzero().flatten()
    share = p[:, -q.shape[1] :][:, :, at]
    exact = kv_scores.scores(q, k, t, KVSpec(8), (0.0, 0.0))[EXACT]
    assert_close(exact.softmax(-1), share / share.sum(-1, keepdim=True))


@pytest.mark.parametrize("bits", [1, 4])
def test_rounded_scores__are_those_of_the_packed_cache(vlm, bits) -> None:
    model, batch = vlm
    spec = KVSpec(bits, shrink_keys=0.7, tau=((1, 2),))
    ((q, k, t),) = kv_scores.observe(model, [batch]).layers[1]
    cache = QuantizedCache(model, spec)
    mmqc.kv.cache.prepare(model)
    with torch.no_grad():
        model(**batch, past_key_values=cache, use_cache=True)
    segment = cache.packed[1].segments[0]
    u = mmqc.ops.kv_words.unpack_words(segment.k_words, bits)[:, :, : k.shape[1]]
    stored = (u * segment.k_scale + segment.k_offset)[0].repeat_interleave(3, 0)
    found = kv_scores.scores(q, k, t, spec, spec.tau_of(1))
    assert_close(found[ROUNDED], t * q @ stored.mT)
    for end, shift in ((torch.amin, 1.0), (torch.amax, 2.0)):  # equation 7: the ends move by tau1 and tau2
        x, y = found[ROUNDED], found[CALIBRATED]
        wide = (x.amax(-1) - x.amin(-1)) > 1.0
        assert_close(end(y, -1)[wide], end(x, -1)[wide] - shift)


def test_histogram__counts_every_score_once() -> None:
    q, k = torch.randn(4, 5, 8), torch.randn(2, 30, 8)
    found = kv_scores.histogram(3, KVSpec(2, tau=((1, 1),)), [(q, k, 0.5), (q[:, :2], k[:, :9], 0.5)])
    assert set(found.counts) == {EXACT, ROUNDED, CALIBRATED}
    assert {sum(n) for n in found.counts.values()} == {4 * (5 * 30 + 2 * 9)}
    assert found.error[CALIBRATED] == pytest.approx(found.error[ROUNDED], rel=1e-4), "a shift of all scores is no error"
    assert CALIBRATED not in kv_scores.histogram(0, KVSpec(2), [(q, k, 0.5)]).counts
    same = kv_scores.histogram(0, KVSpec(8), [(q, k, 0.5)])
    assert same.error[ROUNDED] < 1e-5


@pytest.mark.slow
def test_quantize__reports_the_scores_and_its_page_draws_them(vlm, tmp_path) -> None:
    model, batch = vlm
    report = mmqc.quantize_(model, rtn(8) | calibquant(1, tau=((1, 0),)), calibration=iter([batch]), progress=False)
    assert [layer.layer for layer in report.kv_scores] == [0, 1]
    assert "visual KV cache in 1 bit, 1 refusal" in report.summary()
    assert "scores of visual tokens in 2 layers" in report.summary()
    assert [ScoreHistogram.from_dict(row) for row in report.to_dict()["kv_scores"]] == report.kv_scores
    page = report.save(tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Scores of a packed KV cache" in page
    assert page.count('class="plot"') >= 2
