"""What is looked at before any work, and the refusals."""

from pathlib import Path

import pytest
import typer
from PIL import Image

from mmqc import recipes
from mmqc.cli import checks
from mmqc.cli.chat_data import DataError, Example
from mmqc.config import ConfigError


def example(*parts):
    return Example(({"role": "user", "content": list(parts)},), "yes")


TEXT = example({"type": "text", "text": "is it?"})
IMAGE = example({"type": "image", "image": Image.new("RGB", (8, 8))}, {"type": "text", "text": "is it?"})


class Reads:
    """A model that reads images."""

    config = type("Config", (), {"image_token_id": 7})()


def test_names__a_sample_or_a_directory_with_a_config(tmp_path):
    with pytest.raises(typer.BadParameter, match=r"has no config\.json"):
        checks.names(str(tmp_path), "digits-vqa")
    with pytest.raises(typer.BadParameter, match="does not exist"):
        checks.names(str(tmp_path / "no"), "digits-vqa")
    (tmp_path / "config.json").touch()
    checks.names(str(tmp_path), "digits-vqa")
    with pytest.raises(typer.BadParameter, match="the samples are digits-vqa, "):
        checks.names(str(tmp_path), "no")


def test_folder__is_needed_and_no_file(tmp_path):
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(typer.BadParameter, match="a file; name a directory"):
            checks.folder(out, needed=True)
    with pytest.raises(typer.BadParameter, match="or --dry-run"):
        checks.folder(None, needed=True)
    checks.folder(None, needed=False)
    checks.folder(tmp_path / "new" / "folder", needed=True)
    assert not (tmp_path / "new").exists()


def test_calibration__none_only_for_what_needs_none(tmp_path):
    checks.calibration("0", recipes.rtn(8))
    checks.calibration("32", recipes.mquant(4))
    with pytest.raises(ConfigError, match="this config needs data"):
        checks.calibration("0", recipes.mquant(4))
    with pytest.raises(DataError, match="does not exist"):
        checks.calibration(str(tmp_path), recipes.rtn(8))


def test_inputs__known_ones_and_asymmetric_ones_take_data():
    checks.inputs("asymmetric")
    with pytest.raises(typer.BadParameter, match="float, quantized, asymmetric"):
        checks.inputs("both")
    checks.calibration("0", recipes.rtn(8), "quantized")
    with pytest.raises(ConfigError, match="asymmetric compares"):
        checks.calibration("0", recipes.rtn(8), "asymmetric")


def test_images__are_wanted_by_a_model_that_reads_them():
    checks.images(Reads(), [TEXT, IMAGE], "here")
    checks.images(object(), [TEXT], "here")
    with pytest.raises(DataError, match="here: no example has an image, but Reads reads images"):
        checks.images(Reads(), [TEXT], "here")


@pytest.mark.parametrize(("content", "words"), [(b"{", "is no JSON"), (b"\xff", "is no JSON"), (b"[1]", "holds a JSON list")])
def test_read_json__names_the_file_and_what_it_should_be(tmp_path, content, words):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"a\.json {words}.*; a config is expected"):
        checks.read_json(path, "a config")
    path.write_text('{"a": 1}')
    assert checks.read_json(path, "a config") == {"a": 1}


def test_folder__that_is_not_empty_needs_overwrite(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdin", open("/dev/null"))  # noqa: PTH123, SIM115
    checks.folder(tmp_path, needed=True, overwrite=False)
    (tmp_path / "config.json").touch()
    with pytest.raises(typer.BadParameter, match="pass --overwrite"):
        checks.folder(tmp_path, needed=True, overwrite=False)
    checks.folder(tmp_path, needed=True, overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]


def test_folder__that_cannot_be_written_is_refused_at_once():
    with pytest.raises(typer.BadParameter, match="cannot be written"):
        checks.folder(Path("/proc/mmqc"), needed=True)
