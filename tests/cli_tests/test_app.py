"""The commands as a shell calls them: options, exit codes, what is printed and written."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from commands import invoke

import mmqc
from mmqc import errors
from mmqc.cli import app as cli
from mmqc.cli import jobs

ROOT = Path(__file__).resolve().parents[2]


def test_help__lists_every_command():
    result = invoke("--help")
    assert result.exit_code == 0
    commands = ("demo", "quantize", "eval", "compare", "bench", "warm", "serve", "report", "explain", "export", "doctor", "passes")
    assert all(name in result.output for name in commands)


def test_exit_codes__are_told_in_help_and_in_the_how_to():
    codes = {getattr(errors, name) for name in ("DONE", "WANTING", "USAGE", "REFUSED", "MEMORY", "UNEXPECTED")}
    assert {int(code) for code in re.findall(r"(?:: |; )(\d+) ", cli.EXIT_CODES)} == codes | {130}
    page = (ROOT / "docs/howto/command_line.md").read_text(encoding="utf-8")
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)} == codes | {130}
    shown = " ".join(invoke("--help").output.split())
    assert cli.EXIT_CODES in shown
    assert "--debug" in shown


def test_version__is_that_of_the_distribution():
    result = invoke("--version")
    assert result.exit_code == 0
    assert re.fullmatch(r"mmqc (\d+\.\d+\S*|not installed as a distribution)\n", result.output)


def test_load__names_the_samples_for_an_unknown_model(tmp_path):
    with pytest.raises(typer.BadParameter, match="digits-vqa-stress"):
        cli.load(str(tmp_path), "digits-vqa")


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
        (("compare", "digits-vqa", "--recipes", "rtn:bits=4"), 2, "rtn takes weight_bits"),
        (("compare", "digits-vqa", "--recipes", ","), 2, "name at least one"),
        (("eval", "digits-vqa", "--data", "no/file.jsonl"), 3, "does not exist"),
        (("report", "no/run"), 3, "does not exist"),
        (("quantize", "nowhere", "--dry-run"), 2, "nowhere does not exist"),
        (("quantize", "digits-vqa", "--dry-run", "--sample", "no"), 2, "the samples are"),
        (("quantize", "digits-vqa", "--dry-run", "--calibration", "no/folder"), 3, "no/folder"),
        (("quantize", "digits-vqa", "--dry-run", "--calibration", "-3"), 2, "0 or more"),
        (("quantize", "digits-vqa", "--dry-run", "--recipe", "rtn", "--float8"), 2, "quantized activations"),
        (("quantize", "digits-vqa", "--dry-run", "--recipe", "gptq", "--float4", "fp4"), 2, "mxfp4"),
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


def test_passes__prints_the_recipe_in_order():
    result = invoke("passes", "--recipe", "mquant")
    assert result.exit_code == 0, result.output
    order = ("raise_ops", "fold_norm_scale", "fuse_rotation", "insert_hadamard", "quantize_weights")
    places = [result.output.index(name) for name in order]
    assert places == sorted(places)


def test_passes__an_exact_recipe_has_no_quantizing_passes():
    result = invoke("passes", "--recipe", "rotate")
    assert result.exit_code == 0, result.output
    assert "quantize_weights" not in result.output


def test_quantize__float8_is_in_the_schemes():
    result = invoke("quantize", "digits-vqa", "--w", "8", "--float8", "--dry-run")
    assert "language W8A8-fp8" in result.stdout


def test_quantize__dry_run_writes_nothing(tmp_path):
    result = invoke("quantize", "digits-vqa", "--w", "4", "--dry-run", "--out", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    assert "W4A8" in result.output
    assert "32 prompts of the sample" in result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_quantize__for_an_engine_is_planned_written_and_checked(tmp_path):
    """The recipe's scale per modality becomes one per token; the checkpoint is the engine's, and says how it is served."""
    given = ("quantize", "digits-vqa", "--w", "8", "--set", "solver=rtn", "--engine", "vllm==0.33", "--calibration", "2")
    result = invoke(*given, "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "language W8A8-token" in result.stdout
    assert "serve it there with: vllm serve ." in result.stdout
    saved = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert saved["quant_method"] == "compressed-tensors"
    result = invoke("check", str(tmp_path), "--engine", "vllm==0.33")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--engine", "vllm==0.1"), "known are"),
        (("--engine", "vllm==0.33", "--gpu", "abacus"), "abacus"),
        (("--engine", "vllm==0.33", "--format", "mmqc"), "may be left out"),
        (("--engine", "vllm==0.33", "-r", "resq"), "QuantConfig.kv_rounding"),
        (("--format", "onnx"), "compressed-tensors"),
    ],
)
def test_quantize__what_no_engine_takes_is_refused_before_any_work(options, words, tmp_path):
    result = invoke("quantize", "digits-vqa", "--out", str(tmp_path / "out"), *options)
    assert result.exit_code != 0
    assert words in f"{result.output} {result.exception}"
    assert not (tmp_path / "out").exists()


def test_quantize__short_memory_is_code_4_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "available", lambda: 1000)
    result = invoke("quantize", "digits-vqa", "-r", "rtn", "--calibration", "0", "--out", str(tmp_path / "out"))
    assert result.exit_code == 4, result.output
    assert "--force" in result.output
    assert not (tmp_path / "out").exists()


def test_quantize__saves_a_model_that_eval_loads(tmp_path):
    result = invoke("quantize", "digits-vqa", "-o", str(tmp_path), "-r", "rtn", "--w", "8", "--calibration", "0")
    assert result.exit_code == 0, result.output
    saved = json.loads((tmp_path / "quantization.json").read_text(encoding="utf-8"))
    assert len(saved["layers"]) > 40
    assert (tmp_path / "quantization.html").exists()
    assert (tmp_path / "model.safetensors").exists()
    result = invoke("eval", str(tmp_path), "-n", "5")
    assert result.exit_code == 0, result.output
    assert float(re.search(r"accuracy\W+(\d+\.\d) %", result.output).group(1)) > 50


def test_export__gives_the_chosen_prompt_and_programs_to_the_exporter(monkeypatch, tmp_path):
    calls = []

    def export(model, example, out, programs, weights, say):
        calls.append((model, example, programs, weights))
        say("prefill: tracing")
        out.write_bytes(bytes(2**20))

    source = SimpleNamespace(prompts=lambda n: [f"prompt {i}" for i in range(n)])
    monkeypatch.setattr(mmqc, "export", export)
    monkeypatch.setattr(cli, "load", lambda model, sample: (model, source))
    given = ["export", "digits-vqa", str(tmp_path / "m.pt2"), "-p", "prefill", "-p", "decode", "--data", "3", "--weights"]
    done = invoke(*given, str(tmp_path / "w.safetensors"))
    assert done.exit_code == 0, done.output
    assert calls == [("digits-vqa", "prompt 2", ["prefill", "decode"], tmp_path / "w.safetensors")]
    assert invoke(*given, str(tmp_path / "w.bin")).exit_code == 2
    assert "prefill: tracing" in done.output
    assert "m.pt2: 1.0 MiB" in done.output


def test_main__is_the_package_and_says_what_is_wrong_within_a_second(tmp_path):
    """Of the process, however busy the machine is; torch alone would take longer."""
    code = "import runpy, sys, time; sys.argv = ['mmqc', *{}]\ntry:\n    runpy.run_module('mmqc', run_name='__main__')\n"
    code += "finally:\n    print(time.process_time(), 'torch' in sys.modules)"
    (tmp_path / "config.json").write_text("{}")
    for arguments, words in (
        (("quantize", "nowhere", "--out", "x"), "neither a sample"),
        (("explain", str(tmp_path)), "pass --data"),
        (("ask", "digits-vqa", "what?", "--image", "none.png"), "none.png does not exist"),
        (("--help",), "Ask a model one question"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", code.format(list(arguments))], capture_output=True, text=True, check=False, cwd=ROOT
        )
        assert words in " ".join((done.stdout + done.stderr).split()), done.stderr
        seconds, torch = done.stdout.splitlines()[-1].split()
        assert torch == "False"
        assert float(seconds) < 1, arguments


@pytest.mark.slow
def test_wake__says_first_that_torch_is_loaded():
    code = "from mmqc.cli.app import app; app(['passes', '--recipe', 'rotate'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[0] == "loading torch"


def test_app__of_a_process_without_standard_streams() -> None:
    """As a service manager may start one: Python has None for them."""
    code = "import os, runpy, sys; os.close(0); os.close(1); sys.stdin = sys.stdout = None; sys.argv[1:] = ['passes']; "
    done = subprocess.run(
        [sys.executable, "-c", code + "runpy.run_module('mmqc', run_name='__main__')"],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-300:]
