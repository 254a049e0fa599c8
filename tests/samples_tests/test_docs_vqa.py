"""The pages and questions of docs-vqa: what is asked stands where the page says; its weights read some."""

from random import Random

import numpy as np
import pytest
import torch
from tolerance import assert_close

from mmqc import samples
from mmqc.samples import handwriting, scoring
from mmqc.samples.docs import alphabet, charts, checkpoint, glyphs, page, place, questions, words
from mmqc.samples.docs.canvas import Canvas
from mmqc.samples.sample import docs_processor


@pytest.fixture(scope="module")
def hand():
    return handwriting.load_split("calibration")


def tiny():
    torch.manual_seed(0)
    return checkpoint.new_model(checkpoint.new_config(width=128, vision_depth=1, depth=1))


@pytest.mark.parametrize("kind", [kind for kind in questions.KINDS if kind != "several"])
def test_pages__answers_are_what_is_written(kind, hand):
    rnd = Random(kind)
    for _ in range(3):
        height, width = questions.size(rnd, kind if kind in ("line", "page") else "card")
        drawn = questions.draw(rnd, kind, height, width, hand)
        assert drawn.image.shape == (height, width, 3)
        assert height * width <= questions.MOST_TOKENS * alphabet.CELL**2
        assert 0 <= min(drawn.xs) <= max(drawn.xs) < width
        assert 0 <= min(drawn.ys) <= max(drawn.ys) < height
        for fact in drawn.facts:
            assert 0 < len(fact.answer) == len(fact.where) <= page.LONGEST
            assert all(at < 0 or drawn.characters[at] == c for at, c in zip(fact.where, fact.answer, strict=True))
            assert set(fact.question + fact.answer) <= set(alphabet.CHARACTERS)


def test_questions__the_seed_and_the_number_fix_them(hand):
    first, again = ([questions.question(2, i, hand) for i in range(18)] for _ in range(2))
    assert [q.kind for q in first] == [*questions.KINDS] * 2
    for a, b in zip(first, again, strict=True):
        assert (a.prompt, a.answer) == (b.prompt, b.answer)
        assert all(np.array_equal(x, y) for x, y in zip(a.images, b.images, strict=True))
        assert a.prompt.count("<image>") == len(a.images)
    assert {len(q.images) for q in first} > {1}
    assert questions.question(3, 0, hand).answer != first[0].answer


def test_several__which_image_has_a_text():
    def reads(text):
        return page.Page("line", np.zeros((1, 1, 3)), [page.Fact("read the image.", text, (0,) * 4)], list(text), [], [])

    pages = [reads("abcd"), reads("bcde")]
    asked = {questions.about_several(Random(i), pages, 1) for i in range(40)}
    assert {(f.question, f.answer) for f in asked} == {
        ("in image 2: read the image.", "bcde"),
        ('which image has "bcde"?', "2"),
    }


def test_chart__marks_stand_at_the_height_of_their_value():
    axes = charts.Axes(left=20, right=100, top=30, bottom=130, step=10, ticks=4)
    assert axes.level(0) == 130
    assert axes.level(20) == (axes.level(0) + axes.level(40)) // 2
    assert axes.level(40) >= axes.top


def test_canvas__text_is_the_glyphs_and_may_not_leave_the_page():
    face = glyphs.font("DejaVuSans", 14)
    canvas = Canvas(20, 40, paper=(255, 255, 255), ink=(10, 20, 30))
    run = canvas.text(2, 15, "Hi ß", face)
    assert run.right - run.left == face.width("Hi ß")
    assert list(run.part(1, 2)) == [1]
    image = canvas.image()
    assert image.min(axis=(0, 1)).tolist() == [10, 20, 30]
    flat = image.copy()
    canvas.paint()
    np.testing.assert_array_equal(canvas.image(), flat)  # the same with a background
    with pytest.raises(ValueError, match="leaves a page of 40x20"):
        canvas.text(30, 15, "Hi", face)
    assert not glyphs.font("cmr10", 12).holds("ж")


def test_words__made_up_ones_have_the_letters_of_their_language():
    rnd = Random(0)
    for language in words.LANGUAGES:
        letters = set(words.LEXICON[language].lower()) | {"е"}
        made = {words.made_up(rnd, language) for _ in range(20)}
        assert all(set(word) <= letters and 3 <= len(word) <= 10 for word in made)
        assert len(made) > 10


def test_anls__is_that_of_biten_et_al():
    assert scoring.accuracy("line", "abcd", "abcd") == 1
    assert scoring.accuracy("line", "abxd", "abcd") == 0.75
    assert scoring.accuracy("page", "abd", "abcd") == 0.75
    assert scoring.accuracy("page", "axxd", "abcd") == 0  # half of it is wrong
    assert scoring.accuracy("table", "31", "310") == 0


def test_groups__long_questions_have_small_batches(hand):
    asked = [questions.question(2, i, hand) for i in range(54)]
    found = scoring.groups(asked, alphabet.PATCH)
    assert sorted(i for group in found for i in group) == list(range(54))
    for group in found:
        assert len({asked[i].kind for i in group}) == 1
        longest = max(scoring._length(asked[i], alphabet.PATCH) for i in group)
        assert len(group) == 1 or len(group) * longest <= scoring.BATCH_TOKENS


def test_log_probs__through_the_cache_are_those_of_one_pass(hand):
    model, processor = tiny(), docs_processor()
    asked = [questions.question(2, number, hand) for number in (0, 9)]  # two lines
    one, cached = (scoring.answer_log_probs(model, processor, asked, how) for how in (False, True))
    for a, b, q in zip(one, cached, asked, strict=True):
        assert a.shape == b.shape == (len(q.answer) + 1, alphabet.VOCAB_SIZE)
        assert_close(b, a)


def test_checkpoint__files_are_small_and_hold_the_model(tmp_path, monkeypatch):
    model = tiny()
    monkeypatch.setattr(checkpoint, "LARGEST", 400_000)
    checkpoint.save(model, tmp_path)
    files = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(files) > 1
    again = checkpoint.load(tmp_path)
    for name, weight in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight.bfloat16().float()), name
    for file in files:
        file.unlink()
    with pytest.raises(place.SampleMissingError, match="holds no model"):
        checkpoint.load(tmp_path)


def test_load__says_where_the_files_are(monkeypatch, tmp_path):
    monkeypatch.setattr(place, "NAME", "nowhere")
    monkeypatch.setenv(place.VARIABLE, str(tmp_path))
    with pytest.raises(place.SampleMissingError, match=rf"not in mmqc's wheel.*{place.VARIABLE}"):
        samples.load("docs-vqa")


def test_load__reads_documents_that_it_has_not_seen():
    sample = samples.load("docs-vqa")
    asked = [q for q in sample.questions(9) if q.kind in ("line", "receipt", "form", "photo")]
    found = scoring.score(sample.model, sample.processor, asked)
    assert len(found) == 4
    assert sum(score.accuracy for score in found) > 3.9
