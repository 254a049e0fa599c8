"""`mmqc serve`: what it refuses before it loads, what it loads, and one whole life of a server as a process."""

import os
import re
import signal
import subprocess
import sys

import pytest
from commands import invoke
from rich.console import Console
from transformers import Qwen2Config, Qwen2ForCausalLM

import mmqc
from mmqc.cli.serving import command
from mmqc.cli.serving.command import Options, check, load, warm
from mmqc.cli.serving.limits import Limits
from mmqc.cli.serving.server import Served, ServeError, application
from mmqc.samples.chat import fast_tokenizer

WHY = "needs the extra `serve`: fastapi, uvicorn and openai"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (Options(host="0.0.0.0"), "set a token in MMQC_TOKEN"),
        (Options(host="::"), "set a token in MMQC_TOKEN"),
        (Options(token=" "), "not empty"),
        (Options(token="é"), "ASCII"),
        (Options(kv_bits=2), "choose them when you quantize: mmqc quantize MODEL --recipe calibquant --set bits=2"),
        (Options(warm=True, compiled=False), "pass one of them"),
    ],
)
def test_check__refuses_before_anything_is_loaded(options, words, monkeypatch):
    monkeypatch.setattr(command, "peer", lambda: None)
    with pytest.raises(ServeError, match=words):
        check(options)


@pytest.mark.parametrize("options", [Options(), Options(host="::1"), Options(host="0.0.0.0", token="x"), Options(kv_bits=8)])
def test_check__lets_pass(options, monkeypatch):
    monkeypatch.setattr(command, "peer", lambda: None)
    check(options)


def test_serve__names_what_is_wrong_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "peer", lambda: None)
    monkeypatch.setattr(command, "run", lambda *_: None)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_vl", "architectures": ["Qwen2VLForConditionalGeneration"]}')
    for arguments, code, words in (
        (["nowhere"], 2, "neither a sample"),
        (["digits-vqa", "--host", "0.0.0.0"], 3, "MMQC_TOKEN"),
        (["digits-vqa", "--device", "cuda:99"], 2, "cuda:99"),
        (["digits-vqa", "--port", "70000"], 2, "65535"),
        ([str(tmp_path), "--port", "0"], 3, "has no processor that transformers can load"),
    ):
        result = invoke("serve", *arguments)
        assert (result.exit_code, words in re.sub(r"[\s│]+", " ", result.output)) == (code, True), result.output


def test_load__a_sample_and_a_directory_with_its_tokenizer(tmp_path):
    sample = load("digits-vqa", Options(device="cpu"))
    assert (sample.name, sample.compiled, sample.model.training, sample.reads().images) == ("digits-vqa", True, False, True)
    config = Qwen2Config(
        vocab_size=104, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2
    )
    Qwen2ForCausalLM(config).save_pretrained(tmp_path / "mine")
    tokenizer = fast_tokenizer()
    tokenizer.save_pretrained(tmp_path / "mine")
    with pytest.raises(ServeError, match="mine has no chat template"):
        load(str(tmp_path / "mine"), Options(device="cpu"))
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "mine")
    mine = load(str(tmp_path / "mine"), Options(device="cpu", compiled=False))
    assert (mine.name, mine.compiled, mine.reads().images) == ("mine", False, False)


def test_load__bits_of_a_cache_that_has_some(tmp_path):
    model = mmqc.samples.load("digits-vqa").model
    mmqc.quantize_(model, mmqc.recipes.calibquant(8), progress=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "_directory", lambda _: (model, None))
        with pytest.raises(ServeError, match="KV cache of 8 bits: leave --kv-bits out"):
            load(str(tmp_path), Options(device="cpu", kv_bits=4))


def test_warm__makes_a_call_of_each_kind(monkeypatch, capsys):
    for package in ("fastapi", "uvicorn", "openai"):
        pytest.importorskip(package, reason=WHY)
    served = load("digits-vqa", Options(device="cpu"))
    app = application(served, Limits(), None)
    monkeypatch.setattr("mmqc.compiler.warm.compiled_loop", None)  # transformers' own loop: kinds are counted here, not programs
    warm(app, Served("m", served.model, served.processor), Console(width=200))
    kinds = [line.partition("  ")[0] for line in capsys.readouterr().out.splitlines()]
    assert kinds == ["1 prompt, text alone", "1 prompt, 1 image", "1 prompt, several images or tiles"]


@pytest.mark.slow
def test_serve__lives_and_ends():
    for package in ("fastapi", "uvicorn"):
        pytest.importorskip(package, reason=WHY)
    openai = pytest.importorskip("openai", reason=WHY)
    arguments = [sys.executable, "-m", "mmqc.cli", "serve", "digits-vqa", "--port", "0", "--no-compile", "--name", "digits"]
    environment = {**os.environ, "MMQC_TOKEN": "right", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            line = process.stdout.readline()
            address = re.fullmatch(
                r"digits at (http://127\.0\.0\.1:\d+/v1), decoded by transformers' own loop; Ctrl-C stops\n", line
            )
            assert address, line + process.stderr.read()
            client = openai.OpenAI(base_url=address[1], api_key="right", max_retries=0)
            asking = {
                "model": "digits",
                "messages": [{"role": "user", "content": "read image 1."}],
                "max_tokens": 3,
                "temperature": 0,
            }
            assert client.chat.completions.create(**asking).usage.completion_tokens <= 3
            with pytest.raises(openai.AuthenticationError):
                openai.OpenAI(base_url=address[1], api_key="wrong", max_retries=0).chat.completions.create(**asking)
            process.send_signal(signal.SIGINT)
            rest, log = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, rest) == (0, "")
    lines = log.splitlines()
    day = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    asked = rf"{day} 127\.0\.0\.1 POST /v1/chat/completions 200, [\d.]+ s: 14 tokens, waited [\d.]+ s, \d new, [\d.]+ tokens/s"
    assert sum(bool(re.fullmatch(asked, line)) for line in lines) == 1, log
    assert sum("401" in line and "a token is needed" in line for line in lines) == 1, log
    assert "Traceback" not in log
