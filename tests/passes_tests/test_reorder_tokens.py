import pytest
import torch
from float64 import EXACT, passed, recorded
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_families import FAMILIES
from token_cases import HOWS, check_exact_after_each, decoder, gathers, marked, outputs, token_passes

from mmqc.passes.reorder_tokens import ReorderTokens

IMAGE = 500


@pytest.mark.parametrize("attention", ["gather", "unified"])
@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("how", HOWS)
def test_reorder_tokens__exact_after_each_pass(how: str, cache: bool, attention: str) -> None:
    prog = decoder(how, cache)
    check_exact_after_each(prog, token_passes(attention), EXACT)
    (site,) = next(r for r in prog.records if r.name == "reorder_tokens").sites
    assert f"{gathers(prog)} gathers" in site


@pytest.mark.parametrize("attention", ["gather", "unified"])
@pytest.mark.parametrize("family", ["qwen2_vl", "llava", "internvl"])
def test_reorder_tokens__exact_on_families(family: str, attention: str) -> None:
    model, batch = FAMILIES[family]()
    prog = marked(recorded(model, batch), batch["input_ids"] == IMAGE)
    check_exact_after_each(prog, token_passes(attention), EXACT)
    assert "gathers" in prog.records[0].sites[0]


@settings(max_examples=15)
@given(bits=st.lists(st.booleans(), min_size=14, max_size=14), attention=st.sampled_from(("gather", "unified")))
def test_reorder_tokens__exact_for_every_layout(bits: list[bool], attention: str) -> None:
    check_exact_after_each(decoder("window", visual=torch.tensor(bits).view(2, 7)), token_passes(attention), EXACT)


def test_reorder_tokens__rows_of_linears_are_sorted() -> None:
    prog = passed(decoder("causal"), [ReorderTokens("gather")])
    sizes = []
    prog.replay(lambda node, value, *_: sizes.append(value.shape) if node.meta.get("tokens_moved") else None)
    assert sizes
    assert all(size[:2] == (1, 14) for size in sizes)


def test_reorder_tokens__gather_goes_around_attention_only() -> None:
    prog = passed(decoder("causal", cache=True), [ReorderTokens("gather")])
    # x in and logits out; for each layer q, k and v out and the output of attention in
    assert gathers(prog) == 2 + 2 * 4
    linears = prog.nodes("linear")
    assert [n.meta.get("tokens_moved") is not None for n in linears] == [True] * len(linears)


def test_reorder_tokens__once() -> None:
    prog = passed(decoder("causal"), token_passes("unified"))
    count = len(prog.graph.nodes)
    before = outputs(prog)
    passed(prog, token_passes("unified"))
    assert [r.sites for r in prog.records[3:]] == [[], [], []]
    assert len(prog.graph.nodes) == count
    assert torch.equal(outputs(prog)[0], before[0])


def test_reorder_tokens__refuses_one_token() -> None:
    prog = decoder("causal")
    prog.nodes("placeholder")[-1].meta["shape"] = (2, 1)
    passed(prog, token_passes("gather"))
    assert [str(m) for m in prog.records[0].misses] == ["mmqc_visual: one token a sequence: there is nothing to reorder"]
    assert gathers(prog) == 0


def test_reorder_tokens__leaves_a_graph_without_mask_alone() -> None:
    prog = decoder("causal")
    prog.graph.erase_node(prog.nodes("placeholder")[-1])
    prog.inputs.pop()
    passed(prog, token_passes("gather"))
    assert [(r.sites, r.misses) for r in prog.records] == [([], [])] * 3


def test_reorder_tokens__refuses_linears_whose_rows_are_others() -> None:
    scale = torch.ones(2)
    prog = decoder("causal")
    x, visual = prog.nodes("placeholder")
    prog.add_weight("scale", scale)
    with prog.graph.inserting_after(visual):
        node = prog.graph.call_function(torch.ops.mmqc.quantize.default, (x, prog.graph.get_attr("scale"), visual, 8))
    node.meta["shape"] = (1, 14, 8)
    found = list(ReorderTokens("gather").match(prog))
    assert [str(m) for m in found] == [f"{node.name}: quantize has no tokens there"]
