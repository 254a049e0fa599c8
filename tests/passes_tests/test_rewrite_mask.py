import pytest
import torch
from float64 import EXACT, passed
from token_cases import HOWS, check_exact_after_each, decoder, gathers, outputs

from mmqc.passes.reorder_tokens import ReorderTokens
from mmqc.passes.rewrite_mask import RewriteMask

FIRST, ITEM = ReorderTokens("unified"), RewriteMask("unified")


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("cache", [False, True])
def test_rewrite_mask__exact(how: str, cache: bool) -> None:
    prog = decoder(how, cache)
    check_exact_after_each(prog, (FIRST, ITEM), EXACT)
    assert len(prog.records[-1].sites) == 2


def test_rewrite_mask__keys_stay_in_sequence_order_where_a_cache_keeps_them() -> None:
    sites = [passed(decoder("window", cache), [FIRST, ITEM]).records[-1].sites[0] for cache in (False, True)]
    assert "queries in modality order, keys and values in modality order" in sites[0]
    assert "queries in modality order, keys and values in sequence order" in sites[1]


def test_rewrite_mask__a_causal_flag_becomes_a_mask_of_positions() -> None:
    prog = passed(decoder("causal"), [FIRST, ITEM])
    assert len(prog.nodes("causal_mask")) == 2
    assert all(not n.kwargs["is_causal"] for n in prog.nodes("scaled_dot_product_attention"))
    assert "is_causal became a mask of positions" in prog.records[-1].sites[0]


def test_rewrite_mask__one_mask_for_all_layers() -> None:
    prog = passed(decoder("float"), [FIRST, ITEM])
    masks = {n.kwargs["attn_mask"] for n in prog.nodes("scaled_dot_product_attention")}
    assert [m.target for m in masks] == [torch.ops.mmqc.gather_tokens.default]


def test_rewrite_mask__once() -> None:
    prog = passed(decoder("window"), [FIRST, ITEM, ITEM])
    assert prog.records[-1].sites == []


def test_rewrite_mask__refuses_dropout() -> None:
    prog = passed(decoder("dropout"), [FIRST, ITEM])
    assert [m.reason for m in prog.records[-1].misses] == [
        "dropout draws other numbers for another order: it stays in sequence order"
    ] * 2
    assert outputs(prog)[0].isfinite().all()


def test_rewrite_mask__refuses_under_gather() -> None:
    prog = passed(decoder("window"), [ReorderTokens("gather")])
    count = gathers(prog)
    passed(prog, [RewriteMask("gather")])
    (miss,) = prog.records[-1].misses
    assert miss.reason == "gather: 2 attention calls keep sequence order, and their masks"
    assert gathers(prog) == count


def test_rewrite_mask__nothing_without_reorder_tokens() -> None:
    prog = passed(decoder("window"), [ITEM])
    assert (prog.records[-1].sites, prog.records[-1].misses) == ([], [])
