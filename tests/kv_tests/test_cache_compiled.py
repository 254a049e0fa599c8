"""A decode step over the packed cache under torch.compile: one graph, whatever the length; the same tokens as eagerly."""

import pytest
import torch
from counted_graphs import compiled, counting
from models import tiny_qwen2_vl

from mmqc import KVSpec
from mmqc.compiler.record import collect_records
from mmqc.kv.generate import attach

GREEDY = {"do_sample": False, "disable_compile": True}


def test_generate__decode_is_one_graph_at_any_length() -> None:
    torch._dynamo.reset()
    model, batch = tiny_qwen2_vl(depth=1)
    attach(model, KVSpec(1, tau=((1, 2),)))
    expected = model.generate(**batch, **GREEDY, max_new_tokens=12)
    backend, graphs = counting()
    got = model.generate(**batch, **compiled(backend), max_new_tokens=12)
    assert torch.equal(got, expected)
    assert len(graphs) == 1, "no graph break (fullgraph), and none for another length"


@pytest.mark.slow
def test_generate__through_the_backend() -> None:
    import mmqc

    torch._dynamo.reset()
    sample = mmqc.samples.load("digits-vqa")
    mmqc.quantize_(sample.model, mmqc.recipes.calibquant(2, layer_bits=(1, 1, 4, 2)), progress=False)
    prompt = sample.prompts(5)[4]
    expected = sample.model.generate(**prompt, **GREEDY, max_new_tokens=30)
    with collect_records() as records:
        got = sample.model.generate(**prompt, **compiled("mmqc"), max_new_tokens=30)
    assert torch.equal(got, expected)
    assert len(records) == 1


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_generate__of_a_compiled_model_packs_the_prompt(backend: str) -> None:
    """The whole model is compiled, by whatever backend: visual tokens are found, and every layer counts its own tokens."""
    torch._dynamo.reset()
    model, batch = tiny_qwen2_vl(depth=1)
    attach(model, KVSpec(2, tau=((1, 2),)))
    options = {"do_sample": False, "max_new_tokens": 6, "return_dict_in_generate": True}
    expected = model.generate(**batch, **options, disable_compile=True)
    model.compile(backend=backend)
    got = model.generate(**batch, **options)
    assert torch.equal(got.sequences, expected.sequences)
    for ours, theirs in zip(got.past_key_values.packed, expected.past_key_values.packed, strict=True):
        assert torch.equal(ours.text_count, theirs.text_count)
        assert int(ours.cumulative_length) == int(theirs.cumulative_length)
        assert [s.count.tolist() for s in ours.segments] == [s.count.tolist() for s in theirs.segments]
    assert len({layer.text_count.data_ptr() for layer in got.past_key_values.packed}) == len(got.past_key_values.packed)
