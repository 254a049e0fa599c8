"""Layers that are alike are compiled once, and everything computes what it did."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tolerance import assert_close
from torch import Tensor, fx, nn
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

import mmqc
from mmqc.compiler import regions
from mmqc.compiler.record import collect_records
from mmqc.compiler.regions import LEAST, Regions, compile_by_regions
from mmqc.graph.kinds import kind

WIDTH, LAYERS = 16, 6


class Layer(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        self.seen.add_(1)
        return x + self.down(torch.relu(self.up(self.norm(x)))) * scale


class Tower(nn.Module):
    def __init__(self, widths: Sequence[int] = (32,) * LAYERS) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 7)
        self.layers = nn.ModuleList(Layer(width) for width in widths)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        scale = x.mean(-1, keepdim=True)
        for layer in self.layers:
            x = layer(x, scale)
        return self.head(x)


def cut(model: nn.Module, *inputs: Tensor, depends: Callable[..., object] = lambda *_: None) -> tuple[list[Any], list[int], Any]:
    """What was compiled (left as it is), the order of the parts, and the model compiled so."""
    parts: list[Any] = []
    found: list[Regions | None] = []

    def backend(gm: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        def keep(part: fx.GraphModule, given: Sequence[Any]) -> Callable[..., Any]:
            parts.append((part, given))
            return part.forward

        found.append(compile_by_regions(gm, examples, keep, depends))
        return gm.forward if found[-1] is None else found[-1].forward

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend)
    compiled(*inputs)
    return parts, [] if found[0] is None else list(found[0].order), compiled


IDS = torch.arange(12).reshape(2, 6)


@torch.no_grad()
def test_regions__like_layers_once_and_each_with_its_own_weights() -> None:
    model = Tower()
    parts, order, compiled = cut(model, IDS)
    assert len(parts) == 3
    assert order == [0, *[1] * LAYERS, 2]
    model.layers[3].seen.zero_()
    assert torch.equal(compiled(IDS), model(IDS))
    assert [float(layer.seen) for layer in model.layers] == [3, 3, 3, 2, 3, 3], "buffers that are written are each layer's own"


@torch.no_grad()
def test_halves__compute_what_the_whole_does_and_are_cut_in_front_of_what_is_late() -> None:
    model, found = Tower(), list[Regions]()

    def backend(gm: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        regions = compile_by_regions(gm, examples, lambda part, _: part.forward, lambda *_: None)
        assert regions is not None
        found.append(regions)

        def call(*args: Any) -> Any:
            holders = gm.graph.find_nodes(op="placeholder")
            (late,) = (i for i, a in enumerate(args) if a is model.layers[LEAST].up.weight)
            assert regions.halves({i for i, _ in enumerate(holders)}) is None
            assert regions.halves({late - 12 * LEAST}) is None, "one layer alone is not worth it"
            assert regions.halves(set()) is None, "nothing is left for the tail"
            halves = regions.halves({late})
            assert halves is not None
            assert late not in halves.reads
            assert {i for i, a in enumerate(args) if a is IDS or a is model.layers[LEAST - 1].up.weight} <= halves.reads
            return halves.tail(*halves.head(*args), *args)

        return call

    torch._dynamo.reset()
    want = model(IDS)
    assert torch.equal(torch.compile(model, backend=backend)(IDS), want)
    assert [float(layer.seen) for layer in model.layers] == [2] * LAYERS
    assert len(found) == 1


class Shared(Layer):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return torch.ops.mmqc.all_reduce(super().forward(x, scale), "everyone")


@torch.no_grad()
def test_halves__the_first_meets_no_other_rank() -> None:
    model, reads = Tower([32] * 2 * LEAST), list[set[int] | None]()
    for i in range(LEAST + 2, 2 * LEAST):
        model.layers[i] = Shared()

    def backend(gm: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        regions = compile_by_regions(gm, examples, lambda part, _: part.forward, lambda *_: None)
        assert regions is not None
        places = {p for p, _ in enumerate(examples)}
        weights = [next(i for i in places if examples[i] is layer.up.weight) for layer in model.layers]
        for late in (weights[-1], weights[LEAST + 2], weights[LEAST + 1]):
            halves = regions.halves({late})
            reads.append(None if halves is None else {n for n, i in enumerate(weights) if i in halves.reads})
        return lambda *_: (torch.zeros(*IDS.shape, 7),)

    torch._dynamo.reset()
    torch.compile(model, backend=backend)(IDS)
    assert reads == [{*range(LEAST + 2)}, {*range(LEAST + 2)}, {*range(LEAST + 1)}]


@torch.no_grad()
def test_regions__a_layer_of_another_size_is_compiled_by_itself() -> None:
    model = Tower((32, 32, 40, 32, 32, 32))
    parts, order, compiled = cut(model, IDS)
    assert order == [0, 1, 1, 2, 1, 1, 1, 3]
    assert len(parts) == 4
    assert torch.equal(compiled(IDS), model(IDS))


@torch.no_grad()
def test_regions__what_else_a_compilation_depends_on() -> None:
    model = Tower()
    odd = model.layers[2].up.weight
    parts, order, _ = cut(model, IDS, depends=lambda _, inputs: any(x is odd for x in inputs))
    assert order == [0, 1, 1, 2, 1, 1, 1, 3]
    assert all(len(part.graph.find_nodes(op="placeholder")) == len(given) for part, given in parts)


@torch.no_grad()
def test_regions__none_for_few_layers_or_where_gradients_are_wanted() -> None:
    parts, order, _ = cut(Tower((32,) * (LEAST - 1)), IDS)
    assert (parts, order) == ([], [])
    with torch.enable_grad():
        parts, order, _ = cut(Tower(), IDS)
    assert (parts, order) == ([], [])


class Own(nn.Module):
    """Layers that each write a table of their own length, which is a symbol of its own."""

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in lengths)
        self.tables = [torch.zeros(n, WIDTH) for n in lengths]

    def forward(self, x: Tensor, tables: list[Tensor]) -> Tensor:
        for layer, table in zip(self.layers, tables, strict=True):
            table[: x.shape[0]].copy_(x)
            x = layer(x, table.sum(0))
        return x


@torch.no_grad()
def test_regions__sizes_that_are_symbols_of_their_own() -> None:
    model = Own([7, 9, 8, 11, 6, 10])
    x = torch.randn(5, WIDTH)
    for table in model.tables:
        torch._dynamo.maybe_mark_dynamic(table, 0)
    parts, order, compiled = cut(model, x, model.tables)
    assert order == [0, 1, 2, 2, 2, 2, 3], "the last one has no table behind it, the first one's table was written before"
    assert len(parts) == 4
    for lengths in ((7, 9, 8, 11, 6, 10), (20, 9, 15, 6, 7, 30)):
        got, want = ([torch.zeros(n, WIDTH) for n in lengths] for _ in range(2))
        assert torch.equal(compiled(x, got), model(x, want))
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@torch.no_grad()
def test_regions__a_guard_of_the_first_part_is_one_of_all() -> None:
    """A compilation that takes a size for granted is not used where that does not hold."""
    model = Own([7, 9, 8, 11, 6, 10])
    for table in model.tables:
        torch._dynamo.maybe_mark_dynamic(table, 0)
    seen: list[int] = []

    def backend(gm: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        def keep(part: fx.GraphModule, given: Sequence[Any]) -> Callable[..., Any]:
            del given
            traced = [node.meta["example_value"] for node in part.graph.find_nodes(op="placeholder")]
            lengths = [value for value in traced if isinstance(value, torch.SymInt)]
            seen.append(int(bool(lengths) and bool(lengths[0] > 7)))  # a guard
            return part.forward

        found = compile_by_regions(gm, examples, keep, lambda *_: None)
        assert found is not None
        return found.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend)
    x = torch.randn(5, WIDTH)
    got, want = ([torch.zeros(len(t), WIDTH) for t in model.tables] for _ in range(2))
    for t in got:
        torch._dynamo.maybe_mark_dynamic(t, 0)
    assert torch.equal(compiled(x, got), model(x, want))
    assert set(seen) == {0, 1}, "compiled for at most seven, and for more"


class Written(nn.Module):
    """A tensor that does not lie contiguously is written by its own layer and by all behind it, and handed out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept = (x * 2).transpose(0, 1)
        for layer in self.layers:
            x = layer(x, kept.mean())
            kept.add_(1)
        return x, kept


