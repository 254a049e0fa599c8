"""Tensors that are alike: a size of theirs is one symbol for those that agree, and a guard for those that do not; interruptions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from tolerance import assert_close
from torch import Tensor, fx, nn
from torch._dynamo.callback import CallbackTrigger, callback_handler
from transformers import LlamaConfig, StaticCache

from mmqc.front.sizes import Marked, sizes_vary
from mmqc.graph.tracing import Tracing, as_tensor_of_numbers, may_vary, one_symbol_for_all, varying

Sums = Callable[[list[Tensor]], Tensor]


def sums(rooms: list[Tensor]) -> Tensor:
    """Of what each has, and how much of it."""
    return torch.stack([room.sum() * room.shape[1] for room in rooms])


@pytest.fixture
def traced() -> Any:
    """Compiles ``sums``, and keeps the graphs."""
    torch._dynamo.reset()
    graphs: list[fx.GraphModule] = []

    def keep(graph: fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    call: Sums = torch.compile(sums, backend=keep)
    yield call, graphs
    torch._dynamo.reset()


def sized(graph: fx.GraphModule) -> set[str]:
    """The symbols of a graph's inputs."""
    values = [node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder")]
    return {str(n) for v in values if isinstance(v, Tensor) for n in v.shape if isinstance(n, torch.SymInt)}


def rooms(*lengths: int, alike: str = "room") -> list[Tensor]:
    made = [torch.randn(2, n) for n in lengths]
    for tensor in made:
        may_vary(tensor, [1], alike)
    return made


def test_one_symbol_for_all__one_graph_for_every_length_that_they_share(traced: tuple[Sums, list[fx.GraphModule]]) -> None:
    call, graphs = traced
    for n in (5, 9, 7):
        given = rooms(n, n, n)
        with one_symbol_for_all():
            assert torch.equal(call(given), sums(given))
    assert [len(sized(graph)) for graph in graphs] == [1]


def test_one_symbol_for_all__other_lengths_are_another_graph(traced: tuple[Sums, list[fx.GraphModule]]) -> None:
    call, graphs = traced
    for lengths in ((5, 5, 5), (5, 5, 6), (8, 8, 9), (4, 4, 4)):
        given = rooms(*lengths)
        with one_symbol_for_all():
            assert torch.equal(call(given), sums(given))
    assert [len(sized(graph)) for graph in graphs] == [1, 2]


def test_one_symbol_for_all__other_names_and_none_have_symbols_of_their_own(traced: tuple[Sums, list[fx.GraphModule]]) -> None:
    call, graphs = traced
    given = [*rooms(5, 5), *rooms(5, 5, alike="other"), *rooms(5, 5, alike="")]
    with one_symbol_for_all():
        assert torch.equal(call(given), sums(given))
    assert [len(sized(graph)) for graph in graphs] == [4]


def test_may_vary__takes_the_name_back() -> None:
    tensor = torch.zeros(2, 3)
    before = dict(vars(tensor))
    may_vary(tensor, [1], "room")()
    assert vars(tensor) == before


def test_marked__the_layers_of_a_cache_are_alike_and_a_heads_width_is_a_constant() -> None:
    cache = StaticCache(LlamaConfig(num_hidden_layers=3, num_key_value_heads=2, head_dim=16), max_cache_len=8)
    cache.early_initialization(batch_size=2, num_heads=2, head_dim=16, dtype=torch.float32, device="cpu")
    call = Marked()
    with sizes_vary("all", cache):
        call.mark({}, None)
    marks = [
        (t._mmqc_alike, tuple(sorted(t._dynamo_weak_dynamic_indices))) for layer in cache.layers for t in (layer.keys, layer.values)
    ]
    assert len(set(marks[:2])) == 2, "keys, and values"
    assert marks[:2] == marks[2:4] == marks[4:]
    assert marks[0][1] == (0, 2)
    call.clear()
    assert not hasattr(cache.layers[0].keys, "_mmqc_alike")


@pytest.mark.parametrize("where", ["what is told of the end", "what is set back"])
def test_on_end__interrupted_leaves_nothing_pending(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    ended: list[str] = []

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    def end(model: nn.Module, reason: str) -> None:
        ended.append(reason)
        if where == "what is told of the end":
            stop()

    tracing = Tracing(None, lambda frame: (False, False), end)
    tracing.model, tracing.flags = nn.Identity(), ExitStack()
    if where == "what is set back":
        tracing.flags.callback(stop)
    monkeypatch.setattr(callback_handler, "end_callbacks", [tracing.on_end])
    with pytest.raises(KeyboardInterrupt), callback_handler.install_callbacks(CallbackTrigger.DYNAMO, "0"):
        pass
    assert ended == [""]
    torch._dynamo.reset()  # which refuses while a callback is pending


def test_as_tensor_of_numbers__is_one_graph_for_all() -> None:
    def areas(x: Tensor, sizes: list[list[int]]) -> Tensor:
        return x * torch.as_tensor(sizes, dtype=torch.float32).prod(-1)

    torch._dynamo.reset()
    graphs: list[fx.GraphModule] = []
    compiled = torch.compile(areas, backend=lambda graph, _: graphs.append(graph) or graph.forward, dynamic=True, fullgraph=True)
    for sizes in ([[2, 3], [4, 5]], [[3, 7], [2, 2]]):
        with as_tensor_of_numbers():
            assert torch.equal(compiled(torch.ones(2), varying(sizes)), areas(torch.ones(2), sizes))
    assert len(graphs) == 1
    torch._dynamo.reset()


def decorated(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Does nothing, as a wrapper whose code all that it decorates have in common."""

    @functools.wraps(function)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        return function(self, *args, **kwargs)

    return wrapper


class TwoDecorated(nn.Module):
    """Its forward and the method that sees the image have one decorator, as in NVIDIA's Nemotron Omni; the method ends a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.projector = nn.Embedding(9, 4), nn.Linear(4, 4)

    @decorated
    def features(self, pixels: Tensor) -> Tensor:
        """Of an image."""
        torch._dynamo.graph_break()
        return self.projector(pixels)

    @decorated
    def forward(self, input_ids: Tensor, pixels: Tensor) -> Tensor:
        """Text and image."""
        return self.embedding(input_ids) + self.features(pixels)


def test_before_trace__a_method_with_the_decorator_of_the_forward_is_not_the_forward() -> None:
    model = TwoDecorated().eval()
    inputs = torch.arange(4)[None], torch.randn(1, 4, 4)
    torch._dynamo.reset()
    with torch.no_grad():
        assert_close(torch.compile(model, backend="mmqc")(*inputs), model(*inputs), torch.float32)
