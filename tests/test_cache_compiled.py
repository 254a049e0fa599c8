"""A decode step over the packed cache under torch.compile: one graph, whatever the length; the same tokens as eagerly."""

from typing import Any

import pytest
import torch
from models import tiny_qwen2_vl
from transformers import CompileConfig

from mmqc import KVSpec
from mmqc.cache_generate import attach
from mmqc.compile_record import collect_records

GREEDY = {"do_sample": False, "disable_compile": True}


def counting() -> tuple[Any, list[Any]]:
    """A backend that runs what it is given, and the graphs that it was given."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        del inputs
        graphs.append(graph)
        return graph

    return backend, graphs


def compiled(backend: Any) -> dict[str, Any]:
    config = CompileConfig(backend=backend, mode=None, fullgraph=True)
    config._compile_all_devices = True  # type: ignore[assignment]
    return {"do_sample": False, "compile_config": config}


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
