import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from mmqc.graph.tokens.tokens import NEVER, SINK, SOURCE, add_edge, empty_cut, source_side

Edges = list[tuple[str, str, int]]
NAMES = ("a", "b", "c", "d")
edges = st.lists(st.tuples(st.sampled_from((SOURCE, *NAMES)), st.sampled_from((*NAMES, SINK)), st.integers(0, 9)), max_size=14)


def price(side: set[str], given_edges: Edges) -> int:
    return sum(c for a, b, c in given_edges if a in side and b not in side)


@settings(max_examples=200)
@given(given_edges=edges)
def test_min_cut__cheapest_and_then_largest(given_edges: Edges) -> None:
    cut = empty_cut()
    cut.add_nodes_from(NAMES)
    for a, b, capacity in given_edges:
        add_edge(cut, a, b, capacity)
    side = {str(s) for s in source_side(cut)}
    every = [{SOURCE, *part} for n in range(5) for part in itertools.combinations(NAMES, n)]
    best = min(price(s, given_edges) for s in every)
    assert price(side, given_edges) == best
    assert all(s <= side for s in every if price(s, given_edges) == best)


def test_min_cut__an_edge_without_price_is_never_cut() -> None:
    cut = empty_cut()
    add_edge(cut, SOURCE, "a")
    add_edge(cut, "a", "b", NEVER)
    add_edge(cut, "b", SINK, 7)
    assert source_side(cut) == {SOURCE, "a", "b"}
