import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from blocks import MODELS, WIDTH
from float64 import passed, recorded, spaces_of
from models import randomise, tiny_qwen2_vl
from pass_cases import CASES, EXACT_PASSES
from torch import Tensor, nn
from torch.nn import functional as F

from mmqc.graph.kinds import kind
from mmqc.graph.program import Program
from mmqc.graph.spaces.coordinate_rules import coordinates
from mmqc.graph.spaces.coordinates import MANY, compact, distinct, unlike
from mmqc.graph.spaces.spaces import Space, Spaces
from mmqc.graph.spaces.towers import behind_operations, roles, towers
from mmqc.passes.raise_ops import RaiseOps

TEXT, VISION = "model.language_model", "model.visual"
LAYERS = (0, 1)


@functools.cache
def folded() -> tuple[Program, Spaces]:
    """A tiny Qwen2-VL after both folds."""
    model, batch = tiny_qwen2_vl()
    prog = passed(recorded(model, {**batch, "use_cache": False}), EXACT_PASSES[:5])
    return prog, spaces_of(prog)


def names(touches: list) -> set[str]:
    return {t.fqn for t in touches}


def space_of(spaces: Spaces, fqn: str, role: str) -> Space:
    (found,) = [s for s in spaces if any(t.fqn == fqn and t.role == role for t in s.touches)]
    return found


def test_spaces__text_stream_of_qwen2_vl() -> None:
    _, spaces = folded()
    stream = space_of(spaces, f"{TEXT}.embed_tokens.weight", "writer")
    assert (stream.width, stream.pins, stream.inside, len(stream.norms)) == (96, [], True, 5)
    outs = {f"{TEXT}.layers.{i}.{name}.weight" for i in LAYERS for name in ("self_attn.o_proj", "mlp.down_proj")}
    ins = {f"{TEXT}.layers.{i}.self_attn.{x}_proj.weight" for i in LAYERS for x in "qkv"}
    ins |= {f"{TEXT}.layers.{i}.mlp.{x}_proj.weight" for i in LAYERS for x in ("gate", "up")}
    assert names(stream.writers) == {*outs, f"{TEXT}.embed_tokens.weight", f"{VISION}.merger.mlp.2.weight"}
    assert names(stream.readers) == {*ins, "lm_head.weight"}
    assert all(t.groups.shape == (1, 96) for t in stream.touches)


def test_coordinates__are_no_more_for_a_longer_prompt() -> None:
    """What is kept of a replay is as much as there are channels: tokens of one kind are alike."""
    kept = []
    for grids in (((1, 4, 6), (1, 8, 4)), ((1, 16, 24), (1, 32, 16))):
        model, batch = tiny_qwen2_vl(grids=grids)
        found = coordinates(passed(recorded(model, {**batch, "use_cache": False}), (RaiseOps(),)))
        sizes = [ids.numel() for ids, _ in found.splits], [j.numel() for j in found.joins]
        kept.append((*map(sum, sizes), max(compact(o)[0].numel() for o in found.outputs if o is not None)))
    assert kept[0] == kept[1]


def test_spaces__vision_stream_of_qwen2_vl() -> None:
    _, spaces = folded()
    stream = space_of(spaces, f"{VISION}.patch_embed.proj.weight", "writer")
    assert (stream.width, stream.pins, stream.inside, len(stream.norms)) == (64, [], True, 5)
    assert names(stream.readers) == {
        *(f"{VISION}.blocks.{i}.{name}.weight" for i in LAYERS for name in ("attn.qkv", "mlp.fc1")),
        f"{VISION}.merger.mlp.0.weight",
    }
    (merger,) = [t for t in stream.readers if "merger" in t.fqn]
    assert torch.equal(merger.groups, torch.arange(256).reshape(4, 64))


