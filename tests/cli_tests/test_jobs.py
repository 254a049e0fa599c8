"""The commands on the shipped sample: a folder of data in, a model, figures and a page out; and their exit codes."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest
from commands import invoke
from PIL import Image

import mmqc
from mmqc.cli import jobs as cli_jobs


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Four questions of the sample as a folder with data.jsonl."""
    folder = tmp_path_factory.mktemp("data")
    rows = []
    for i, q in enumerate(mmqc.samples.load("digits-vqa").questions(4)):
        parts = q.prompt.rstrip("\n").split("<image>")
        content = [{"type": "text", "text": parts[0]}]
        for j, (page, text) in enumerate(zip(q.images, parts[1:], strict=True)):
            Image.fromarray(page).save(folder / f"{i}-{j}.png")
            content += [{"type": "image", "image": f"{i}-{j}.png"}, {"type": "text", "text": text}]
        rows.append({"messages": [{"role": "user", "content": content}], "answer": q.answer})
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.fixture(scope="module")
def quantized(data, tmp_path_factory):
    """digits-vqa in W8A8, calibrated on the folder through the command line."""
    out = tmp_path_factory.mktemp("w8a8")
    arguments = ("--recipe", "rtn", "--w", "8", "--a", "8", "--calibration", str(data), "--limit", "2", "--out", str(out))
    result = invoke("quantize", "digits-vqa", *arguments)
    assert result.exit_code == 0, result.output
    return out, result.output


def test_quantize__from_a_folder_says_first_what_it_takes(quantized):
    out, output = quantized
    assert re.search(r"memory +about \d+ MB.*\n", output)
    assert output.index("memory ") < output.index("layers quantized")
    saved = json.loads((out / "quantization.json").read_text())
    assert saved["config"]["language"]["weight"]["bits"] == saved["config"]["language"]["activation"]["bits"] == 8
    assert all(layer["sqnr"] for layer in saved["layers"])


def test_quantize__float8_is_in_the_schemes():
    result = invoke("quantize", "digits-vqa", "--w", "8", "--float8", "--dry-run")
    assert "language W8A8-fp8" in result.stdout


