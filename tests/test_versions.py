"""Names of other packages, looked up in one place."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from models import tiny_qwen2_vl
from transformers.modeling_outputs import BaseModelOutput

from mmqc import versions
from mmqc.errors import REFUSED, MmqcError
from mmqc.versions import MovedError, cache_name, cache_of, find, installed, numbers, without_encoders


@pytest.mark.parametrize(
    ("text", "parts"), [("2.13.0+cpu", (2, 13, 0)), ("5.25.0.dev0", (5, 25, 0, 0)), ("3.7.1", (3, 7, 1)), ("unknown", ())]
)
def test_numbers__of_a_version(text, parts):
    assert numbers(text) == parts


def test_find__the_first_that_is_there():
    assert find("json:nothing", "nowhere.at_all:dumps", "json:loads", needed="a test").__name__ == "loads"


def test_find__says_what_is_missing_what_for_and_what_to_do():
    with pytest.raises(MovedError) as info:
        find("transformers.nowhere:Name", "transformers:NoSuchName", needed="a test")
    text = str(info.value)
    assert text.startswith(f"transformers {installed('transformers')} has no transformers.nowhere:Name or transformers:NoSuchName")
    assert "which a test needs" in text
    assert "docs/results/versions.md" in text
    assert isinstance(info.value, MmqcError | ImportError)
    assert info.value.exit_code == REFUSED


@pytest.mark.parametrize(
    ("version", "name"), [("5.17.0", "past_key_values"), ("5.23.9", "past_key_values"), ("5.24.0", "cache"), ("6.0", "cache")]
)
def test_cache_name__by_version(version, name, monkeypatch):
    monkeypatch.setattr(versions, "installed", lambda _: version)
    cache_name.cache_clear()
    try:
        assert cache_name() == name
        assert cache_of({name: 1}) == cache_of(SimpleNamespace(**{name: 1})) == 1
        assert cache_of({}) is cache_of(()) is None
    finally:
        cache_name.cache_clear()


def test_cache_name__is_what_the_installed_models_take_and_return():
    model, inputs = tiny_qwen2_vl()
    assert cache_name() in inspect.signature(type(model).forward).parameters
    out = model(**inputs, use_cache=True)
    step = {"input_ids": inputs["input_ids"][:, -1:], cache_name(): cache_of(out), "use_cache": True}
    assert cache_of(model(**step)).get_seq_length() == inputs["input_ids"].shape[1] + 1


def test_without_encoders__keeps_the_rest_and_its_class():
    plain = {"logits": 1, "image_outputs": 2}
    assert without_encoders(plain) == {"logits": 1}
    assert without_encoders((1, 2)) == (1, 2)
    output = BaseModelOutput(last_hidden_state=torch.ones(1))
    assert without_encoders(output) is output
    output["video_outputs"] = torch.zeros(1)
    kept = without_encoders(output)
    assert (type(kept), list(kept)) == (BaseModelOutput, ["last_hidden_state"])
