"""What is kept of a linear's input: ranges and percentiles by modality, scales, and a weighted second moment."""

import pytest
import torch

from mmqc.calibration import moments
from mmqc.calibration.calibrate import MIXED, TEXT, VISUAL, InputStatistics, Observer, Range, Watch, by_modality, weighted
from mmqc.config import ActivationSpec
from mmqc.nn.modality import ModalityContext


def context(visual: list[list[int]]) -> ModalityContext:
    made = ModalityContext()
    made.visual = torch.tensor(visual).bool()
    return made


def test_by_modality__splits_the_rows_of_the_call() -> None:
    x = torch.arange(12.0).reshape(1, 4, 3)
    parts = by_modality(x, True, context([[0, 1, 1, 0]]))
    assert {name: rows[:, 0].tolist() for name, rows in parts.items()} == {VISUAL: [3, 6], TEXT: [0, 9]}
    assert list(by_modality(x, False, None)) == [VISUAL], "towers are visual throughout"
    assert list(by_modality(x, True, None)) == [TEXT]
    assert list(by_modality(x[:, :3], True, context([[0, 1, 1, 0]]))) == [MIXED], "rows that are not the call's tokens"


def test_weighted__all_rows_at_once_where_weights_are_equal() -> None:
    x = torch.randn(4, 3)
    parts = {TEXT: x[:1], VISUAL: x[1:]}
    ((weight, rows),) = weighted(parts, {TEXT: 2.0, VISUAL: 2.0}, x)
    assert weight == 2.0
    assert rows is x
    assert [w for w, _ in weighted(parts, {VISUAL: 3.0}, x)] == [1.0, 3.0]


def test_range__scales_of_ends_and_of_a_percentile() -> None:
    seen = Range()
    x = torch.cat((torch.linspace(-1, 1, 20_001), torch.tensor([-50.0, 99.0])))
    for part in (x[:7], x[7:], x[:0]):
        seen.update(part, True)
    seen.settle()
    assert (seen.low, seen.high, seen.count) == (-50.0, 99.0, len(x))
    assert seen.scale(ActivationSpec()) == pytest.approx(99 / 127)
    assert seen.scale(ActivationSpec(type="float")) == pytest.approx(99 / 448)
    half = seen.scale(ActivationSpec(observer="percentile", percentile=0.5)) * 127
    assert 0.5 <= half < 0.5 * 2 ** (2 / 64), "the upper end of a bin, 64 of which are an octave"
    assert Range().scale(ActivationSpec()) == 1.0


def test_observer__ranges_and_scales_by_modality() -> None:
    spec, x = ActivationSpec(per_modality=True), torch.tensor([[[1.0, -2.0], [8.0, 4.0], [1.0, 9.0]]])
    observer = Observer(Watch(True, spec, False, skip=torch.tensor([1])), context([[0, 1, 0]]))
    observer.update(x)
    seen = observer.seen.finish()
    assert {n: (r.low, r.high) for n, r in seen.ranges.items() if r.count} == {TEXT: (0.0, 1.0), VISUAL: (0.0, 8.0)}
    assert seen.scales(spec, True) == pytest.approx([1 / 127, 8 / 127])
    assert seen.scales(ActivationSpec(), True) == pytest.approx([8 / 127])
    assert seen.hessian is None
    assert InputStatistics().scales(spec, True) is None


def test_observer__weights_the_second_moment_by_modality() -> None:
    x = torch.randn(2, 3, 3)
    context = ModalityContext()
    context.visual = torch.tensor([[True, False, True], [False, False, True]])
    weights = {TEXT: 0.25, VISUAL: 4.0, MIXED: 1.0}
    observer = Observer(Watch(True, None, True, row_weights=weights), context)
    observer.update(x)
    seen = observer.seen.finish()
    flat, visual = x.reshape(-1, 3).double(), context.visual.reshape(-1)
    factor = torch.where(visual, 4.0, 0.25).double()[:, None]
    assert seen.hessian is not None
    exact = (flat * factor).T @ flat
    assert float((seen.hessian - exact).norm() / exact.norm()) < 2**-21  # one chunk of rows, as in test_moments.py
    assert (seen.rows, dict(seen.row_weights)) == (6, weights)


def test_observer__equal_weights_do_not_split_the_rows() -> None:
    x = torch.randn(6, 3)
    seen, whole = InputStatistics(), moments.mirror_(moments.add_second_moment(None, x))
    seen.add_moment({VISUAL: x[:2], TEXT: x[2:]}, x)
    assert torch.equal(seen.finish().hessian, whole)  # type: ignore[arg-type]


def test_observer__pairs_rows_with_the_floating_point_models() -> None:
    g = torch.Generator().manual_seed(0)
    y, x = (torch.randn(1, 4, 3, generator=g) for _ in range(2))
    watch = Watch(True, None, True, skip=torch.tensor([1]), row_weights={TEXT: 2.0, VISUAL: 0.5})
    observer = Observer(watch, context([[0, 1, 1, 0]]), paired=True)
    for part in (x.clone(), 2 * x):
        observer.expect(part)
        part.zero_()
    for part in (y, 2 * y):
        observer.update(part)
    weights = torch.tensor([2.0, 0.5, 0.5, 2.0], dtype=torch.float64)[:, None]
    kept, error = y[0].double().clone(), (x - y)[0].double()
    kept[:, 1] = 0
    expected = 5 * error.T @ (weights * kept)
    assert observer.seen.paired
    assert observer.seen.drift is not None
    assert float((observer.seen.drift - expected).norm() / expected.norm()) < 1e-6
    assert not observer.seen.drift[:, 1].any()


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (torch.ones(1, 3, 3), torch.ones(1, 4, 3)),  # other rows
        (None, torch.ones(1, 4, 3)),  # one call more
        (torch.ones(2, 3), torch.ones(2, 3)),  # rows that are not the call's tokens
    ],
)
def test_observer__rows_that_may_be_other_tokens_are_not_compared(x: torch.Tensor | None, y: torch.Tensor) -> None:
    observer = Observer(Watch(True, None, True), context([[0, 1, 1, 0]]), paired=True)
    for part in (torch.ones(1, 4, 3), x):
        if part is not None:
            observer.expect(part)
    observer.update(torch.zeros(1, 4, 3))
    assert observer.seen.drift is not None
    observer.update(y)
    assert not observer.seen.paired
    assert observer.seen.drift is None
    observer.expect(torch.ones(1, 4, 3))
    observer.update(torch.zeros(1, 4, 3))
    assert observer.seen.drift is None, "a part of the rows is no drift"
    assert observer.seen.rows == 4 + y.numel() // 3 + 4, "their second moment is whole"