def test_spaces__value_heads_of_qwen2_vl() -> None:
    _, spaces = folded()
    heads = [s for s in spaces if f"{TEXT}.layers.0.self_attn.o_proj.weight" in names(s.readers)]
    assert [s.width for s in heads] == [16, 16]
    for i, head in enumerate(sorted(heads, key=lambda s: s.writers[0].groups[0, 0].item())):
        assert names(head.writers) == {f"{TEXT}.layers.0.self_attn.v_proj.weight"}
        assert torch.equal(head.writers[0].groups, torch.arange(16)[None] + 16 * i)
        expected = torch.arange(3)[:, None] * 16 + torch.arange(16) + 48 * i  # three query heads share a value head
        assert torch.equal(head.readers[0].groups, expected)
    fused = [s for s in spaces if f"{VISION}.blocks.0.attn.proj.weight" in names(s.readers)]
    assert sorted(s.writers[0].groups[0, 0].item() for s in fused) == [128, 144, 160, 176]  # behind q and k in qkv


def test_spaces__hidden_spaces_are_made_by_operations() -> None:
    _, spaces = folded()
    hidden = space_of(spaces, f"{TEXT}.layers.0.mlp.down_proj.weight", "reader")
    assert (hidden.width, hidden.writers, [s.what for s in hidden.made]) == (296, [], ["op"])
    assert "made" in str(hidden)


def test_spaces__before_the_folds_norms_pin_what_they_read() -> None:
    model, batch = MODELS["vlm"]()
    spaces = Spaces.of(passed(recorded(model, batch), [RaiseOps()]), through_norms=False)
    stream = space_of(spaces, "vision.patches.weight", "writer")
    assert len(stream.mean_pins) == 3
    assert set(stream.mean_pins.values()) == {WIDTH}
    assert not stream.pins
    gain = next(s for s in spaces if "merger.norm.weight" in s.gains)
    assert names(gain.readers) == {"merger.mlp.up.weight"}
    assert names(gain.writers) == {"merger.norm.bias"}
    assert gain.gains["merger.norm.weight"].tolist() == list(range(WIDTH))


def test_towers__of_qwen2_vl() -> None:
    prog, spaces = folded()
    found = {n.args[1].target: tower for n, tower in towers(prog, spaces).items()}
    for fqn, tower in found.items():
        part = "projector" if ".merger." in fqn else "vision" if fqn.startswith(VISION) else "language"
        assert tower == part, fqn
    assert len(found) == 26
    role = {n.args[1].target: r for n, r in roles(prog, spaces).items()}
    assert role["lm_head.weight"] == "head"
    assert role[f"{TEXT}.layers.0.self_attn.o_proj.weight"] == role[f"{VISION}.merger.mlp.2.weight"] == "out"
    assert role[f"{TEXT}.layers.0.self_attn.q_proj.weight"] == role[f"{VISION}.merger.mlp.0.weight"] == "in"


def everything_but_pins(space: Space) -> tuple[Any, ...]:
    touches = [(t.fqn, t.axis, t.role, t.node, t.groups.tolist()) for t in space.touches]
    gains = {name: channels.tolist() for name, channels in space.gains.items()}
    return space.width, touches, space.norms, space.mean_pins, space.inputs, space.outputs, space.made, gains


@pytest.mark.parametrize("case", [*CASES, "qwen2_vl"])
@pytest.mark.parametrize("passes", [2, 5])
def test_spaces__without_pins_are_the_same(case: str, passes: int) -> None:
    """What towers and roles are read off does not depend on what may be rotated."""
    model, batch = tiny_qwen2_vl(grids=((1, 16, 24), (1, 32, 16))) if case == "qwen2_vl" else MODELS[case]()
    prog = passed(recorded(model, {**batch, "use_cache": False} if case == "qwen2_vl" else batch), EXACT_PASSES[:passes])
    few = Spaces.of(prog, pins=False)
    read = towers(prog, few), roles(prog, few), behind_operations(few)
    whole = Spaces.of(prog)
    assert whole is not few
    assert Spaces.of(prog, pins=False) is whole, "who asks for less takes what is there"
    assert list(map(everything_but_pins, few)) == list(map(everything_but_pins, whole))
    assert read == (towers(prog, whole), roles(prog, whole), behind_operations(whole))
    assert set(read[0]) == set(prog.nodes("linear", "conv"))


