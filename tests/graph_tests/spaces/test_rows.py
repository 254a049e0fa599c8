"""A part of a stream that is treated by itself keeps the whole from being rotated, however the part is cut out."""

from collections.abc import Callable

import pytest
import torch
from blocks import VOCAB, WIDTH, Mlp, RMSNorm, ids
from float64 import EXACT, output_of, relative_error
from models import randomise
from tolerance import TOLERANCE
from torch import Tensor, nn

import mmqc
from mmqc.graph.record import record
from mmqc.graph.spaces.rows import APART
from mmqc.graph.spaces.spaces import Spaces

HALF = WIDTH // 2
Middle = Callable[[Tensor], Tensor]


class Stream(nn.Module):
    """A residual stream with ``middle`` between two branches."""

    def __init__(self, middle: Middle) -> None:
        super().__init__()
        self.middle = middle
        self.embed, self.first, self.second = nn.Embedding(VOCAB, WIDTH), Mlp(), Mlp()
        self.norms, self.head = nn.ModuleList(RMSNorm() for _ in range(3)), nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        x = self.middle(x + self.first(self.norms[0](x)))
        x = x + self.second(self.norms[1](x))
        return self.head(self.norms[2](x))


def written(x: Tensor, change: Callable[[Tensor], object]) -> Tensor:
    change(x)
    return x


def beside(left: Tensor, right: Tensor) -> Tensor:
    return torch.cat((left, right), -1)


ALONE: dict[str, Middle] = {
    "scaled": lambda x: beside(x[..., :HALF], x[..., HALF:] * 1.00001),
    "negative": lambda x: beside(x[..., :HALF], -x[..., HALF:]),
    "rolled": lambda x: beside(x[..., :HALF].roll(1, 1), x[..., HALF:]),
    "other_tokens": lambda x: beside(torch.cat((x[:, :1, :HALF], x[:, :-1, :HALF]), 1), x[..., HALF:]),
    "across_rows": lambda x: x.reshape(-1).roll(1).reshape(x.shape),
    "averaged": lambda x: beside(x[..., :HALF].mean(1, keepdim=True).expand(-1, x.shape[1], -1), x[..., HALF:]),
    "in_place": lambda x: written(x, lambda x: x[..., HALF:].mul_(2)),
    "in_place_one_row": lambda x: written(x, lambda x: x[:, 0, HALF:].mul_(2)),
    "assigned": lambda x: written(x, lambda x: x.__setitem__((slice(None), 0, slice(HALF, None)), 0.0)),
    "masked": lambda x: x.masked_fill((torch.arange(WIDTH) < HALF) & (torch.arange(x.shape[1]) == 0)[:, None], 0.0),
    "chosen": lambda x: torch.where(torch.arange(WIDTH) % 2 == 0, x, x.roll(1, 1)),
    "behind_a_transpose": lambda x: torch.cat((x.mT[:, :2] * 3, x.mT[:, 2:]), 1).mT,
    "gathered": lambda x: x.gather(1, torch.stack([torch.arange(x.shape[1]).roll(c % 2) for c in range(WIDTH)], -1).expand_as(x)),
}
MEMORY: dict[str, Middle] = {  # views by other ways than the channels
    "as_strided": lambda x: written(x, lambda x: x.as_strided((len(x), x.shape[1], HALF), x.stride()).mul_(2)),
    "as_strided_across_rows": lambda x: written(x, lambda x: x.as_strided((len(x), 3, WIDTH + 8), x.stride()).mul_(2)),
    "bits": lambda x: (x.view(torch.int64) & -8).view(torch.float64),
    "halves_of_numbers": lambda x: x.view(torch.int32).view(torch.float64),
    "written_as_bits": lambda x: written(x, lambda x: x.view(torch.int64)[..., :HALF].zero_()),
    "diagonal": lambda x: written(x, lambda x: x.diagonal(0, 1, 2).mul_(2)),
    "unfolded": lambda x: written(x, lambda x: x.unfold(-1, 4, 4)[..., 0].mul_(2)),
    "complex": lambda x: written(x, lambda x: torch.view_as_complex(x.unflatten(-1, (-1, 2))).mul_(1j)),
}
ALIKE: dict[str, Middle] = {
    "scaled": lambda x: x * 2,
    "rows_scaled": lambda x: x * torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[None, :, None],
    "halves_swapped": lambda x: torch.cat(x.chunk(2, -1)[::-1], -1),
    "permuted": lambda x: x[..., torch.randperm(WIDTH, generator=torch.Generator().manual_seed(0))],
    "cut_and_joined": lambda x: torch.cat((x[:, :2], x[:, 2:] * 3), 1),
    "tokens_shifted": lambda x: x + torch.nn.functional.pad(x, (0, 0, 1, -1)),
    "rows_zeroed": lambda x: x.masked_fill((torch.arange(x.shape[1]) == 1)[None, :, None], 0.0),
    "merged_and_split": lambda x: x.reshape(len(x), -1, 2 * WIDTH).reshape(x.shape),
    "behind_a_transpose": lambda x: (x.mT * 2).mT,
}


