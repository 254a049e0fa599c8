"""The largest magnitude of every channel, and SmoothQuant's and QUIK's use of it."""

from typing import Any

import torch
from float64 import EXACT, Float64, output_of, passed, recorded, relative_error, replayed, to_float64
from small_vlm import Small, batches
from torch import Tensor, nn

from mmqc.graph.linear import weight_of
from mmqc.pipeline import exact_passes
from mmqc.quantization.channel_peaks import Peak, channel_peaks, mark_outliers, smooth
from mmqc.recipes import quik, smoothquant


def test_peak__is_the_maximum_over_all_rows() -> None:
    peak = Peak()
    for x in (torch.tensor([[1.0, -2.0]]), torch.zeros(0, 2), torch.tensor([[[-3.0, 1.0], [0.0, 0.0]]])):
        peak.update(x)
    assert peak.value is not None
    assert peak.value.tolist() == [3.0, 2.0]


def inputs(model: nn.Module, data: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The largest |x| of every linear's input channels."""
    seen: dict[str, list[Tensor]] = {}
    linears = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    take = lambda name, x: seen.setdefault(name, []).append(x.flatten(0, -2))  # noqa: E731
    handles = [m.register_forward_pre_hook(lambda m, a, n=n: take(n, a[0])) for n, m in linears]
    with torch.no_grad():
        for batch in data:
            model(**batch)
    for handle in handles:
        handle.remove()
    return {f"{n}.weight": torch.cat(x).abs().amax(0).double() for n, x in seen.items()}


def test_channel_peaks__over_all_batches_without_what_no_row_reached() -> None:
    model, data = Small().eval(), batches()
    expected = inputs(model, data)
    model.unused = nn.Linear(3, 3)
    found = channel_peaks(model, [*expected, "unused.weight"], lambda: data)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[n], x) for n, x in expected.items())
    assert not any(m._forward_pre_hooks for m in model.modules())


def prepared(config: Any) -> tuple[nn.Module, dict[str, Tensor], Any]:
    model, batch = to_float64(Small().eval(), batches()[0])
    prog = recorded(model, batch)
    passed(prog, exact_passes(config))
    return model, batch, prog


def test_mark_outliers__the_channels_of_the_largest_peaks() -> None:
    model, batch, prog = prepared(quik())
    expected = inputs(model, [batch])
    mark_outliers(model, prog, lambda: [batch])
    marked = {weight_of(n): n.meta["high"] for n in prog.nodes("linear") if "high" in n.meta}
    assert marked
    for fqn, high in marked.items():
        rest = torch.ones(len(expected[fqn]), dtype=torch.bool).index_fill(0, high, False)
        assert torch.equal(high, high.sort()[0])
        assert expected[fqn][high].min() >= expected[fqn][rest].max()


def test_smooth__moves_the_peaks_and_keeps_the_function() -> None:
    model, batch, prog = prepared(smoothquant())
    expected = output_of(model, batch)
    before = {weight_of(n): prog.value(weight_of(n)).clone() for n in prog.nodes("linear")}
    with Float64():
        smooth(model, prog, 0.5, lambda: [batch])
    assert any(not torch.equal(prog.value(f), w) for f, w in before.items())
    assert relative_error(replayed(prog), expected) < EXACT
