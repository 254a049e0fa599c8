"""What is no tensor of a checkpoint, and which tensors there are, is checked when it is loaded; what is damaged is named."""

import json
import shutil

import pytest
import torch
from saved_checkpoint import edit_json, edit_tensors, flip, saved
from transformers import AutoConfig, AutoModel, AutoModelForImageTextToText

from mmqc.checkpoint.checksum import CheckpointError
from mmqc.checkpoint.sign import sign
from mmqc.checkpoint.signature import check_config, config_digest, signature

META = "model.language_model.layers.0.self_attn.q_proj.qweight"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole") / "model"
    model, inputs = saved(directory)
    return directory, model, inputs


@pytest.fixture
def copy(whole, tmp_path):
    return shutil.copytree(whole[0], tmp_path / "copy")


def load(directory, **options):
    return AutoModelForImageTextToText.from_pretrained(directory, **options)


def rename(table, old, new):
    table[new] = table.pop(old)


def quantization(change):
    return lambda config: change(config["quantization_config"])


CONFIG_EDITS = {
    "epsilon": (lambda c: c["text_config"].update(rms_norm_eps=1e-3), "something outside quantization_config differs"),
    "rope": (lambda c: c["text_config"]["rope_parameters"].update(rope_theta=1e4), "outside quantization_config differs"),
    "activation": (lambda c: c["text_config"].update(hidden_act="gelu"), "outside quantization_config differs"),
    "misspelled": (lambda c: rename(c["text_config"], "num_hidden_layers", "num_hidDen_layers"), "outside .* differs"),
    "recipe": (quantization(lambda q: q.update(visual_token_ids=[1])), "edited: quantization_config differs"),
    "a hash": (quantization(lambda q: q["hashes"].popitem()), "edited: quantization_config differs"),
    "no hashes": (quantization(lambda q: q.pop("hashes")), "edited: quantization_config differs"),
    "no signature": (quantization(lambda q: q.pop("signature")), "has no 'signature'"),
    "another version": (quantization(lambda q: q.update(version=1)), "quantization_config differs"),
    "no version": (quantization(lambda q: q.pop("version")), "quantization_config differs"),
    "not named": (lambda c: rename(c, "quantization_config", "quantization_confih"), "has 'quantization_confih' where"),
    "no mark": (quantization(lambda q: rename(q, "requires", "reqtires")), "quantization_config differs"),
}


@pytest.mark.parametrize("name", CONFIG_EDITS)
def test_config__a_change_is_named(copy, name):
    change, words = CONFIG_EDITS[name]
    edit_json(copy / "config.json", change)
    with pytest.raises(CheckpointError, match=rf"config\.json is damaged.*{words}.*copy or download it again"):
        load(copy)
    with pytest.raises(CheckpointError, match=words):
        AutoModel.from_pretrained(copy)


def test_config__what_transformers_rewrites_may_change(copy, whole):
    edit_json(copy / "config.json", lambda c: c.update(transformers_version="9.9", _name_or_path="elsewhere"))
    assert_same(load(copy), whole)


GENERATION_EDITS = {
    "edited": (lambda p: edit_json(p, lambda g: g.update(do_sample=True)), "differs from what was saved"),
    "gone": (lambda p: p.unlink(), "is missing"),
    "no JSON": (lambda p: flip(p, 1), "no JSON"),
    "no object": (lambda p: p.write_text("[]"), "a list where an object is expected"),
}


@pytest.mark.parametrize("name", GENERATION_EDITS)
def test_generation_config__a_change_is_named(copy, name):
    change, words = GENERATION_EDITS[name]
    change(copy / "generation_config.json")
    with pytest.raises(CheckpointError, match=rf"generation_config\.json .*{words}.*copy or download it again"):
        load(copy)


@pytest.mark.parametrize("options", [{}, {"dtype": torch.bfloat16}], ids=["as saved", "cast"])
def test_tensors__missing_and_extra_ones_are_named(copy, options):
    good = (copy / "model.safetensors").read_bytes()
    edit_tensors(copy / "model.safetensors", lambda t: t.pop("model.norm.weight"))
    with pytest.raises(CheckpointError, match=r"the model has model\.language_model\.norm\.weight, and the checkpoint does not"):
        load(copy, **options)
    (copy / "model.safetensors").write_bytes(good)
    edit_tensors(copy / "model.safetensors", lambda t: t.update({"model.more.weight": torch.ones(2)}))
    with pytest.raises(CheckpointError, match=r"its files have model\.\S*more\.weight, which was not saved"):
        load(copy, **options)