def quantized(middle: Middle, dtype: torch.dtype = torch.float64) -> tuple[float, list[str], list[str]]:
    model = randomise(Stream(middle)).to(dtype)
    answer = output_of if dtype is torch.float64 else torch.no_grad()(lambda model, batch: model(**batch))
    expected = answer(model, ids())
    report = mmqc.quantize_(model, mmqc.recipes.rotate(), [ids()], progress=False)
    sites = [site for record in report.passes if record.name == "fuse_rotation" for site in record.sites]
    return relative_error(answer(model, ids()), expected), sites, [r.reason for r in report.refused]


@pytest.mark.parametrize("how", ALONE)
def test_rows__a_part_by_itself_pins_the_stream(how: str) -> None:
    error, sites, refused = quantized(ALONE[how])
    assert error < EXACT
    assert not any(f"space of {WIDTH}" in site for site in sites)
    assert any(APART in reason for reason in refused)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("how", ["scaled", "in_place_one_row", "rolled"])
def test_rows__pins_in_coarser_types_too(how: str, dtype: torch.dtype) -> None:
    """A factor of 1.00001 is below what a comparison of outputs in bfloat16 can see."""
    error, sites, refused = quantized(ALONE[how], dtype)
    assert error < TOLERANCE[dtype][0]
    assert not any(f"space of {WIDTH}" in site for site in sites)
    assert any(APART in reason for reason in refused)


@pytest.mark.parametrize("how", MEMORY)
def test_rows__other_views_of_the_memory_pin_the_stream_too(how: str) -> None:
    error, sites, _ = quantized(MEMORY[how])
    assert error < EXACT
    assert not any(f"space of {WIDTH}" in site for site in sites)


@pytest.mark.parametrize("how", ALIKE)
def test_rows__what_is_done_to_all_channels_does_not(how: str) -> None:
    error, sites, _ = quantized(ALIKE[how])
    assert error < EXACT
    assert any(f"space of {WIDTH}" in site for site in sites)


def test_rows__copies_side_by_side_keep_their_own_rows() -> None:
    """Two tokens in one row are two copies; half of one beside half of the other is none."""

    class Merged(nn.Module):
        def __init__(self, crossed: bool) -> None:
            super().__init__()
            self.crossed, self.embed, self.out = crossed, nn.Embedding(VOCAB, WIDTH), nn.Linear(2 * WIDTH, VOCAB)

        def forward(self, input_ids: Tensor) -> Tensor:
            x = self.embed(input_ids).reshape(len(input_ids), -1, 4, HALF)
            return self.out((x[:, :, [0, 3, 2, 1]] if self.crossed else x).flatten(-2))

    for crossed in (False, True):
        spaces = Spaces.of(record(randomise(Merged(crossed)), ids()))
        (space,) = (s for s in spaces if any(t.fqn == "embed.weight" for t in s.touches))
        assert space.width == WIDTH
        assert [why for _, why in space.pins] == ([APART] if crossed else [])


def halves_summed(x: Tensor) -> Tensor:
    halves = x.unflatten(-1, (2, HALF))
    return (halves + 1.5 * halves.mean(-2, keepdim=True)).flatten(-2)


CROSSED: dict[str, Middle] = {
    "moved": lambda x: halves_summed(x)[..., torch.arange(WIDTH).roll(HALF // 2)],
    "added": lambda x: halves_summed(x) + x[..., [HALF, *range(1, HALF), 0, *range(HALF + 1, WIDTH)]],
}


@pytest.mark.parametrize("how", CROSSED)
def test_rows__copies_that_one_operation_writes_are_told_apart(how: str) -> None:
    assert quantized(CROSSED[how])[0] < EXACT
    error, sites, _ = quantized(halves_summed)
    assert error < EXACT
    assert any(f"space of {HALF}" in site for site in sites)


def test_rows__a_table_of_positions_has_rows_too() -> None:
    class Positions(Stream):
        def __init__(self, shift: int) -> None:
            self.shift = shift
            super().__init__(lambda x: x)
            self.table = nn.Parameter(torch.randn(6, WIDTH))

        def forward(self, input_ids: Tensor) -> Tensor:
            self.middle = lambda x: x + beside(self.table[:, :HALF].roll(self.shift, 0), self.table[:, HALF:])
            return super().forward(input_ids)

    for shift in (0, 1):
        model = randomise(Positions(shift)).double()
        expected = output_of(model, ids())
        report = mmqc.quantize_(model, mmqc.recipes.rotate(), [ids()], progress=False)
        assert relative_error(output_of(model, ids()), expected) < EXACT
        assert any(APART in r.reason for r in report.refused) == bool(shift)
