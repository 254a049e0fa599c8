"""``quantize_`` in a process group gives what one process gives: codes, scales, configs and reports, to the bit."""

import json
import random
import re
from pathlib import Path

import pytest
from many_ranks import CASES, ON_THE_SAMPLE, ended, result, started

from mmqc.checkpoint.checksum import hashes

FAILING = str(Path(__file__).parents[1] / "support" / "failing_ranks.py")


def check(size, names, folder):
    """All ranks of ``size`` have for every case what this process has."""
    processes = started(size, [str(folder), *names])
    alone = {name: result(name) for name in names}
    for code, _, err in ended(processes):
        assert code == 0, err[-3000:]
    for number, name in enumerate(names):
        for rank in range(size):
            together = json.loads((folder / f"{number}.{rank}.json").read_text())
            for what, value in alone[name].items():
                assert together[what] == value, f"{name}: {what} on rank {rank} of {size}"


def test_quantize__two_ranks_give_what_one_gives(tmp_path):
    check(2, CASES, tmp_path)


@pytest.mark.slow
def test_quantize__four_ranks_give_what_one_gives(tmp_path):
    check(4, CASES, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_quantize__ranks_on_the_sample_give_what_one_gives(size, tmp_path):
    check(size, ON_THE_SAMPLE, tmp_path)


def test_quantize__an_error_of_one_rank_ends_all_with_its_words(tmp_path):
    other, own = ended(started(2, ["raise", "rtn", "", str(tmp_path / "out")], FAILING))
    assert (other[0], own[0]) == (8, 7), other[2][-2000:]
    words = "RankError: rank 1 failed: RuntimeError: this batch is broken; the model is as it was"
    assert re.search(rf"^{words} after \d+\.\d s as it was$", other[2], re.MULTILINE)
    assert re.search(r"^RuntimeError: this batch is broken after \d+\.\d s as it was$", own[2], re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_quantize__goes_on_where_a_killed_rank_stopped_with_other_ranks(seed, tmp_path):
    """One of 4 ranks ends at a random point; 2 go on, or this process alone, to the same bits."""
    from safetensors.torch import load_file

    draw = random.Random(seed)
    at, who = draw.randrange(1, 240), draw.randrange(4)
    done = ended(started(4, [f"kill.{at}.{who}", "gptq", str(tmp_path / "resume"), str(tmp_path / "out")], FAILING))
    killed = done.pop(who)
    assert killed[0] in (-9, 0), "the work may be over before its message of that number"
    assert [code for code, _, _ in done] == [8 if killed[0] else 0] * 3, done
    seconds = [float(re.findall(r" after (\d+\.\d) s as it was$", err, re.MULTILINE)[0]) for code, _, err in done if code]
    assert all(s < 60 for s in seconds)
    if killed[0]:
        assert not (tmp_path / "out.4").exists()
    again = ended(started(2, ["none", "gptq", str(tmp_path / "resume"), str(tmp_path / "out")], FAILING))
    assert [code for code, _, _ in again] == [0, 0], again
    wanted, found = result("gptq")["tensors"], hashes(load_file(tmp_path / "out.2"))
    assert found == wanted
    assert result("gptq", resume_dir=str(tmp_path / "resume"))["tensors"] == wanted
