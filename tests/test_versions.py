"""Names of other packages, looked up in one place."""

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from types import FunctionType, SimpleNamespace

import pytest
import torch
from models import tiny_qwen2_vl
from transformers.modeling_outputs import BaseModelOutput

import mmqc
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


def overridden() -> Iterator[tuple[str, FunctionType, FunctionType]]:
    """(Name, ours, theirs) of every method of a class of ours that stands in for one of transformers'."""
    for module in pkgutil.walk_packages(mmqc.__path__, "mmqc."):
        try:
            classes = vars(importlib.import_module(module.name)).values()
        except ImportError:  # another engine's, which is not installed
            continue
        for cls in (c for c in classes if inspect.isclass(c) and c.__module__ == module.name):
            for name, method in vars(cls).items():
                bases = [b for b in cls.__mro__[1:] if name in vars(b)]
                if bases and bases[0].__module__.startswith("transformers.") and not name.startswith("__"):
                    ours, theirs = (getattr(m, "__func__", m) for m in (method, vars(bases[0])[name]))
                    if isinstance(ours, FunctionType) and isinstance(theirs, FunctionType):
                        yield f"{cls.__qualname__}.{name}", ours, theirs


def test_overridden_methods__take_what_the_installed_transformers_gives_them():
    """An argument more in a later version is no TypeError in the middle of loading a model."""
    found = list(overridden())
    for name, ours, theirs in found:
        theirs_take = inspect.signature(theirs).parameters.values()
        places = [object() for p in theirs_take if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        names = {p.name: object() for p in theirs_take if p.kind is p.KEYWORD_ONLY}
        try:
            inspect.signature(ours).bind(*places, **names)
        except TypeError as error:
            pytest.fail(f"{name}: {error}")
    assert {"MmqcQuantizer.update_weight_conversions", "PackedLayer.update"} <= {name for name, _, _ in found}
