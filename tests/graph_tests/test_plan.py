import json

import pytest
import torch
from blocks import MODELS, WIDTH
from float64 import passed, recorded
from hypothesis import given
from hypothesis import strategies as st
from pass_cases import EXACT_PASSES
from torch import Tensor, fx, nn

from mmqc.graph.plan import Plan, Stream
from mmqc.graph.program import Program
from mmqc.graph.spaces.boundary import BoundaryError, crossings
from mmqc.graph.spaces.spaces import Spaces


def decided(case: str) -> Plan:
    model, batch = MODELS[case]()
    return passed(recorded(model, batch), EXACT_PASSES).decided


def same(a: Plan, b: Plan) -> bool:
    groups = all(
        torch.equal(x, y)
        for fqn, axes in a.rotated.items()
        for axis, there in axes.items()
        for x, y in zip(there, b.rotated[fqn][axis], strict=True)
    )
    gains = all(g[:3] == b.gains[f][:3] and torch.equal(g[3], b.gains[f][3]) for f, g in a.gains.items())
    keys = (a.rotated.keys(), a.gains.keys()) == (b.rotated.keys(), b.gains.keys())
    return groups and gains and keys and (a.streams, a.hadamards) == (b.streams, b.hadamards)


@pytest.mark.parametrize("case", ["vlm", "shared", "parallel"])
def test_plan__survives_json(case: str) -> None:
    plan = decided(case)
    assert plan.rotated
    assert plan.gains
    data = json.loads(json.dumps(plan.to_dict()))
    assert same(plan, Plan.from_dict(data))
    assert Plan.from_dict(data).to_dict() == data


@given(st.integers(1, 4).flatmap(lambda n: st.lists(st.lists(st.integers(0, 99), min_size=n, max_size=n), min_size=1, max_size=4)))
def test_plan__any_groups_survive_json(rows: list[list[int]]) -> None:
    plan, groups = Plan(), torch.tensor(rows)
    plan.rotate("w", 1, groups)
    plan.gains["w"] = ("g", "", 1.0, groups.reshape(-1))
    assert same(plan, Plan.from_dict(json.loads(json.dumps(plan.to_dict()))))


@pytest.mark.parametrize(
    ("groups", "short"),
    [
        (torch.arange(8).reshape(2, 4), [0, 2, 4, 4, 1]),
        (torch.arange(4)[None] + 3, [3, 1, 0, 4, 1]),
        (torch.arange(8).reshape(4, 2).t(), [0, 2, 1, 4, 2]),
        (torch.tensor([[0, 2, 3]]), [[0, 2, 3]]),
    ],
)
def test_plan__even_groups_are_written_short(groups: Tensor, short: list) -> None:
    plan = Plan()
    plan.rotate("w", 0, groups)
    assert plan.to_dict()["rotated"] == {"w": {"0": [short]}}


def test_plan__is_rotated_needs_every_index() -> None:
    plan = Plan()
    plan.rotate("w", 1, torch.arange(4)[None])
    assert plan.is_rotated("w", 1, torch.tensor([[1, 2]]))
    assert not plan.is_rotated("w", 1, torch.tensor([[3, 4]]))
    assert not plan.is_rotated("w", 0, torch.tensor([[1, 2]]))
    assert not plan.is_rotated("v", 1, torch.tensor([[1, 2]]))


def test_plan__stream_by_writer_or_norm() -> None:
    stream = Stream(("a", "b"), ("a",), ("n",))
    plan = Plan(streams=[stream])
    assert plan.stream(["b"]) is plan.stream(["n", "x"]) is stream
    assert plan.stream(["x", ""]) is None


def test_plan__events_number_spaces_and_copies() -> None:
    plan = Plan()
    plan.rotate("w", 1, torch.tensor([[0, 1], [2, 3]]))
    plan.rotate("w", 1, torch.tensor([[4, 5]]))
    ((ids, mark),) = plan.events("w", 1, torch.tensor([10, 11, 12, 13, 14, 15, -1, 17]))
    assert ids.tolist() == [10, 11, 12, 13, 14, 15, 17]
    assert mark.tolist() == [1, 1, 2, 2, 3, 3, 0]
    assert plan.events("w", 0, torch.arange(8)) == []


# --- boundaries of fragments ------------------------------------------------------------------------------------------


def fragment(way: str) -> tuple[Program, Spaces]:
    """A linear whose output leaves the graph, laid out in some way."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.Linear(8, WIDTH, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            y = self.down(x)
            ways = {
                "plain": lambda: y,
                "twice": lambda: torch.cat((y, y), -1),
                "transposed": lambda: y.transpose(1, 2),
                "reversed": lambda: y.flip(-1),
                "beside_another": lambda: torch.cat((y, x), -1),
            }
            return ways[way]()

    prog = recorded(Part(), {"x": torch.randn(2, 6, 8)})
    prog.fragment = True
    return prog, Spaces.of(prog)


def written(spaces: Spaces) -> list:
    return [s for s in spaces if any(t.fqn == "down.weight" and t.role == "writer" for t in s.touches)]


@pytest.mark.parametrize(("way", "copies"), [("plain", 1), ("twice", 2)])
def test_boundary__copies_along_the_last_axis(way: str, copies: int) -> None:
    _, spaces = fragment(way)
    found = crossings(spaces, written(spaces))
    assert found.outputs == [(0, copies)]
    assert (found.inputs, found.pins, found.count) == ([], [], 1)


@pytest.mark.parametrize("way", ["transposed", "reversed", "beside_another"])
def test_boundary__refuses_other_layouts(way: str) -> None:
    _, spaces = fragment(way)
    group = written(spaces)
    with pytest.raises(BoundaryError, match="at output 0 the 16 channels are not laid out along the last axis") as raised:
        crossings(spaces, group)
    assert raised.value.spaces == group


def test_boundary__placeholders_and_pins_are_edges() -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(WIDTH, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.up(x) + torch.exp(x)[..., :8]

    prog = recorded(Part(), {"x": torch.randn(2, 6, WIDTH)})
    spaces = Spaces.of(prog)
    group = [s for s in spaces if any(t.fqn == "up.weight" and t.role == "reader" for t in s.touches)]
    found = crossings(spaces, group)
    (x,) = [n for n in prog.graph.nodes if n.op == "placeholder"]
    assert found.inputs == [(x, 1)]
    assert [(node.target, operand, copies) for node, operand, copies in found.pins] == [(torch.exp, x, 1)]
    assert isinstance(found.pins[0][0], fx.Node)