@torch.no_grad()
def test_regions__what_crosses_a_cut_may_be_written_on_either_side() -> None:
    model, x = Written(), torch.randn(3, 5, WIDTH)
    parts, order, compiled = cut(model, x)
    assert len(parts) < len(order)
    (got, kept), (want, same) = compiled(x), model(x)
    assert_close(got, want)  # a mean of what lies in another order
    assert torch.equal(kept, same)


class Seen(Written):
    """Two views of one tensor: one goes from layer to layer, the other is handed out."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept = (x * 2).transpose(0, 1)
        first = kept[0]
        for layer in self.layers:
            x = layer(x, kept.mean())
            kept.add_(1)
        return x, first


@torch.no_grad()
def test_regions__none_where_a_copy_would_part_two_views() -> None:
    model, x = Seen(), torch.randn(3, 5, WIDTH)
    parts, _, compiled = cut(model, x)
    assert parts == []
    for got, want in zip(compiled(x), model(x), strict=True):
        assert_close(got, want)


@torch.no_grad()
def test_regions__constants_of_the_graph() -> None:
    """A tensor that is an attribute of the graph belongs to no part."""
    model, orders = Tower(), []

    def backend(gm: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        scale = next(n for n in gm.graph.nodes if n.target == "mean")
        gm.register_buffer("halves", torch.full((2, 6, 1), 0.5))
        with gm.graph.inserting_before(scale):
            half = gm.graph.get_attr("halves")
        half.meta = {**scale.meta}
        scale.replace_all_uses_with(half)
        found = compile_by_regions(gm, examples, lambda part, _: part.forward, lambda *_: None)
        assert found is not None
        orders.append(found.order)
        return found.forward

    torch._dynamo.reset()
    got = torch.compile(model, backend=backend)(IDS)
    x = model.embed(IDS)
    for layer in model.layers:
        x = layer(x, torch.tensor(0.5))
    assert torch.equal(got, model.head(x))
    assert len(set(orders[0])) < len(orders[0])


class Joined(nn.Module):
    """What goes from layer to layer lies one way when each operation runs alone, another when Inductor has traced it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(LAYERS))

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x.new_empty(0), layer(x).transpose(0, 1)])  # as a cache's first tokens are joined to none
            seen[:, 1:].copy_(x[:, 1:])  # a view of an input is written, in every layer
        return x


