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
    model, batch = tiny_qwen2_vl()
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
    mmqc.quantize_(sample.model, mmqc.recipes.calibquant(2, search="none"), progress=False)
    prompt = sample.prompts(5)[4]
    expected = sample.model.generate(**prompt, **GREEDY, max_new_tokens=30)
    with collect_records() as records:
        got = sample.model.generate(**prompt, **compiled("mmqc"), max_new_tokens=30)
    assert torch.equal(got, expected)
    assert len(records) == 1