def test_quantize__dry_run_writes_nothing(tmp_path):
    result = invoke("quantize", "digits-vqa", "--w", "4", "--dry-run", "--out", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    assert "W4A8" in result.output
    assert "32 prompts of the sample" in result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("quantize", "digits-vqa"), 2, "--out"),
        (("quantize", "nowhere", "--out", "x", "-r", "rtn"), 2, "neither a sample"),
        (("quantize", "digits-vqa", "--out", "x", "-r", "rtn", "--w", "5"), 2, "WeightSpec.bits"),
        (("quantize", "digits-vqa", "--out", "x", "-r", "rtn", "--format", "gguf"), 2, "mmqc or compressed-tensors"),
        (("quantize", "digits-vqa", "--out", "x", "--calibration", "no/folder"), 3, "no/folder"),
        (("quantize", "digits-vqa", "--out", "x", "--calibration", "0"), 3, "this config needs data"),
        (("eval", "digits-vqa", "--min-recovery", "0.9"), 2, "--against"),
        (("eval", "digits-vqa", "--data", "no/file.jsonl"), 3, "does not exist"),
        (("report", "no/run"), 3, "does not exist"),
        (("quantize", "nowhere", "--dry-run"), 2, "nowhere does not exist"),
        (("quantize", "digits-vqa", "--dry-run", "--sample", "no"), 2, "the samples are"),
        (("quantize", "digits-vqa", "--dry-run", "--calibration", "no/folder"), 3, "no/folder"),
        (("quantize", "digits-vqa", "--dry-run", "--calibration", "-3"), 2, "0 or more"),
        (("quantize", "digits-vqa", "--dry-run", "--recipe", "rtn", "--float8"), 2, "static activations"),
        (("quantize", "digits-vqa", "-r", "rtn", "--calibration", "0", "--out", __file__), 2, "a file"),
        (("report", __file__), 3, "is no JSON"),
        (("passes", "--config", __file__), 3, "is no JSON"),
        (("export", "digits-vqa", "x.pt"), 2, "ends in .pt2"),
    ],
)
def test_exit_codes__tell_a_wrong_option_from_a_refusal(arguments, code, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke(*arguments)
    assert result.exit_code == code, result.output
    assert words in re.sub(r"[\s│]+", " ", result.output)
    assert "Traceback" not in result.output
    assert list(tmp_path.iterdir()) == []


def test_quantize__refuses_data_without_an_image(tmp_path):
    (tmp_path / "data.jsonl").write_text('{"question": "read image 1.", "answer": "1"}\n')
    out = tmp_path / "out"
    result = invoke("quantize", "digits-vqa", "-r", "rtn", "--calibration", str(tmp_path), "--out", str(out))
    assert result.exit_code == 3
    assert "no example has an image" in result.output
    assert not out.exists()


def test_load__a_folder_without_weights_is_refused_in_one_line(tmp_path):
    shutil.copy(Path(mmqc.samples.__file__).parent / "digits_vqa" / "config.json", tmp_path)
    result = invoke("bench", str(tmp_path))
    assert result.exit_code == 3
    assert str(tmp_path) in result.output
    assert "Traceback" not in result.output


def test_version__is_that_of_the_distribution():
    result = invoke("--version")
    assert result.exit_code == 0
    assert re.fullmatch(r"mmqc (\d+\.\d+\S*|not installed as a distribution)\n", result.output)


def test_quantize__short_memory_is_code_4_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setattr(cli_jobs, "available", lambda: 1000)
    result = invoke("quantize", "digits-vqa", "-r", "rtn", "--calibration", "0", "--out", str(tmp_path / "out"))
    assert result.exit_code == 4, result.output
    assert "--force" in result.output
    assert not (tmp_path / "out").exists()


def test_eval__questions_of_a_folder_against_the_float_model(data, quantized, tmp_path):
    out, _ = quantized
    text = tmp_path / "text.txt"
    text.write_text("read image 1.\n" * 5)
    arguments = ("--data", str(data), "-n", "2", "--against", "digits-vqa", "--text", str(text), "--max-new-tokens", "8")
    result = invoke("eval", str(out), *arguments, "--min-recovery", "0.99", "--json", str(tmp_path / "e.json"))
    assert result.exit_code == 0, result.output
    figures = json.loads((tmp_path / "e.json").read_text())["eval"]
    assert figures["accuracy"] == figures["recovery"] == 1
    assert figures["nll difference low"] <= figures["nll difference"] <= figures["nll difference high"]
    assert 10 < figures["SQNR visual, dB"] < 80
    assert 10 < figures["SQNR text, dB"] < 80
    nll, other = (math.log(figures[name]) for name in ("perplexity", "perplexity of the other"))
    assert nll == pytest.approx(other, rel=0.1)  # of a text that neither was trained on
    result = invoke("eval", str(out), *arguments[:-4], "--max-new-tokens", "8", "--min-recovery", "1.5")
    assert result.exit_code == 1, result.output


def test_bench_and_report__one_page_of_all_runs(quantized, tmp_path):
    out, _ = quantized
    result = invoke("bench", str(out), "--no-compile", "--new-tokens", "3", "--repeats", "1", "--json", str(tmp_path / "b.json"))
    assert result.exit_code == 0, result.output
    (row,) = json.loads((tmp_path / "b.json").read_text())["bench"]
    assert row["first_token_seconds"] > 0
    assert row["tokens_per_s"] > 0
    (tmp_path / "e.json").write_text(json.dumps({"eval": {"accuracy": 0.97, "recovery": 0.98}}))
    found = {"graphs": 2, "quantized_graphs": 1, "kernels": {"mmqc_scaled_matmul": 46}, "breaks": {"item() at a.py:1": 3}}
    found["fallbacks"] = [{"graph": 0, "op": "hadamard", "reason": "no <device>"}]
    (tmp_path / "k.json").write_text(json.dumps({"explain": found}))
    page = tmp_path / "page.html"
    result = invoke("report", str(out), *(str(tmp_path / f"{name}.json") for name in "bek"), "--out", str(page))
    assert result.exit_code == 0, result.output
    html = page.read_text()
    assert all(words in html for words in ("Size and speed", "What quantization costs", "Activation ranges", "98.0 %"))
    assert all(words in html for words in ("mmqc_scaled_matmul", "no &lt;device&gt;", "1 fallback", "item() at a.py:1"))
    assert "http" not in re.sub(r"data:image[^\"]+", "", html)


def test_report__refuses_a_file_of_something_else(tmp_path):
    (tmp_path / "x.json").write_text("{}")
    result = invoke("report", str(tmp_path / "x.json"), "--out", str(tmp_path / "page.html"))
    assert result.exit_code == 3, result.output
    assert "is no report of mmqc; pass a quantization.json" in " ".join(result.output.split())
