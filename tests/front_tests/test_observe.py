"""What an observed forward reads, and which of its calls could run in front of it."""

import cProfile
import pstats
from collections import UserDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mmqc.front.observe import SLICE, is_metadata, is_read, observe, shape_of_floats
from mmqc.front.places import place_of

IDS, SIZES, X = torch.arange(6), torch.tensor([[2, 3], [3, 2]]), torch.randn(6, 4)


class Packs(nn.Module):
    def lengths(self, sizes: Tensor) -> list[int]:
        return sizes.prod(-1).tolist()

    def split(self, x: Tensor, sizes: Tensor) -> Tensor:
        return torch.stack([part.sum(0) for part in x.split([n // 2 for n in self.lengths(sizes)])])

    def allowed(self, x: Tensor) -> bool:
        return bool((x > 0).any())

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        self.allowed(x)
        return self.split(x, sizes)


def test_observe__finds_reads_and_the_metadata_call_around_them() -> None:
    model = Packs()
    seen = observe(lambda: model.forward(X, SIZES), frozenset({"allowed"}), {"sizes": SIZES})
    assert [r.op for r in seen.reads] == ["tolist"]
    read = seen.reads[0]
    assert read.where.startswith(__file__)
    around = [c for c in read.call.around() if is_metadata(c)]
    assert [c.code.co_name for c in around] == ["lengths"]
    assert place_of(around[0])[0] is model


def test_observe__what_was_made_of_inputs_is_as_good_as_they_are() -> None:
    model = Packs()
    for sizes, known in ((SIZES * 1, False), (SIZES, True)):
        seen = observe(lambda s=sizes: model.forward(X, s.flip(0) * 1), frozenset({"allowed"}), {"sizes": SIZES})
        assert any(is_metadata(c) for c in seen.reads[0].call.around()) == known


def test_observe__a_number_that_was_read_outside_goes_into_no_recipe() -> None:
    """It would be the first batch's for ever."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def counted(self, sizes: Tensor, n: int) -> list[int]:
            return (sizes.sum(-1) * n).tolist()

        def forward(self, sizes: Tensor, given: bool) -> Any:
            return self.scale * sum(self.counted(sizes, 7 if given else int(sizes[0, 1])))

    for given in (True, False):
        seen = observe(lambda g=given: Model().forward(SIZES, g), frozenset(), {"sizes": SIZES})
        (call,) = (c for c in seen.calls if c.code.co_name == "counted")
        assert is_metadata(call) == given


def test_observe__the_bounds_of_a_slice_are_read() -> None:
    def forward() -> Tensor:
        y = X[: SIZES[0, 0]] * 1
        y[SIZES[0, 0] - 1 :, 1:2] = 0
        return y[:1]

    assert [r.op for r in observe(forward, frozenset(), {}).reads] == [SLICE, SLICE]


def test_observe__a_mapping_that_is_being_made() -> None:
    def forward() -> Tensor:
        shared = UserDict()  # a function in Python, as Gemma 4 calls it: its own ``self`` has no data yet
        shared["length"] = int(torch.ones(3).sum())
        return torch.zeros(shared["length"])

    found = observe(forward, frozenset(), {})
    assert found.output.shape == (3,)
    assert len(found.reads) == 1


def test_observe__a_table_that_grows_while_it_is_looked_at() -> None:
    class Grows(UserDict[str, int]):
        def items(self) -> Any:
            table["another"] = 1
            return super().items()

    table: dict[str, Any] = {"first": Grows(a=1), "second": 2}

    def uses(table: dict[str, Any]) -> int:
        return len(table)

    observed = observe(lambda: uses(table), frozenset(), {})
    assert "another" in table
    assert observed.output == 3
    (call,) = (call for call in observed.calls if call.code.co_name == "uses")
    assert call.arguments["table"] == {"first": {"a": 1}, "second": 2}  # as it was given


def test_is_read__sizes_that_depend_on_values() -> None:
    mask = IDS > 2
    assert is_read("__getitem__", (IDS, mask), {})
    assert not is_read("__getitem__", (IDS, SIZES), {})
    assert is_read("repeat_interleave", (IDS, SIZES), {})
    assert not is_read("repeat_interleave", (IDS, 2), {})
    assert is_read("arange", (IDS[0],), {})
    assert not is_read("arange", (3,), {})
    assert is_read("where", (mask,), {})
    assert not is_read("where", (mask, IDS, IDS), {})


def behind() -> int:
    return sum(range(9))


def test_observe__a_profiler_that_was_on_goes_on() -> None:
    """cProfile hands out itself as the profile function, and cannot be called."""
    profiler = cProfile.Profile()
    profiler.enable()
    seen = observe(lambda: Packs().forward(X, SIZES), frozenset(), {})
    behind()
    profiler.disable()
    assert [r.op for r in seen.reads] == ["__bool__", "tolist"]
    assert behind.__name__ in {name for _, _, name in pstats.Stats(profiler).stats}  # type: ignore[attr-defined]


def test_observe__watches_the_forward_and_not_itself() -> None:
    """Each Python function that it calls for an operation is an event of the profiler as well: seconds for a model."""
    seen = observe(lambda: Packs().forward(X, SIZES), frozenset(), {"sizes": SIZES})
    assert not {call.code.co_filename for call in seen.calls if "/mmqc/" in call.code.co_filename}


def test_observe__beside_torchs_profiler() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], with_stack=True):
        seen = observe(lambda: Packs().forward(X, SIZES), frozenset(), {})
    assert [r.op for r in seen.reads] == ["__bool__", "tolist"]


class Weighing(nn.Module):
    """Methods of a module with weights, of which one needs none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.scale = nn.Embedding(6, 4), nn.Parameter(torch.ones(4))
        self.register_buffer("steps", torch.arange(6.0))

    def positions(self, ids: Tensor) -> Tensor:
        return torch.arange(int(ids.max()) + 1).float() * self.steps[: len(ids)]

    def embedded(self, ids: Tensor) -> Tensor:
        return self.table(ids) * int(ids.max())

    def scaled(self, ids: Tensor) -> Tensor:
        return ids[:4] * self.scale * int(ids.max())

    def kept(self, ids: Tensor) -> Tensor:
        return self.hidden[: int(ids.max())] * 2

    def forward(self, ids: Tensor) -> Tensor:
        self.hidden = self.embedded(ids)
        return self.positions(ids).sum() + self.scaled(ids).sum() + self.kept(ids).sum()


def test_observe__what_weighs_is_what_weights_came_into() -> None:
    """Also through a module that is called, and through what was left on a module."""
    model = Weighing()
    seen = observe(lambda: model.forward(IDS), frozenset(), {"ids": IDS})
    weighs = {call.code.co_name: call.weighs for call in seen.calls if call.owner is model}
    assert weighs == {"forward": True, "positions": False, "embedded": True, "scaled": True, "kept": True}


class Offloaded(Mapping[str, Any]):
    """As accelerate's table of weights on a disk: it lists names under which it has nothing."""

    def __getitem__(self, name: str) -> Any:
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(["weight"])

    def __len__(self) -> int:
        return 1


def test_shape_of_floats__a_table_that_cannot_be_read_stays_as_it_is() -> None:
    table = Offloaded()
    assert shape_of_floats({"x": table}) == {"x": table}
