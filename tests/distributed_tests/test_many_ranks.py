"""Several ranks against one process: ``quantize_`` gives the same bits, a saved model that they share the same answers."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from many_ranks import BRANCHES, BROKEN, CASES, ON_THE_SAMPLE, ended, result, started
from split_ranks import save
from tolerance import assert_close

LAST = 98  # of some hundred messages those behind it may be of the last exchange
FAILING = str(Path(__file__).parents[1] / "support" / "failing_ranks.py")
FAST = [
    *("rtn", "rtn without data", "gptq", "awq, block", "awq + gptq", "mquant", "integer scale", "resq", "unlike", "tau", "experts"),
]
SHARED = ["qwen2_vl/w8a8", "qwen2_vl/mquant", "mixtral/w4a16"]
SLOW = [
    *("sample/mquant", "sample/w4a8", "qwen2_vl/w4a16", "qwen2_vl/w4a8", "qwen2_vl/asymmetric", "qwen2_vl/w3a16", "qwen2_vl/awq"),
    *("qwen2_vl/integer scale", "qwen2_vl/resq", "qwen2_vl/kv", "qwen2_vl/rotate", "llava/w4a8", "internvl/mquant"),
    *("gemma3_text/w4a16", "olmo2/w8a8", "mixtral/mquant", "qwen2_vl/blocks", "qwen2_vl/rotate in blocks"),
]
COMPILED = [
    *("qwen2_vl/w8a8/compiled", "qwen2_vl/kv/compiled", "olmo2/mquant/compiled", "mixtral/w4a16/compiled"),
]
Found = dict[str, list[dict[str, Any]]]


def run(size: int, names: list[str], folder: Path) -> tuple[Found, dict[str, Any]]:
    """By case, what each of ``size`` ranks found, and what this process alone does."""
    alone = {name: save(folder, name) for name in names if "/" in name}
    processes = started(size, [str(folder), *names])
    alone |= {name: result(name) for name in names if "/" not in name and name not in (BROKEN, BRANCHES)}
    for code, _, err in ended(processes):
        assert code == 0, err[-3000:]
    ranks = {name: [torch.load(folder / f"{i}.{rank}.pt") for rank in range(size)] for i, name in enumerate(names)}
    return ranks, alone


def check_equal(ranks: Found, alone: dict[str, Any]) -> None:
    """All ranks have of every quantized case what one process has."""
    for name in (n for n in alone if "/" not in n):
        for rank, found in enumerate(ranks[name]):
            for what, value in alone[name].items():
                assert found[what] == value, f"{name}: {what} on rank {rank} of {len(ranks[name])}"


def check_answers(ranks: Found, alone: dict[str, Any]) -> None:
    """All ranks answer of every shared case what one process answers, up to rounding."""
    for name in (n for n in alone if "/" in n):
        for found in ranks[name]:
            assert_close(found["logits"], alone[name]["logits"])
            assert torch.equal(found["tokens"], alone[name]["tokens"]), name
            assert found["bytes"] < alone[name]["bytes"] or "/rotate" in name, "a rank holds a part"
            for logits in found.get("compiled", {}).get("logits", ()):
                assert_close(logits, alone[name]["logits"])
            for tokens in found.get("compiled", {}).get("tokens", ()):
                assert torch.equal(tokens, alone[name]["tokens"]), name


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Found, dict[str, Any]]:
    return run(2, [*FAST, *SHARED, BROKEN, BRANCHES], tmp_path_factory.mktemp("ranks"))


def test_quantize__two_ranks_give_what_one_gives(two):
    check_equal(*two)


def test_quantize__a_batch_of_one_rank_that_cannot_be_streamed_is_known_to_all(two):
    assert "calibrated by forwards of the whole model" in str(two[1]["unlike"]["refused"])


def test_quantize__an_error_of_one_rank_ends_all_with_its_words(two):
    other, own = two[0][BROKEN]
    assert own["error"] == "RuntimeError: this batch is broken"
    assert other["error"] == "RankError: rank 1 failed: RuntimeError: this batch is broken; the model is as it was"
    assert own["as it was"]
    assert other["as it was"]
    assert other["seconds"] < 60


def test_from_pretrained__two_ranks_answer_what_one_answers(two):
    check_answers(*two)


def test_from_pretrained__inputs_are_cut_where_a_part_is_enough(two):
    layer = "model.language_model.layers.0."
    plain, hadamard = (two[0][name][1]["splits"] for name in SHARED[:2])
    names = [n.removeprefix(layer) for n in plain if n.startswith(layer)]
    assert {n for n in names if plain[layer + n] == ("inputs", "")} == {"self_attn.o_proj", "mlp.down_proj"}
    assert {n for n in names if plain[layer + n] == ("outputs", "")} == {
        *(f"self_attn.{c}_proj" for c in "qkv"),
        *("mlp.gate_proj", "mlp.up_proj"),
    }
    assert hadamard[f"{layer}mlp.down_proj"] == ("outputs", "its online Hadamard mixes all its inputs")
    assert not any("visual" in name for name in plain)
    mixture = two[0][SHARED[2]][1]["splits"]
    assert [how for name, how in mixture.items() if name.endswith("experts")] == [("experts", "")] * 2


def test_from_pretrained__a_part_is_not_saved_and_has_no_gradient(two):
    for found in two[0][SHARED[0]]:
        assert [words.split(":")[0] for words in found["refused"]] == [
            "this rank has a part of the model only",
            "a linear that ranks share has no gradient",
        ]


def test_compile__two_ranks_answer_what_one_answers(two):
    for found in two[0][BRANCHES]:
        for whole, eager, compiled, by in found.values():
            assert_close(eager, whole)
            assert_close(compiled, whole)
            assert by == ["inputs", "inputs"], "blocks of a Hadamard are a rank's own"


@pytest.mark.slow
def test_compile__two_ranks_answer_what_one_answers__models(tmp_path):
    check_answers(*run(2, COMPILED, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_quantize__ranks_give_what_one_gives(size, tmp_path):
    check_equal(*run(size, CASES, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_quantize__ranks_on_the_sample_give_what_one_gives(size, tmp_path):
    check_equal(*run(size, ON_THE_SAMPLE, tmp_path))


@pytest.mark.slow
def test_from_pretrained__two_ranks_answer_what_one_answers__all(tmp_path):
    check_answers(*run(2, SLOW, tmp_path))


@pytest.mark.slow
def test_from_pretrained__four_ranks_answer_what_one_answers(tmp_path):
    names = [f"olmo2 of 4/{recipe}" for recipe in ("w8a8", "mquant", "blocks", "blocks/compiled")]
    ranks, alone = run(4, [*names, "mixtral of 4/w4a16", "olmo2/w8a8"], tmp_path)
    refused = ranks.pop("olmo2/w8a8")
    assert {found["error"] for found in refused} == {
        "num_key_value_heads = 2 cannot be shared evenly by 4 ranks; start as many as divide it"
    }
    del alone["olmo2/w8a8"]
    check_answers(ranks, alone)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_quantize__goes_on_where_a_killed_rank_stopped_with_other_ranks(seed, tmp_path):
    """One of 4 ranks ends at a random point; 2 go on, and this process alone, to the same bits."""
    draw = random.Random(seed)
    at, who = draw.randrange(1, 110), draw.randrange(4)
    done = ended(started(4, [f"kill.{at}.{who}", "gptq", str(tmp_path / "resume"), str(tmp_path / "out")], FAILING))
    killed = done.pop(who)
    assert killed[0] in (-9, 0), "the work may be over before its message of that number"
    codes = [code for code, _, _ in done]
    # Who has heard of all ranks in the last exchange keeps its model; that the others have heard, too, it cannot know.
    assert set(codes) <= ({0, 8} if at > LAST else {8}) if killed[0] else codes == [0] * 3, done
    seconds = [float(re.findall(r" after (\d+\.\d) s as it was$", err, re.MULTILINE)[0]) for code, _, err in done if code]
    assert all(s < 60 for s in seconds)
    if killed[0]:
        assert not (tmp_path / "out.4").exists()
    again = ended(started(2, ["none", "gptq", str(tmp_path / "resume"), str(tmp_path / "out")], FAILING))
    assert [code for code, _, _ in again] == [0, 0], again
    wanted = result("gptq")["tensors"]
    assert json.loads((tmp_path / "out.2").read_text()) == wanted
    assert result("gptq", resume_dir=str(tmp_path / "resume"))["tensors"] == wanted
