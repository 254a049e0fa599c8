"""The comparison with other libraries: its page is what its figures say, and scores are what they are called."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tolerance import assert_close
from torchao.quantization.granularity import PerGroup

import mmqc
from benchmarks.peers import cases, compare, drawn, held_out, orders, questions
from benchmarks.peers.answers import answers, scores
from benchmarks.peers.cases import CASES, RECIPES
from benchmarks.peers.reasons import REASONS
from benchmarks.peers.spread import BITS, as_the_peer
from benchmarks.peers.zero_points import ways
from mmqc.config import WeightSpec
from mmqc.solvers import solve


@pytest.mark.slow
def test_page__is_what_the_figures_say() -> None:
    found = json.loads(compare.RESULTS.read_text(encoding="utf-8"))
    assert compare.PAGE.read_text(encoding="utf-8") == compare.page(found)
    made = compare.rows(found["runs"])
    assert len(made) >= 8
    assert set(compare.worse(made)) == REASONS.keys()
    assert {key for case in CASES for key in compare.keys(case)} >= found["runs"].keys()


@pytest.mark.parametrize(
    ("low", "high", "said"), [(-2.0, -1.0, "better"), (1.0, 2.0, "worse"), (-1.0, 1.0, "tie"), (0.0, 0.0, "tie")]
)
def test_verdict__is_by_the_interval(low: float, high: float, said: str) -> None:
    assert compare.verdict(low, high) == said


def test_recipes__give_the_form_that_a_case_names() -> None:
    for case in CASES:
        weight = RECIPES[case.ours](case.bits, case.group or None, case.symmetric).language.weight
        assert (weight.bits, weight.group_size, weight.symmetric) == (case.bits, case.group, case.symmetric)


def test_scores__of_the_answers_tokens_in_the_questions_order() -> None:
    g = torch.Generator().manual_seed(0)
    logits = {length: torch.randn(2, 6, 5, generator=g) for length in (1, 2)}
    batches = [
        {"inputs": {"which": 2}, "numbers": [3, 0], "size": 2},
        {"inputs": {"which": 1}, "numbers": [1, 2], "size": 1},
    ]
    model = lambda which, use_cache: SimpleNamespace(logits=logits[which])  # noqa: E731
    found = answers(model, batches)
    assert [len(f) for f in found] == [2, 1, 1, 2]
    assert torch.equal(found[0], logits[2][1, 3:5].double().log_softmax(-1))
    ids = [torch.zeros(len(f), dtype=torch.int64) for f in found]
    same = scores(found, found, ids)
    assert same["kl"] == [0.0] * 4
    assert same["nll"][1] == pytest.approx(-float(found[1][0, 0]))
    assert min(scores(found, found[::-1], ids[::-1])["kl"][1:3]) > 0


def test_ways__between_the_codes_both_ends_lose_least() -> None:
    w = torch.randn(40, 96, generator=torch.Generator().manual_seed(0))
    lost = {name: float((way(w).dequantize() - w).abs().pow(2.4).sum()) for name, way in ways(2, 32).items()}
    assert len(lost) == 5
    every, found = lost.pop("every pair of ends, zero between codes"), lost.pop("mse_clip, zero between codes")
    assert every * (1 - 1e-4) <= found < 1.01 * every
    assert found < min(lost.values())


def test_as_the_peer__every_step_is_the_peers_and_ends_with_the_block() -> None:
    g = torch.Generator().manual_seed(1)
    w, x = torch.randn(8, 64, generator=g), torch.randn(200, 64, generator=g)
    spec, h = WeightSpec(BITS, PerGroup(32), "gptq"), x.T @ x
    shipped = solve(w, spec, h)
    with as_the_peer():
        found = solve(w, spec, h)
    assert_close(found.scale, w.unflatten(1, (-1, 32)).abs().amax(-1) * 2 / (2**BITS - 1))
    assert not torch.equal(shipped.scale, found.scale)
    assert torch.equal(solve(w, spec, h).codes, shipped.codes)


def test_again__tells_the_verdicts_that_another_machine_changes() -> None:
    """Of two rows one gives the same numbers, and another's interval no longer touches zero."""
    cases = [case for case in CASES if case.sample == "digits-vqa"][:2]
    first, rows, peer = dict[str, Any](), dict[str, Any](), {"nll": [0.02] * 30, "kl": [0.01] * 30}
    for case, then, now in zip(cases, (0.02, 0.02), (0.02, 0.5), strict=True):
        ours, theirs = compare.keys(case)
        first |= {ours: {"nll": [then] * 30, "kl": [0.01] * 30}, theirs: peer}
        rows[f"{ours} {theirs}"] = drawn.row({"nll": [now] * 30, "kl": [0.01] * 30}, peer)
    said = drawn.of_again(first, {"about": {"commit": "abc"}, "rows": rows})
    assert "side of 2 rows" in said
    assert f"1 of 2 of {cases[0].ours}: codes" in said
    assert "1 of 4 intervals say worse" in said
    assert said.count("| tie | worse |") == 1
    assert "0.5000" in said