def test_tensors__layers_that_the_config_invents_do_not_run_with_random_weights(copy):
    def deeper(config):
        config["vision_config"]["depth"] += 1

    edit_json(copy / "config.json", deeper)
    sign(copy)
    with pytest.raises(CheckpointError, match=r"the model has model\.visual\.blocks\.2\.\S+ \(and 11 more\), .* random values"):
        load(copy)


def test_tensors__one_without_a_hash_is_named_even_if_that_is_signed(copy):
    edit_json(copy / "config.json", quantization(lambda q: q["hashes"].pop(META)))
    sign(copy)
    with pytest.raises(CheckpointError, match=rf"{META} has no hash"):
        load(copy)
    edit_json(copy / "config.json", quantization(lambda q: q.pop("hashes")))
    sign(copy)
    with pytest.raises(CheckpointError, match="has no hashes in quantization_config"):
        load(copy)


def test_older_checkpoint__without_hashes_is_not_loaded_unchecked(copy):
    def age(settings):
        settings["version"] = 1
        del settings["signature"], settings["hashes"]

    edit_json(copy / "config.json", quantization(age))
    with pytest.raises(CheckpointError, match="has no hashes in quantization_config"):
        load(copy)


def test_tensors__another_dtype_of_codes_is_damage_not_a_cast():
    from mmqc.checkpoint.checksum import hashes, verify

    codes = {"q": torch.ones(3, dtype=torch.int8)}
    with pytest.raises(CheckpointError, match="q differs"):
        verify(hashes(codes), {"q": codes["q"].to(torch.int16)}, lambda name: name)


def assert_same(model, whole):
    _, wanted, inputs = whole
    with torch.no_grad():
        assert torch.equal(model(**inputs, use_cache=False).logits, wanted(**inputs, use_cache=False).logits)


def test_legitimate__loads_as_before(copy, whole):
    (copy / "README.md").write_text("mine")
    (copy / "tokenizer_config.json").write_text("{}")
    assert_same(load(copy), whole)
    assert_same(load(copy, device_map="cpu", attn_implementation="sdpa"), whole)
    assert load(copy, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert load(copy, video_token_id=7).config.video_token_id == 7
    config = AutoConfig.from_pretrained(copy)
    config.text_config.rms_norm_eps = 0.25
    assert load(copy, config=config).model.language_model.norm.variance_epsilon == 0.25
    assert not hasattr(AutoModel.from_pretrained(copy), "lm_head")


def test_legitimate__the_cache_of_the_hub_whose_files_are_links(copy, whole, tmp_path):
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(copy.iterdir())):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    assert_same(load(snapshot), whole)


def test_legitimate__saved_with_tensors_on_disk(copy, whole, tmp_path):
    places = {"model.visual": "cpu", "model.language_model": "disk", "lm_head": "disk"}
    model = load(copy, device_map=places, offload_folder=tmp_path / "offload", offload_buffers=True)
    model.save_pretrained(tmp_path / "again")
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config["quantization_config"]["hashes"][META] == "offloaded"
    assert_same(load(tmp_path / "again"), whole)


def test_older_checkpoint__has_no_signature_and_gets_one_when_saved(copy, whole, tmp_path):
    def age(settings):
        settings["version"] = 1
        del settings["signature"]

    edit_json(copy / "config.json", quantization(age))
    model = load(copy)
    assert_same(model, whole)
    model.save_pretrained(tmp_path / "new")
    settings = json.loads((tmp_path / "new" / "config.json").read_text())["quantization_config"]
    assert (settings["version"], set(settings["signature"])) == (2, {"quantization_config", "config", "generation_config"})
    assert_same(load(tmp_path / "new"), whole)


def test_digest__is_of_values_not_of_text(tmp_path):
    raw = {"a": 1.0, "b": [1, {"c": None}], "transformers_version": "5"}
    assert config_digest(json.loads(json.dumps(dict(reversed(raw.items())), indent=3))) == config_digest(raw)
    assert config_digest(raw | {"a": 1.5}) != config_digest(raw)
    settings = {"requires": "mmqc", "version": 2}
    signed = raw | {"quantization_config": settings | {"signature": signature(raw | {"quantization_config": settings}, tmp_path)}}
    check_config(signed, tmp_path / "config.json")
    with pytest.raises(CheckpointError, match="outside quantization_config differs"):
        check_config(signed | {"b": []}, tmp_path / "config.json")
