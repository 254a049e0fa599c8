"""The commands on the shipped sample: a folder of data in, a model, figures and a page out."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest
from commands import invoke
from PIL import Image

import mmqc
from mmqc.cli import jobs


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
        rows.append({"messages": [{"role": "user", "content": content}], "answer": q.answer, "kind": q.kind})
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
    assert re.search(r"shared +about \d+ MB on each of 2 ranks\n", output)
    assert output.index("memory ") < output.index("layers quantized")
    saved = json.loads((out / "quantization.json").read_text())
    assert saved["config"]["language"]["weight"]["bits"] == saved["config"]["language"]["activation"]["bits"] == 8
    assert all(layer["sqnr"] for layer in saved["layers"])


@pytest.mark.slow
def test_quantize__goes_on_from_its_resume_dir(data, quantized, tmp_path, monkeypatch):
    folders = {"--out": tmp_path / "out", "--resume-dir": tmp_path / "blocks", "--spool": tmp_path / "spool"}
    arguments = ["digits-vqa", "--recipe", "rtn", "--w", "8", "--a", "8", "--calibration", str(data), "--limit", "2"]
    arguments += ["--device", "cpu", *(str(part) for pair in folders.items() for part in pair)]
    save = mmqc.save_pretrained
    monkeypatch.setattr(mmqc, "save_pretrained", lambda *args, **kwargs: (_ for _ in ()).throw(OSError(28, "disk full")))
    assert invoke("quantize", *arguments).exit_code != 0
    blocks = sorted(p.name for p in folders["--resume-dir"].iterdir())
    assert len(blocks) > 10
    monkeypatch.setattr(mmqc, "save_pretrained", save)
    solved = []
    monkeypatch.setattr("mmqc.quantization.resume.Store.save", lambda self, linears, unit: solved.append(linears))
    result = invoke("quantize", *arguments)
    assert result.exit_code == 0, result.output
    assert not solved, "all blocks come from the folder"
    name = "model.safetensors"
    assert (folders["--out"] / name).read_bytes() == (quantized[0] / name).read_bytes()


@pytest.mark.parametrize(("option", "value"), [("--device", "nowhere"), ("--resume-dir", "/proc/a"), ("--spool", "/proc/a")])
def test_quantize__refuses_a_place_where_it_cannot_work(option, value, tmp_path):
    result = invoke("quantize", "digits-vqa", "--out", str(tmp_path / "out"), option, value)
    assert result.exit_code == 2
    assert option in result.output
    assert not (tmp_path / "out").exists()


def test_quantize__inputs_are_quantize_s_and_asymmetric_ones_take_data(tmp_path, monkeypatch):
    given = []

    def told(model, config, **more):
        given.append((more["inputs"], more["calibration"] is not None))
        raise MemoryError("enough")

    monkeypatch.setattr(mmqc, "quantize_", told)
    for inputs in ((), ("--inputs", "quantized"), ("--inputs", "asymmetric")):
        invoke("quantize", "digits-vqa", "-r", "rtn", "--out", str(tmp_path / "out"), *inputs)
    assert [name for name, _ in given] == ["float", "quantized", "asymmetric"]
    assert given[2][1]
    result = invoke("quantize", "digits-vqa", "-r", "rtn", "--out", str(tmp_path / "out"), "--inputs", "both")
    assert result.exit_code == 2
    assert "--inputs" in result.output


def test_quantize__refuses_data_without_an_image(tmp_path):
    (tmp_path / "data.jsonl").write_text('{"question": "read image 1.", "answer": "1"}\n')
    out = tmp_path / "out"
    result = invoke("quantize", "digits-vqa", "-r", "rtn", "--calibration", str(tmp_path), "--out", str(out))
    assert result.exit_code == 3
    assert "no example has an image" in result.output
    assert not out.exists()


def test_load__a_class_that_transformers_does_not_have(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["NoSuchModel"], "model_type": "qwen2_vl"}')
    bench = ("bench", str(tmp_path), "--sample", "digits-vqa")
    for arguments in (bench, ("quantize", str(tmp_path), "-r", "rtn", "--calibration", "0", "--dry-run")):
        result = invoke(*arguments)
        assert result.exit_code == 3
        assert re.search(r"config\.json: transformers \S+ has no model class 'NoSuchModel'", result.output)
    (tmp_path / "config.json").write_text("{")
    result = invoke(*bench)
    assert result.exit_code == 3
    assert "config.json is no JSON" in result.output


def test_skeleton__of_a_config_that_names_no_class(tmp_path):
    config = json.loads((Path(mmqc.samples.__file__).parent / "digits_vqa" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "architectures"}))
    named, unnamed = jobs.skeleton("digits-vqa"), jobs.skeleton(str(tmp_path))
    assert type(unnamed) is type(named)
    assert {p.device.type for p in unnamed.parameters()} == {"meta"}


def test_load__a_folder_without_weights_is_refused_in_one_line(tmp_path):
    shutil.copy(Path(mmqc.samples.__file__).parent / "digits_vqa" / "config.json", tmp_path)
    result = invoke("bench", str(tmp_path), "--sample", "digits-vqa")
    assert result.exit_code == 3
    assert str(tmp_path) in result.output
    assert "Traceback" not in result.output


def test_eval__questions_of_a_folder_against_the_float_model(data, quantized, tmp_path):
    out, _ = quantized
    text = tmp_path / "text.txt"
    text.write_text("read image 1.\n" * 5)
    arguments = ("--data", str(data), "-n", "2", "--against", "digits-vqa", "--text", str(text), "--max-new-tokens", "8")
    result = invoke("eval", str(out), *arguments, "--min-recovery", "0.99", "--json", str(tmp_path / "e.json"))
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "e.json").read_text())
    figures, kinds = written["eval"], written["against"]["digits-vqa"]["by kind"]
    assert list(kinds) == ["cell", "count"]  # of the first two questions
    assert figures["KL"] == pytest.approx((kinds["cell"]["KL"] + kinds["count"]["KL"]) / 2)
    assert 0 < figures["KL"] < 0.1
    assert figures["agreement"] == 1
    assert figures["flips lost"] == figures["flips won"] == 0
    assert figures["accuracy"] == figures["recovery"] == 1
    assert figures["nll difference low"] <= figures["nll difference"] <= figures["nll difference high"]
    assert 10 < figures["SQNR visual, dB"] < 80
    assert 10 < figures["SQNR text, dB"] < 80
    nll, other = (math.log(figures[name]) for name in ("perplexity", "perplexity of the other"))
    assert nll == pytest.approx(other, rel=0.1)  # of a text that neither was trained on
    result = invoke("eval", str(out), *arguments[:-4], "--max-new-tokens", "8", "--min-recovery", "1.5")
    assert result.exit_code == 1, result.output


@pytest.mark.slow
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


@pytest.mark.slow
def test_warm__a_row_for_each_kind_and_where_it_is_kept(tmp_path, without_inductor):
    result = invoke("warm", "digits-vqa", "--data", "1", "--json", str(tmp_path / "w.json"))
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "w.json").read_text())["warm"]
    assert {r["kind"].split(", ")[0] for r in rows} == {"1 prompt", "2 prompts", "2 prompts of unlike lengths"}
    assert "TORCHINDUCTOR_CACHE_DIR" in result.output
