"""Commands on a model that nobody here has seen: its own data, never a sample's that was not asked for."""

import json
import re
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import typer
from commands import invoke
from own_model import write_data, write_model

from mmqc.cli import source
from mmqc.cli.chat_data import DataError
from mmqc.samples import MARK, Sample


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("own"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("questions") / "data")


@pytest.fixture(autouse=True)
def no_sample(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Loading a sample is an error in this file."""
    load = Mock(side_effect=AssertionError("a sample was loaded"))
    monkeypatch.setattr(Sample, "load", load)
    return load


COMMANDS = {
    "quantize": ("--recipe", "rtn", "--w", "8", "--a", "8", "--out", "out"),
    "eval": (),
    "bench": ("--no-compile", "--new-tokens", "2", "--repeats", "1"),
    "warm": (),
    "explain": ("--spaces",),
    "export": ("model.pt2",),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands__say_what_they_need_before_anything_is_loaded(command, own, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    option = "--calibration" if command == "quantize" else "--data"
    result = invoke(command, str(own), *COMMANDS[command])
    assert result.exit_code == 3, result.output
    assert re.search(rf"error: .*is a model of your own; pass {option} path/to/data \(a folder with data.jsonl", result.output)
    assert len(result.output.strip().splitlines()) == 1
    result = invoke(command, str(own), *COMMANDS[command], option, "4")
    assert f"{option} 4 counts prompts of a sample" in result.output
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def quantized(own, data, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("quantized") / "out"
    result = invoke("quantize", str(own), "--recipe", "mquant", "--calibration", str(data), "--out", str(out))
    assert result.exit_code == 0, result.output
    return out


@pytest.mark.slow
def test_commands__run_on_their_own_data(own, data, quantized, tmp_path) -> None:
    given = (str(quantized), "--data", str(data))
    runs = {
        "eval": ("eval", *given, "--against", str(own), "--max-new-tokens", "2", "--json", str(tmp_path / "eval.json")),
        "bench": ("bench", *given, *COMMANDS["bench"]),
        "spaces": ("explain", str(own), "--data", str(data), "--spaces"),
    }
    for name, arguments in runs.items():
        result = invoke(*arguments)
        assert result.exit_code == 0, (name, result.output)
    assert json.loads((tmp_path / "eval.json").read_text())["eval"]["SQNR visual, dB"] > 10
    assert "space of" in result.output


def test_explain__takes_data(own, data, monkeypatch) -> None:
    import mmqc

    called = Mock(return_value=Mock(__str__=lambda self: "explained"))
    monkeypatch.setattr(mmqc, "explain", called)
    result = invoke("explain", str(own), "--data", str(data))
    assert result.exit_code == 0, result.output
    batch = called.call_args[0][1]
    assert batch["pixel_values"].shape == (1, 3, 32, 32)
    assert batch["input_ids"][0, -1] == 40  # the answer is in it


def test_export__takes_data_and_calibration(own, data, tmp_path, monkeypatch) -> None:
    import mmqc

    given = {}
    monkeypatch.setattr(mmqc, "export", lambda model, batch, out, **more: (given.update(model=model), out.write_bytes(b"x")))
    options = ("-r", "rtn", "--set", "weight_bits=8", "--set", "activation_bits=8")
    result = invoke("export", str(own), str(tmp_path / "m.pt2"), *options, "--data", str(data), "--calibration", str(data))
    assert result.exit_code == 0, result.output
    assert any(type(m).__name__ == "QuantLinear" for m in given["model"].modules())
    result = invoke("export", str(own), str(tmp_path / "m.pt2"), *options, "--data", str(data))
    assert "pass --calibration path/to/data" in result.output


def test_quantize__needs_no_data_where_the_recipe_needs_none(own, tmp_path) -> None:
    result = invoke("quantize", str(own), "--recipe", "rtn", "--w", "8", "--out", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    assert re.search(r"calibration +none", result.output)
    assert (tmp_path / "out" / "preprocessor_config.json").exists() or (tmp_path / "out" / "processor_config.json").exists()


def test_eval__of_a_model_without_a_processor_says_so(own, data, tmp_path) -> None:
    bare = write_model(tmp_path / "bare", with_processor=False)
    for arguments in (("eval", str(bare), "--data", str(data)), ("ask", str(bare), "what?")):
        result = invoke(*arguments)
        assert result.exit_code == 3, result.output
        assert re.search(r"bare has no processor and no tokenizer, so nothing can be asked of it", result.output)


def test_sample_of__is_asked_for_or_told_by_the_directory(own, tmp_path) -> None:
    assert source.sample_of("digits-vqa", None) == "digits-vqa"
    assert source.sample_of("digits-vqa", "digits-vqa-stress") == "digits-vqa-stress"
    assert source.sample_of(str(own), None) is None
    assert source.sample_of(str(own), "digits-vqa") == "digits-vqa"
    shutil.copy(own / "config.json", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, MARK: "digits-vqa-stress"}))
    assert source.sample_of(str(tmp_path), None) == "digits-vqa-stress"
    (tmp_path / "config.json").write_text(json.dumps({**config, MARK: "another"}))
    assert source.sample_of(str(tmp_path), None) is None


def test_data_of__a_number_of_a_sample_or_a_path(own, data) -> None:
    assert source.data_of("digits-vqa", None, None, "--data", 8) == "8"
    assert source.data_of("digits-vqa", None, "3", "--data", 8) == "3"
    assert source.data_of(str(own), "digits-vqa", None, "--data", 8) == "8"
    assert source.data_of(str(own), None, str(data), "--data", 8) == str(data)
    assert source.data_of(str(own), None, "0", "--calibration", 32) == "0"
    with pytest.raises(DataError, match="--data 0 counts prompts of a sample"):
        source.data_of(str(own), None, "0", "--data", 8)
    with pytest.raises(DataError, match="does not exist"):
        source.data_of(str(own), None, str(own / "none"), "--data", 8)
    with pytest.raises(typer.BadParameter, match="0 or more"):
        source.data_of("digits-vqa", None, "-1", "--data", 8)
