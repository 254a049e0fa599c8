"""No file of a checkpoint is read outside of its directory, and a damaged index is named."""

import json
import shutil

import pytest
from saved_checkpoint import edit_json, flip, saved
from transformers import AutoModelForImageTextToText

import mmqc
from mmqc.checkpoint.checksum import CheckpointError
from mmqc.checkpoint.files import INDEX, read_json, weight_names

NAMES = ("../outside.safetensors", "/etc/outside.safetensors", "linked/x.safetensors", "a/../../x", "C:\\x", "")


@pytest.fixture(scope="module", params=["mmqc", "compressed-tensors"])
def whole(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole") / "model"
    saved(directory, format=request.param, max_shard_size="100KB")
    return directory, AutoModelForImageTextToText.from_pretrained if request.param == "mmqc" else mmqc.load_quantized


@pytest.fixture
def copy(whole, tmp_path):
    return shutil.copytree(whole[0], tmp_path / "copy")


@pytest.mark.parametrize("name", NAMES)
def test_index__leads_nowhere_else(copy, whole, tmp_path, name):
    for path in (tmp_path / "outside.safetensors", tmp_path / "elsewhere" / "x.safetensors"):
        path.parent.mkdir(exist_ok=True)
        shutil.copy(copy / weight_names(copy)[0], path)
    (copy / "linked").symlink_to(tmp_path / "elsewhere")
    edit_json(copy / INDEX, lambda index: index["weight_map"].update(more=name))
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json names .* outside of the directory"):
        whole[1](copy)


DAMAGE = {
    "no JSON": (lambda path: flip(path, 1), "is damaged: no JSON"),
    "no text": (lambda path: flip(path, 7), r"is damaged: no JSON \(.*codec can't decode"),
    "a list": (lambda path: path.write_text("[]"), "is damaged: a list where an object is expected"),
    "no map": (lambda path: edit_json(path, lambda index: index.pop("weight_map")), "'weight_map' is no table of file names"),
    "no names": (lambda path: edit_json(path, lambda index: index["weight_map"].update(a=5)), "'weight_map' is no table of"),
    "metadata": (lambda path: edit_json(path, lambda index: index.update(metadata=5)), "'metadata' is no table"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_index__damage_is_named(copy, whole, name):
    damage, words = DAMAGE[name]
    damage(copy / INDEX)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors\.index\.json {words}|{words}"):
        whole[1](copy)


def test_weight_names__a_file_that_is_not_there(copy):
    (copy / weight_names(copy)[0]).unlink()
    with pytest.raises(CheckpointError, match=r"names 'model-00001-of-\d+\.safetensors', which is not there"):
        weight_names(copy)


def test_weight_names__without_an_index(tmp_path):
    with pytest.raises(FileNotFoundError, match="no safetensors"):
        weight_names(tmp_path)
    for name in ("b.safetensors", "a.safetensors"):
        (tmp_path / name).touch()
    assert weight_names(tmp_path) == ["a.safetensors", "b.safetensors"]
    (tmp_path / "model.safetensors").touch()
    assert weight_names(tmp_path) == ["model.safetensors"]


def test_read_json__gives_what_was_written(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"a": [1.5, None]}))
    assert read_json(tmp_path / "a.json") == {"a": [1.5, None]}