@torch.no_grad()
def test_regions__what_crosses_a_cut_lies_as_the_next_part_expects() -> None:
    model, x = Joined(), torch.randn(4, 4, 4)
    got, want = torch.zeros(4, 4, 4).transpose(0, 2), torch.zeros(4, 4, 4)
    assert torch.equal(torch.compile(model, backend="mmqc")(x, got), model(x, want))
    assert torch.equal(got, want)


def test_regions__a_size_goes_by_the_symbol_that_stands_for_it() -> None:
    """Where two sizes were found to be equal, a part may have only the one whose name generated code does not use."""
    env = ShapeEnv()
    one, other = (env.create_unspecified_symint_and_symbol(7, ConstantSource(name), DimDynamic.DYNAMIC) for name in "ab")
    assert bool(one == other)
    names = {str(regions._by_its_symbol(size).node._expr) for size in (one, other)}
    assert names == {str(one.node.expr)}
    assert regions._by_its_symbol(3) == 3


@torch.no_grad()
def test_backend__records_the_kernels_of_every_layer() -> None:
    model = Tower()
    mmqc.quantize_(model, mmqc.recipes.rtn(8, 8), [{"ids": IDS}], progress=False)
    answers = []
    for by_parts in (True, False):
        torch._dynamo.reset()
        with collect_records() as records:
            answers.append((torch.compile(model, backend="mmqc", options={"regions": by_parts})(IDS), records[0]))
    (got, in_parts), (want, whole) = answers
    assert_close(got, want)
    assert_close(got, model(IDS))
    assert in_parts.ops == whole.ops
    reasons = [[why for _, why in record.fallbacks] for record in (in_parts, whole)]  # some where the processor has no VNNI
    assert reasons[0] == reasons[1]
    products = [sum("mm" in name for name in record.kernels) for record in (in_parts, whole)]
    assert products[0] == products[1] > LAYERS


class Switching(Layer):
    """Modes of its own: halves of a product in float32 under autocast, none of it for gradients."""

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False), torch.no_grad():
            low, high = torch.split(self.norm(x.float()) * scale.float(), WIDTH // 2, -1)
        return x + self.down(torch.relu(self.up(torch.cat([high, low], -1))))


def switching() -> nn.Module:
    model = Tower().requires_grad_(False)
    model.layers = nn.ModuleList(Switching() for _ in range(LAYERS)).requires_grad_(False)
    return model


def test_regions__modes_that_go_on_and_off() -> None:
    model = switching()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(IDS)
        parts, order, compiled = cut(model, IDS)
        assert torch.equal(compiled(IDS), expected)
    assert expected.dtype == torch.bfloat16
    assert len(parts) < len(order)
    names = {kind(node) for gm, _ in parts for node in gm.graph.nodes}
    assert names >= regions.MODES


def test_regions__none_for_modes_in_parts_that_are_mixed() -> None:
    def is_cut(mixed: bool) -> bool:
        found: list[Regions | None] = []

        def backend(gm: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
            if mixed:  # what takes a tuple apart, behind the next layer's first operation
                first = next(node for node in gm.graph.nodes if kind(node) == "getitem")
                inside = [n for n in gm.graph.nodes if n.op != "placeholder" and "layers.1" in str(n.meta.get("nn_module_stack"))]
                with gm.graph.inserting_after(inside[0]):
                    gm.graph.call_function(first.target, first.args).meta = first.meta
            found.append(compile_by_regions(gm, examples, lambda part, _: part.forward, lambda *_: None))
            return gm.forward

        torch._dynamo.reset()
        torch.compile(switching(), backend=backend)(IDS)
        return found[0] is not None

    assert is_cut(mixed=False)
    assert not is_cut(mixed=True)
