"""The shipped samples: their data, their processor, their checkpoint, and that the stress sample is the same function."""

import socket
import sys

import numpy as np
import pytest
import torch
from float64 import EXACT, output_of, relative_error, to_float64
from tolerance import assert_close

from mmqc import samples
from mmqc.samples import checkpoint, handwriting, questions, scoring, stress
from mmqc.samples.processor import IMAGE, VISION_END, VISION_START, DigitsProcessor

MEGABYTES = 16


@pytest.fixture(scope="module")
def sample():
    return samples.load("digits-vqa")


def test_handwriting__splits_are_disjoint_and_cover_the_data():
    splits = {name: handwriting.load_split(name) for name in handwriting.SPLITS}
    index = np.concatenate([s.index for s in splits.values()])
    assert sorted(index) == list(range(1797))
    for name, s in splits.items():
        assert len(s.index) == len(s.labels) == len(s.scans) == handwriting.SPLITS[name]
        assert s.scans.min() == 0
        assert s.scans.max() == 1
    with pytest.raises(ValueError, match="no split named 'dev'"):
        handwriting.load_split("dev")


def test_handwriting__says_what_to_install(monkeypatch):
    handwriting.load_split.cache_clear()
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(handwriting.ScansMissingError, match=r"pip install 'mmqc\[demo\]'"):
        handwriting.load_split("test")


def test_questions__answers_follow_from_the_labels():
    page = np.array([[3, 1, 4], [1, 5, 9]])
    grid = ((2, 3),)
    expected = {"cell": "9", "count": "2", "any": "yes", "row": "159", "image": "314 159"}
    for kind, right in expected.items():
        layout = questions.Layout(kind, grid, 0, row=1, column=2)
        assert questions.answer(layout, page, 1) == right
    assert questions.answer(questions.Layout("any", grid), page, 7) == "no"


def test_questions__any_prefix_is_stratified_and_the_seed_fixes_it(sample):
    first, again = sample.questions(20), sample.questions(20)
    assert [q.kind for q in first] == list(questions.KINDS) * 4
    for a, b in zip(first, again, strict=True):
        assert (a.prompt, a.answer) == (b.prompt, b.answer)
        assert all(np.array_equal(x, y) for x, y in zip(a.images, b.images, strict=True))
    asked = sample.questions()
    assert len(asked) >= 600
    assert sum(len(q.answer) for q in asked) >= 5000
    assert {len(q.images) for q in asked} == {1, 2, 3}
    assert all(36 <= sum(c.isdigit() for c in q.answer) <= 64 for q in asked if q.kind == "image")


def test_processor__text_survives_the_round_trip():
    tokenizer = DigitsProcessor().tokenizer
    text = "how many 7s are in image 2?\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    with pytest.raises(ValueError, match="é"):
        tokenizer.encode("é")


def test_processor__patches_are_those_of_transformers():
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    page = np.random.default_rng(0).integers(0, 256, (24, 40, 3), dtype=np.uint8)
    theirs = Qwen2VLImageProcessorPil(
        do_resize=False, image_mean=[0.5] * 3, image_std=[0.5] * 3, patch_size=4, merge_size=2, temporal_patch_size=2
    )(page, return_tensors="pt")
    ours = DigitsProcessor()("<image>", [page])
    torch.testing.assert_close(ours["pixel_values"], theirs["pixel_values"])
    assert torch.equal(ours["image_grid_thw"], theirs["image_grid_thw"])


def test_processor__shapes_and_errors():
    processor = DigitsProcessor()
    pages = [np.zeros((16, 8, 3), np.uint8), np.zeros((8, 24, 3), np.uint8)]
    batch = processor("a<image>b<image>", pages)
    assert batch["image_grid_thw"].tolist() == [[1, 4, 2], [1, 2, 6]]
    assert batch["pixel_values"].shape == (8 + 12, 96)
    ids = batch["input_ids"][0].tolist()
    assert ids[1:5] == [VISION_START, IMAGE, IMAGE, VISION_END]
    assert ids.count(IMAGE) == 5
    assert torch.equal(batch["mm_token_type_ids"], (batch["input_ids"] == IMAGE).long())
    with pytest.raises(ValueError, match="1 <image> placeholders for 2 images"):
        processor("<image>", pages)
    with pytest.raises(ValueError, match="multiples of 8"):
        processor("<image>", [np.zeros((12, 8, 3), np.uint8)])
    with pytest.raises(ValueError, match="RGB uint8"):
        processor("<image>", [np.zeros((8, 8, 3), np.float32)])


def test_collate__padding_does_not_change_the_logits(sample):
    parts = sample.calibration(3)
    batch = sample.processor.collate(parts, multiple_of=16)
    assert batch["input_ids"].shape[1] % 16 == 0
    with torch.no_grad():
        together = sample.model(**batch).logits
        for row, part in zip(together, parts, strict=True):
            alone = sample.model(**part).logits[0]
            assert_close(row[-len(alone) :], alone)