class Cached(nn.Module):
    """Attention whose keys and values leave for a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.embed(input_ids)
        q, k, v = self.q(x), self.k(x), self.v(x)
        y = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])
        return self.head(x + self.o(y[:, 0])), k, v


def test_roles__keys_and_values_for_a_cache_are_no_head() -> None:
    prog = passed(recorded(Cached(), {"input_ids": torch.arange(6)[None]}), [RaiseOps()])
    found = {n.args[1].target: role for n, role in roles(prog, spaces_of(prog)).items()}
    assert [fqn for fqn, role in found.items() if role == "head"] == ["head.weight"]
    assert len(found) == 5


@pytest.mark.parametrize("case", ["pre_ln", "rms_gqa"])
def test_towers__text_alone_is_language(case: str) -> None:
    model, batch = MODELS[case]()
    prog = passed(recorded(model, batch), [RaiseOps()])
    assert set(towers(prog, spaces_of(prog)).values()) == {"language"}


def test_towers__without_token_ids_everything_is_language() -> None:
    model, batch = MODELS["vlm"]()
    prog = passed(recorded(model.vision, {"pixel_values": batch["pixel_values"]}), [RaiseOps()])
    assert set(towers(prog, spaces_of(prog)).values()) == {"language"}


# --- coordinates through single operations ----------------------------------------------------------------------------


class Between(nn.Module):
    """Two linears with an operation between them."""

    def __init__(self, way: Callable[[Tensor], Tensor], width: int) -> None:
        super().__init__()
        self.way, self.first = way, nn.Linear(4, WIDTH)
        self.second = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.way(self.first(x)))


def between(way: Callable[[Tensor], Tensor], width: int = WIDTH) -> list[Space]:
    prog = recorded(randomise(Between(way, width)), {"x": torch.randn(2, 6, 4)})
    return [s for s in spaces_of(prog) if any(t.fqn == "second.weight" for t in s.readers)]


FREE: dict[str, tuple[Callable[[Tensor], Tensor], int, list[int]]] = {
    "nothing": (lambda y: y, WIDTH, [16]),
    "scalars": (lambda y: -2 * y / 3, WIDTH, [16]),
    "tokens": (lambda y: y.flip(1).roll(2, 1)[:, [0, 2, 1]], WIDTH, [16]),
    "per_token": (lambda y: y * torch.arange(6.0)[:, None], WIDTH, [16]),
    "mean_of_tokens": (lambda y: y.mean(1), WIDTH, [16]),
    "heads": (lambda y: y.view(2, 6, 4, 4).transpose(1, 2).transpose(1, 2).reshape(2, 6, 16), WIDTH, [16]),
    "merged": (lambda y: y.reshape(2, 3, 32), 32, [16]),
    "permuted": (lambda y: y[..., torch.randperm(16, generator=torch.Generator().manual_seed(0))], WIDTH, [16]),
    "halves_meet": (lambda y: y[..., :8] + y[..., 8:], 8, [8]),
    "zeros_around": (lambda y: F.pad(y, (0, 0, 1, 1)), WIDTH, [16]),
    "cat_of_itself": (lambda y: torch.cat((y, y), -1), 32, [16]),
    "half": (lambda y: y[..., 4:], 12, [12]),
    "channels_and_tokens_scaled": (lambda y: y * torch.arange(96.0).reshape(6, 16), WIDTH, [1] * 16),
}


@pytest.mark.parametrize("name", FREE)
def test_coordinates__pass_through(name: str) -> None:
    way, width, widths = FREE[name]
    spaces = between(way, width)
    assert sorted(s.width for s in spaces if not s.pins) == widths
    assert not any(s.pins for s in spaces)


PINNED: dict[str, tuple[Callable[[Tensor], Tensor], int, str]] = {
    "exp": (torch.exp, WIDTH, ""),
    "squared": (lambda y: y * y, WIDTH, ""),
    "shifted": (lambda y: y + 1, WIDTH, ""),
    "rounded": (lambda y: y.to(torch.int32).double(), WIDTH, ""),
    "ones_around": (lambda y: F.pad(y, (0, 0, 1, 1), value=1.0), WIDTH, "it shares a column with a constant"),
    "edges_repeated": (lambda y: F.pad(y, (0, 0, 1, 1), mode="replicate"), WIDTH, ""),
    "ones_at_a_token": (lambda y: y.masked_fill(torch.arange(6)[:, None] == 2, 1.0), WIDTH, "it shares a column with a constant"),
    "ones_in_a_mean": (
        lambda y: y.masked_fill(torch.arange(6)[:, None] == 2, 1.0).mean(1),
        WIDTH,
        "it shares a column with a constant",
    ),
}


@pytest.mark.parametrize("name", PINNED)
def test_coordinates__stop_at(name: str) -> None:
    way, width, reason = PINNED[name]
    spaces = between(way, width)
    first = [s for s in spaces if any(t.fqn == "first.weight" for t in s.writers)]
    assert all(s.pins or s.width == 1 for s in first)
    assert not reason or all(s.why_pinned.endswith(reason) for s in first)


@pytest.mark.parametrize(
    "ids",
    [
        torch.tensor([3, 5, 9]),
        torch.tensor([9, -4, 9, 3, -4]),
        torch.tensor([1 << 40, 7, 7]),
        torch.tensor([True, False, True]),
        torch.empty(0, dtype=torch.long),
    ],
    ids=["in order", "few numbers", "far apart", "truths", "none"],
)
def test_distinct__is_unique(ids: Tensor) -> None:
    assert torch.equal(distinct(ids), ids.unique())


@pytest.mark.parametrize("kinds", [1, 3, 300], ids=["alike", "few kinds", "all differ"])
def test_unlike__what_meets_stays(kinds: int) -> None:
    draw = torch.Generator().manual_seed(0)
    kind = torch.randint(kinds, (300,), generator=draw) if kinds < 300 else torch.randperm(300, generator=draw)
    a, b = (torch.randint(1 << 20, (kinds, 256), generator=draw)[kind].reshape(3, 100, 256) for _ in range(2))
    assert a.numel() >= MANY
    few = unlike(a, b.select(0, 0))
    pairs = [(x << 20) + y for x, y in (torch.broadcast_tensors(a, b[0]), few)]
    assert torch.equal(pairs[1].unique(), pairs[0].unique())
    assert len(unlike(a)[0]) == kinds


class Written(nn.Module):
    """Writes into what it has a copy of."""

    def __init__(self, copied: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.other, self.last = (nn.Linear(8, 8) for _ in range(3))
        self.copied = copied

    def forward(self, x: Tensor) -> Tensor:
        a = self.first(x)
        b = self.copied(a)
        a[..., :4] = self.other(x)[..., :4]
        return self.last(b.double()) + a.sum()


COPIES = {
    "clone": torch.clone,
    "half": Tensor.half,
    "sum": lambda a: a + a,
    "multiple": lambda a: a * 2,
    "quotient": lambda a: a / 2,
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_coordinates__a_copy_stays_what_it_was(copied: Callable[[Tensor], Tensor]) -> None:
    prog = passed(recorded(Written(copied), {"x": torch.randn(3, 8)}), [RaiseOps()])
    read = [s for s in spaces_of(prog) if "last.weight" in names(s.readers)]
    assert {fqn for s in read for fqn in names(s.writers)} == {"first.weight"}


def test_coordinates__what_was_bent_before_a_write_stays_pinned() -> None:
    prog = passed(recorded(Written(torch.sin), {"x": torch.randn(1, 8)}), [RaiseOps()])
    pinned = [s for s in spaces_of(prog) if "first.weight" in names(s.writers) and any("sin" in str(why) for _, why in s.pins)]
    assert sum(s.width for s in pinned) == 8


@pytest.mark.parametrize("copied", [torch.clone, Tensor.contiguous], ids=["clone", "contiguous"])
def test_coordinates__a_copy_that_nobody_writes_to_is_none(copied: Callable[[Tensor], Tensor]) -> None:
    model = Between(lambda y: copied(y.transpose(0, 1)), WIDTH)
    shadows = spaces_of(recorded(model, {"x": torch.randn(2, 6, 4)})).found.shadows
    (copy,) = [n for n in shadows if kind(n) == copied.__name__]
    assert shadows[copy].data_ptr() == shadows[copy.args[0]].data_ptr()
