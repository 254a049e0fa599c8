"""The kinds of a cache's layers, with whatever version of transformers says them."""

from transformers import Gemma3TextConfig, Qwen2Config

from mmqc.kv import layer_types as module
from mmqc.kv.layer_types import kinds_of, layer_types

GEMMA = Gemma3TextConfig(
    num_hidden_layers=3, sliding_window=7, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
)


def test_layer_types__of_one_kind():
    assert layer_types(Qwen2Config(num_hidden_layers=2)) == [("full_attention", {})] * 2


def test_layer_types__each_sliding_layer_knows_its_window():
    found = layer_types(GEMMA)
    assert [kind for kind, _ in found] == kinds_of(GEMMA) == GEMMA.layer_types
    assert [found[i][1]["sliding_window"] for i in (0, 2)] == [7, 7]


def test_layer_types__of_either_version(monkeypatch):
    """One dict for all layers, as before 5.23, and one for each: the same, and nobody writes into another's."""
    kinds, window = ["full_attention", "sliding_attention"], {"sliding_window": 7}
    for given in (window, [window, window]):
        monkeypatch.setattr(module, "find", lambda *_, given=given, **__: lambda _text: (kinds, given))
        found = layer_types(None)
        assert found == [(kind, window) for kind in kinds]
        found[0][1]["max_cache_len"] = 1
        assert "max_cache_len" not in found[1][1]
        assert window == {"sliding_window": 7}