def test_questions__tell_what_few_of_them_hold() -> None:
    """A mean that one of a hundred questions makes is a tie, whatever it is; the median says what the others do."""
    few = {"nll": [0.02] * 100, "kl": [1e-6] * 99 + [0.5]}
    case = questions.chosen()[0]
    one = questions.summary(few, {"nll": [0.02] * 100, "kl": [2e-6] * 100}, ["row"] * 99 + ["count"])
    assert one["spread of KL"]["mmqc"] == {"share of few": 1.0, "median": 1e-6, "lost, by kind": {"count": 1}}
    said = drawn.of_questions({"questions": 100, "rows": {" ".join(compare.keys(case)): one}})
    assert "1 rows, 100 questions behind those of the page (0 better, 2 tie, 0 worse of 2" in said
    assert "| 1.0e-06 / 2.0e-06 | 100% / 1% | 1 count / 0 | tie | tie |" in said


def test_questions__rows_are_chosen_by_the_method_alone() -> None:
    rows = questions.chosen()
    assert {case.ours for case in rows} == {"rtn", "gptq", "awq", "awq+gptq"}
    assert {case.sample for case in rows} == {questions.SAMPLE}
    assert len(rows) == 16


def test_held_out__second_moments_and_errors_are_those_of_the_layer() -> None:
    model, batches = torch.nn.Sequential(torch.nn.Linear(6, 4, bias=False)), [{"input": torch.randn(3, 5, 6)} for _ in range(2)]
    moment = held_out.moments(model, batches)["0"]
    x = torch.cat([batch["input"].flatten(0, 1) for batch in batches]).double()
    assert_close(moment, x.T @ x)
    quantized = solve(model[0].weight.detach(), WeightSpec(4, PerGroup(6)))
    lost = (x @ (model[0].weight.detach() - quantized.dequantize()).double().T).square().sum()
    assert abs(held_out.error(model[0].weight.detach(), quantized, moment) / float(lost) - 1) < 1e-6


def test_reorder__another_order_of_channels_computes_the_same() -> None:
    sample = mmqc.samples.load("digits-vqa")
    model, [batch] = sample.model.double(), sample.calibration(1)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    want = model(**batch).logits
    orders.reorder(model, 0)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    orders.reorder(model, 3)
    off = (model(**batch).logits - want).abs().max()
    assert float(off) < 1e-6 * float(want.abs().max())  # norms are computed in float32
    weights = {name: p for name, p in model.named_parameters() if name.endswith(".weight")}
    same = {name.split(".")[-2] for name, weight in weights.items() if torch.equal(weight, before[name])}
    moved = {"embed_tokens", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert not same & moved


def test_of_asymmetric__both_sides_and_medians() -> None:
    case = cases.nearest()[0]
    ours, theirs = cases.keys(case)
    run = lambda kl: {"nll": [1.0] * 20, "kl": [kl] * 20}  # noqa: E731
    first = {ours: run(0.04), theirs: run(0.08)}
    page = drawn.of_asymmetric(first, {"runs": {ours: run(0.02)}})
    assert page.startswith(
        "Of 2 intervals beside quantized inputs 1 better, 1 tie, 0 worse; beside the peer 1 better, 1 tie, 0 worse."
    )
    assert "is 0.50 of that with quantized inputs, and 0.25 of the peer's" in page
    assert "inputs it is 0.50 of" in page
    assert "| 0.04000 / 0.02000 / 0.08000 | 4.0e-02 / 2.0e-02 / 8.0e-02 | tie | better | tie | better |" in page
    assert {(c.ours, c.peer) for c in cases.nearest()} >= {("gptq", "llmcompressor gptq"), ("learned", "llmcompressor autoround")}
    assert len({(c.sample, c.ours, c.form) for c in cases.nearest()}) == len(cases.nearest())


def test_of_orders__says_how_often_mmqc_is_what() -> None:
    case = orders.chosen()[0]
    low = [{"nll": [0.1, 0.2], "kl": [0.0, 0.1]}, {"nll": [0.2, 0.2], "kl": [0.1, 0.1]}]
    high = [{kind: [v + 1 for v in values] for kind, values in run.items()} for run in low]
    row = {"orders": [1, 2]} | orders.summary(low, high)
    assert row["kl"]["mmqc is"] == "better"
    assert row["kl"]["difference"] == [-1.0, -1.0, -1.0]
    assert row["lost"] == {"mmqc": [0, 0], "peer": [2, 2]}
    assert row["median KL"] == {"mmqc": 0.1, "peer": 1.1}
    page = drawn.of_orders({"rows": {" ".join(orders.keys(case)): row}})
    assert page.startswith("2 better, 0 tie, 0 worse of 2 intervals")
    assert "| 2 of 2 |" in page