def test_calibration__lengths_and_grids_vary_and_nothing_is_labelled(sample):
    batches, prompts = sample.calibration(32), sample.prompts(32)
    keys = {"input_ids", "attention_mask", "mm_token_type_ids", "pixel_values", "image_grid_thw"}
    assert all(b.keys() == keys and b["input_ids"].shape[0] == 1 for b in batches)
    assert len({b["input_ids"].shape for b in batches}) >= 4
    assert len({tuple(b["image_grid_thw"].flatten().tolist()) for b in batches}) >= 3
    for b, p in zip(batches, prompts, strict=True):
        n = p["input_ids"].shape[1]
        assert n < b["input_ids"].shape[1]
        assert torch.equal(b["input_ids"][:, :n], p["input_ids"])


def test_generate__answers_end_by_themselves(sample):
    question = sample.questions(1)[0]
    prompt = sample.processor(question.prompt, question.images)
    tokens = sample.model.generate(**prompt, max_new_tokens=16, do_sample=False)
    new = tokens[0, prompt["input_ids"].shape[1] :]
    assert 2 <= len(new) < 16
    assert new[-1] == sample.model.generation_config.eos_token_id
    assert sample.processor.decode(new) == question.answer


def test_evaluate__is_deterministic_and_right_on_unseen_handwriting(sample):
    first, second = sample.evaluate(sample.model, 40), sample.evaluate(sample.model, 40)
    assert first == second
    names = {"accuracy", "nll", *(f"{m}/{kind}" for m in ("accuracy", "nll") for kind in questions.KINDS)}
    assert first.keys() == names
    assert first["accuracy"] >= 0.93


def test_compare__is_paired(sample):
    scores = sample.scores(sample.model, 20)
    same = scoring.compare(scores, scores)
    assert (same.difference, same.low, same.high) == (0, 0, 0)
    worse = [scoring.Score(s.kind, "", s.right, 0.0 if i < 5 else s.accuracy, s.nll) for i, s in enumerate(scores)]
    compared = scoring.compare(scores, worse)
    assert compared.low <= compared.difference <= compared.high
    assert compared.difference < 0


def test_accuracy__transcriptions_count_digits():
    assert scoring.accuracy("row", "12345", "12845") == 4 / 5
    assert scoring.accuracy("image", "12 34", "12 35") == 3 / 4
    assert scoring.accuracy("image", "12", "12 35") == 2 / 4
    assert scoring.accuracy("count", "12", "1") == 0


def test_load__needs_no_network_and_names_the_samples(monkeypatch):
    def refuse(*_args, **_kwargs):
        raise AssertionError("a sample opened a socket")

    monkeypatch.setattr(socket, "socket", refuse)
    assert samples.load("digits-vqa").model.config.model_type == "qwen2_vl"
    with pytest.raises(ValueError, match="digits-vqa-stress"):
        samples.load("digits")


def test_checkpoint__comes_back_to_the_bit(sample, tmp_path):
    checkpoint.save(sample.model, tmp_path)
    again, before = checkpoint.load(tmp_path), sample.model.state_dict()
    assert again.state_dict().keys() == before.keys()
    assert all(torch.equal(w, before[name]) and w.dtype == before[name].dtype for name, w in again.state_dict().items())
    assert again.generation_config.to_dict() == sample.model.generation_config.to_dict()
    assert again.lm_head.weight is again.model.language_model.embed_tokens.weight


def test_checkpoint__is_small_and_of_the_promised_dimensions(sample):
    stored = sum(f.stat().st_size for f in checkpoint.FOLDER.glob("*.safetensors"))
    assert stored <= MEGABYTES * 2**20
    text, vision = sample.model.config.text_config, sample.model.config.vision_config
    assert 3e6 <= sum(p.numel() for p in sample.model.parameters()) <= 8e6
    assert (text.hidden_size, text.num_attention_heads, text.num_key_value_heads) == (256, 4, 2)
    assert text.intermediate_size == 768
    assert min(text.num_hidden_layers, vision.depth) >= 4
    assert sample.model.lm_head.weight is sample.model.model.language_model.embed_tokens.weight
    assert all(p.dtype == torch.float32 for p in sample.model.parameters())
    assert all(torch.equal(p, p.bfloat16().float()) for p in sample.model.parameters())
    assert not sample.model.training


def test_stress__is_the_same_function(sample):
    hard = stress.stress(sample.model)
    base = checkpoint.load()
    for batch in sample.calibration(5):
        base, batch64 = to_float64(base, batch)
        assert relative_error(output_of(hard, batch64), output_of(base, batch64)) <= EXACT


def test_stress__turn_is_orthogonal_and_fixes_the_ones():
    axes = torch.linalg.qr(torch.randn(64, 2, generator=torch.Generator().manual_seed(0)))[0].T
    q = stress.turn(torch.nn.functional.pad(axes, (0, 192)), fix_ones=True)
    eye, ones = torch.eye(256, dtype=torch.float64), torch.ones(256, dtype=torch.float64)
    assert (q @ q.T - eye).norm() <= EXACT * eye.norm()
    assert (q @ ones - ones).norm() <= EXACT * ones.norm()


def test_stress__loads_untied_and_survives_saving(tmp_path):
    from transformers import Qwen2VLForConditionalGeneration

    hard = samples.load("digits-vqa-stress")
    assert hard.evaluate(hard.model, 10)["accuracy"] >= 0.93
    hard.model.save_pretrained(tmp_path)
    again = Qwen2VLForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float32).eval()
    batch = hard.calibration(1)[0]
    with torch.no_grad():
        assert torch.equal(again(**batch).logits, hard.model(**batch).logits)
