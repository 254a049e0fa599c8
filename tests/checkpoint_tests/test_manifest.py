"""What mmqc wrote in the compressed-tensors format is compared with its manifest; no file is read outside of the directory."""

import json
import shutil

import pytest
import torch
from saved_checkpoint import edit_json, edit_tensors, flip, saved
from transformers import AutoModelForImageTextToText

import mmqc
from mmqc.checkpoint import manifest
from mmqc.checkpoint.checksum import CheckpointError
from mmqc.checkpoint.files import INDEX, SINGLE, weight_names
from mmqc.checkpoint.hf import MmqcQuantizer


@pytest.fixture(scope="module", params=["one file", "shards"])
def whole(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole") / "model"
    options = {"max_shard_size": "100KB"} if request.param == "shards" else {}
    model, inputs = saved(directory, format="compressed-tensors", **options)
    return directory, model, inputs


@pytest.fixture
def copy(whole, tmp_path):
    return shutil.copytree(whole[0], tmp_path / "copy")


def a_file(directory):
    return directory / weight_names(directory)[-1]


def assert_same(model, whole):
    _, wanted, inputs = whole
    with torch.no_grad():
        assert torch.equal(model(**inputs, use_cache=False).logits, wanted(**inputs, use_cache=False).logits)


def test_manifest__is_in_no_place_that_others_read(copy, whole):
    config = json.loads((copy / "config.json").read_text())
    assert set(config["quantization_config"]) == {"quant_method", "quantization_status", "format", "ignore", "config_groups"}
    assert_same(mmqc.load_quantized(copy), whole)
    assert_same(AutoModelForImageTextToText.from_pretrained(mmqc_format(copy)), whole)


def mmqc_format(directory):
    """The same model, loaded and saved as mmqc's own."""
    mmqc.load_quantized(directory).save_pretrained(directory.with_name("again"))
    return directory.with_name("again")


DAMAGE = {
    "flip": (lambda d: flip(a_file(d), 8 * a_file(d).stat().st_size - 6), "differs from what was saved"),
    "missing": (lambda d: edit_tensors(a_file(d), lambda t: t.popitem()), "is missing"),
    "extra": (lambda d: edit_tensors(a_file(d), lambda t: t.update(more=torch.ones(1))), "more was not saved"),
    "header": (lambda d: flip(a_file(d), 7), "safetensors is damaged: "),
    "config": (lambda d: edit_json(d / "config.json", lambda c: c["text_config"].update(rms_norm_eps=1.0)), "config.json is"),
    "no JSON": (lambda d: flip(d / "config.json", 0), r"config\.json is damaged: no JSON"),
    "manifest": (lambda d: edit_json(d / manifest.NAME, lambda m: m["tensors"].popitem()), "its hash is not that"),
    "manifest, no JSON": (lambda d: flip(d / manifest.NAME, 0), r"manifest\.json is damaged: no JSON"),
    "manifest, a list": (lambda d: (d / manifest.NAME).write_text("[]"), "a list where an object"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage__is_named(copy, name):
    damage, words = DAMAGE[name]
    damage(copy)
    with pytest.raises(CheckpointError, match=words):
        mmqc.load_quantized(copy)


def test_without_a_manifest__loads_as_another_projects_checkpoint(copy, whole):
    (copy / manifest.NAME).unlink()
    assert_same(mmqc.load_quantized(copy), whole)


def test_save_again__renews_the_manifest(copy, whole):
    _, model, _ = whole
    mmqc.save_pretrained(model, copy, format="compressed-tensors", max_shard_size="50KB")
    assert_same(mmqc.load_quantized(copy), whole)


def test_save_in_place__as_of_several_ranks__leaves_one_too(tmp_path, whole, monkeypatch):
    monkeypatch.setattr(MmqcQuantizer, "stages_saves", False)
    mmqc.save_pretrained(whole[1], tmp_path, format="compressed-tensors")
    assert manifest.read(tmp_path)["tensors"].keys() == manifest.read(whole[0])["tensors"].keys()
    assert_same(mmqc.load_quantized(tmp_path), whole)


def test_index__folders_of_its_own_and_the_hubs_links_are_read(copy, whole, tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    (snapshot / "part").mkdir(parents=True)
    files = weight_names(copy)
    for path in copy.iterdir():
        shutil.copy(path, blobs)
        place = f"part/{path.name}" if path.name in files else path.name
        (snapshot / place).symlink_to(blobs / path.name)
    (snapshot / INDEX).unlink(missing_ok=True)
    (snapshot / INDEX).write_text(json.dumps({"weight_map": {name: f"part/{name}" for name in files}}))
    assert_same(mmqc.load_quantized(snapshot), whole)


def test_single_file__stands_alone_beside_other_safetensors(copy, whole):
    if weight_names(copy) == [SINGLE]:
        shutil.copy(copy / SINGLE, copy / "adapter_model.safetensors")
        assert_same(mmqc.load_quantized(copy), whole)
    else:
        assert all("-of-" in name for name in weight_names(copy))
