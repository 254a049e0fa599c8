import pytest
from float64 import EXACT, passed
from token_cases import HOWS, check_exact_after_each, decoder, gathers

from mmqc.passes.reorder_tokens import ReorderTokens
from mmqc.passes.rewrite_mask import RewriteMask
from mmqc.passes.rewrite_rope_index import RewriteRopeIndex

FIRST, MASK, ITEM = ReorderTokens("unified"), RewriteMask("unified"), RewriteRopeIndex("unified")


@pytest.mark.parametrize("how", HOWS)
def test_rewrite_rope_index__exact(how: str) -> None:
    prog = decoder(how)
    check_exact_after_each(prog, (FIRST, MASK, ITEM), EXACT)
    assert prog.records[-1].sites
    assert prog.records[-1].delta["gather_tokens"] < 0


def test_rewrite_rope_index__no_gather_is_left_between_linears_and_attention() -> None:
    prog = passed(decoder("window", cache=False), [FIRST, MASK, ITEM])
    assert all("tokens_moved" in n.args[0].meta for n in prog.nodes("scaled_dot_product_attention"))
    back = [n for n in prog.nodes("gather_tokens") if n.meta.get("tokens_back")]
    assert len(back) == 1, "the logits alone go back"


def test_rewrite_rope_index__alone_it_is_exact_too() -> None:
    check_exact_after_each(decoder("window"), (FIRST, ITEM), EXACT)


def test_rewrite_rope_index__once() -> None:
    prog = passed(decoder("window"), [FIRST, MASK, ITEM, ITEM])
    assert prog.records[-1].sites == []


def test_rewrite_rope_index__refuses_under_gather() -> None:
    prog = passed(decoder("window"), [ReorderTokens("gather"), RewriteRopeIndex("gather")])
    count = gathers(prog)
    (miss,) = prog.records[-1].misses
    assert miss.reason == "gather: q and k are in sequence order in front of the rotation, and so are positions"
    assert count > 0
