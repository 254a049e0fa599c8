"""Figures against their formulas on models whose answers are known."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from models import tiny_qwen2_vl
from torch import nn

from mmqc.cli import evaluation
from mmqc.cli.chat_data import Example
from mmqc.cli.evaluation import Answer, compared, reasons, summary
from mmqc.samples.scoring import Interval, bootstrap

VOCABULARY = 7


class Table(nn.Module):
    """Logits are a row of a table by the last token: next-token chances that a test can compute by hand."""

    def __init__(self, seed=0):
        super().__init__()
        table = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed))
        self.logits = nn.Parameter(table, requires_grad=False)

    def forward(self, input_ids, use_cache=None):
        return SimpleNamespace(logits=self.logits[input_ids])

    def generate(self, input_ids, max_new_tokens, do_sample):
        for _ in range(max_new_tokens):
            input_ids = torch.cat((input_ids, self.logits[input_ids[:, -1:]].argmax(-1)), 1)
        return input_ids


class Letters:
    """a..g are the tokens 0..6."""

    chat_template = "plain"

    def encode(self, text):
        return [ord(c) - ord("a") for c in text]

    def decode(self, ids, skip_special_tokens):
        return "".join(chr(int(i) + ord("a")) for i in ids)

    def apply_chat_template(self, messages, **options):
        text = "".join(part["text"] for m in messages for part in m["content"])
        return {"input_ids": torch.tensor([self.encode(text)])}


def example(text, answer):
    return Example(({"role": "user", "content": [{"type": "text", "text": text}]},), answer)


def test_ask__answers_and_their_nll():
    model = Table()
    model.logits.data[2, 5] = model.logits.data[5, 3] = 9.0
    right, wrong = evaluation.ask(model, Letters(), [example("abc", "fd"), example("abc", "ab")], max_new_tokens=2)
    chances = model.logits.double().log_softmax(-1)
    assert (right.said, right.accuracy, wrong.accuracy) == ("fd", 1.0, 0.0)
    assert right.nll == pytest.approx(-float(chances[2, 5] + chances[5, 3]) / 2, rel=1e-6)
    assert wrong.nll == pytest.approx(-float(chances[2, 0] + chances[0, 1]) / 2, rel=1e-6)
    with pytest.raises(ValueError, match="evaluation needs one in every line"):
        evaluation.ask(model, Letters(), [example("abc", "")])


def test_ask__a_template_that_changes_the_prompt_has_no_nll():
    class Thinks(Letters):
        def apply_chat_template(self, messages, **options):
            found = super().apply_chat_template(messages)["input_ids"]
            opened = torch.tensor([[6]])
            return {"input_ids": torch.cat((found, opened), 1) if options["add_generation_prompt"] else found}

    (answer,) = evaluation.ask(Table(), Thinks(), [example("abc", "fd")], max_new_tokens=1)
    assert math.isnan(answer.nll)
    assert answer.another_prompt
    assert reasons(summary([answer]), [answer]) == [evaluation.ANOTHER_PROMPT]


def test_answer__forgives_case_space_and_a_full_stop():
    assert Answer(" Seven. ", "seven", 0.0).accuracy == 1
    assert (Answer("it is 7", "7", 0.0).accuracy, Answer("it is 7", "7", 0.0).contains) == (0, 1)


def test_perplexity__is_that_of_the_table_over_windows(tmp_path):
    model, text = Table(), "abcdefgabc"
    (tmp_path / "t.txt").write_text(text)
    ids = Letters().encode(text)
    chances = model.logits.double().log_softmax(-1)
    pairs = [(a, b) for i, (a, b) in enumerate(itertools.pairwise(ids)) if i % 4 != 3]  # windows of 4 tokens
    want = math.exp(-sum(float(chances[a, b]) for a, b in pairs) / len(pairs))
    assert evaluation.perplexity(model, Letters(), [tmp_path / "t.txt"], window=4) == pytest.approx(want, rel=1e-6)
    (tmp_path / "t.txt").write_text("a")
    with pytest.raises(ValueError, match="at least two tokens"):
        evaluation.perplexity(model, Letters(), [tmp_path / "t.txt"])


def test_bootstrap__covers_the_mean_as_often_as_it_says():
    rng = np.random.default_rng(1)
    hits = 0
    for seed in range(200):
        interval = bootstrap(rng.normal(0.3, 1.0, 80).tolist(), draws=400, seed=seed)
        hits += interval.low <= 0.3 <= interval.high
    assert 180 <= hits <= 200  # 95 % of 200 is 190, three standard deviations are 9


def test_bootstrap__draws_within_groups_which_weigh_the_same():
    assert bootstrap([0.0] * 5, [1.0] * 50) == Interval(0.5, 0.5, 0.5)
    few, many = bootstrap([0.0, 1.0], [0.0] * 50), bootstrap([0.0, 1.0] * 50, [0.0] * 50)
    assert (few.mean, few.low, few.high) == (0.25, 0.0, 0.5)
    assert 0.0 < many.low < many.mean == 0.25 < many.high < 0.5


def test_compared__is_paired_question_by_question():
    a = [Answer("x", "x", 1.0), Answer("y", "x", 2.0), Answer("x", "x", 1.0), Answer("x", "x", 0.0)]
    b = [Answer("x", "x", 1.5), Answer("y", "x", 2.5), Answer("y", "x", 1.5), Answer("x", "x", 0.5)]
    found = compared(a, b)
    assert summary(a)["accuracy"] == 0.75
    assert found["recovery"] == pytest.approx(2 / 3)
    nll = found["nll difference"]
    assert (nll.mean, nll.low, nll.high) == (0.5, 0.5, 0.5)  # equal differences leave nothing to draw
    assert found["accuracy difference"].mean == -0.25
    assert math.isnan(compared([Answer("y", "x", 0.0)], [Answer("x", "x", 0.0)])["recovery"])


def test_reasons__tell_a_model_that_is_never_right_from_one_whose_outputs_are_not_finite():
    wrong = [Answer("y", "x", 1.0), Answer("z", "x", 2.0)]
    both = summary(wrong) | compared(wrong, wrong) | {"SQNR text, dB": 30.0}
    assert math.isnan(both["recovery"])
    assert reasons(both, wrong) == [evaluation.NEVER_RIGHT]
    assert reasons(both | {"recovery": 0.9}, wrong) == []
    assert reasons(both | {"SQNR text, dB": math.nan}, wrong) == [evaluation.NEVER_RIGHT, evaluation.NOT_FINITE]
    broken = [Answer("", "x", math.nan)]
    assert reasons(summary(broken), broken) == [evaluation.NOT_FINITE]
    assert reasons({"nll difference": Interval(math.nan, math.nan, math.nan)}, broken) == [evaluation.NOT_FINITE]


def test_logit_sqnr__tells_visual_from_text_positions():
    model, inputs = tiny_qwen2_vl()
    other, _ = tiny_qwen2_vl()
    visual = inputs["mm_token_type_ids"][0] > 0

    def scaled(module, args, output):
        output.logits[:, visual] *= 1.1
        output.logits[:, ~visual] *= 1.01

    other.register_forward_hook(scaled)
    found = evaluation.logit_sqnr(model, other, [inputs, inputs])
    assert found["visual"] == pytest.approx(20, abs=1e-3)
    assert found["text"] == pytest.approx(40, abs=1e-2)
    del inputs["mm_token_type_ids"]
    assert evaluation._visual(model, inputs)[0].tolist() == visual.tolist()
