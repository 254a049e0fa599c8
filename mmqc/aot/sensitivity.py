"""How far a model's outputs move where all in it moves by a rounding error: what another order of the same sums may do to it.

    moved(f, batch, model)  =  max over draws of |f'(x') - f(x)| / |f(x)|        x' = x (1 + ε), and so what modules return
    moved_row               the same of the row of logits that moves the most: a token's
    bound, within           as far as two forms of the model may be apart

A model in half precision is rounded at every operation, and one that rounds activations moves by steps: a code on the other side
of a tie may be a percent of the logits in 8 bits, tens of percent in 4 (docs/explanation/export.md), and more of one token's.  A
program whose sums are in another order, or whose attention is another kernel, cannot be nearer to the model than that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

DRAWS = 4
FLOAT32 = 2e-6  # a long sum's error; types with less have units of the last place
PART = 0.25  # of the unit: the deviation of ε (a rounding error's is 0.14 to 0.29 of one, a difference of two has twice the square)
ROUNDED = 3e-2  # of half precision: another order of the same sums; one flipped code of a quantized model
MOVES, MOST = 2, 0.5  # of what it moves by itself; beyond, nothing would be compared

Outputs = Callable[..., Tensor | Sequence[Tensor]]


def relative_error(got: Tensor, expected: Tensor) -> float:
    """|got - expected| / |expected|, over ordinary entries; infinite ones and the largest of the dtype (masks) must agree."""
    largest = torch.finfo(expected.dtype).max
    finite = expected.abs() < largest
    if not torch.equal(finite, got.abs() < largest):
        return float("inf")
    a, b = got[finite].double(), expected[finite].double()
    return float((a - b).norm() / b.norm().clamp(min=torch.finfo(torch.float64).tiny))


def within(moves: float) -> float:
    """As far as two forms of a model that moves so far may be apart."""
    return max(ROUNDED, min(MOST, MOVES * moves))


def bound(
    dtype: torch.dtype, exact: Mapping[torch.dtype, float], moves: Callable[[], float], *, rounds: bool, on_cpu: bool
) -> float:
    """The largest relative error that a comparison admits.

    Args:
        dtype: of the outputs.
        exact: errors of sums in other orders, by the types that hold them.
        moves: how far the model moves by itself; asked where that decides.
        rounds: whether the model rounds activations.
        on_cpu: whether sums are in the model's own order, so that few codes of such a model flip.
    """
    if dtype in exact and not rounds:
        return exact[dtype]
    return ROUNDED if dtype in exact and on_cpu else within(moves())


def moved(outputs: Outputs, batch: Mapping[str, Tensor], model: nn.Module | None = None) -> float:
    """The largest relative movement of an output over ``DRAWS`` draws, which are the same every time.

    Args:
        outputs: takes the batch by keyword; what it returns moves.
        batch: its floats move, but for masks; its tensors are not changed.
        model: what its modules return moves too, where these have no others in them; ``outputs`` calls it.
    """
    return max((relative_error(*pair) for pair in _moves(outputs, batch, model)), default=0.0)


def moved_row(outputs: Outputs, batch: Mapping[str, Tensor], model: nn.Module | None = None) -> float:
    """As ``moved``, of single rows of what ``outputs`` returns, [..., V]."""
    pairs = ([t.flatten(0, -2) for t in pair] for pair in _moves(outputs, batch, model))
    return max((relative_error(*rows) for pair in pairs for rows in zip(*pair, strict=True)), default=0.0)


@torch.no_grad()
def _moves(outputs: Outputs, batch: Mapping[str, Tensor], model: nn.Module | None) -> Iterator[tuple[Tensor, Tensor]]:
    rounding, expected = _Rounding(), _several(outputs(**batch))
    for _ in range(DRAWS):
        near: dict[str, Any] = {n: x if "mask" in n else rounding.of(x) for n, x in batch.items()}
        with rounding.inside(model):
            found = _several(outputs(**near))
        yield from zip(found, expected, strict=True)


def _several(found: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else list(found)


class _Rounding:
    """Rounding errors, drawn where the tensors are; the same ones in the same order every time."""

    def __init__(self) -> None:
        self.generators: dict[torch.device, torch.Generator] = {}

    def of(self, x: Any) -> Any:
        """A tensor of floats times 1 + ε; all else as it is."""
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        if x.device not in self.generators:
            self.generators[x.device] = torch.Generator(x.device).manual_seed(0)
        noise = torch.randn(x.shape, generator=self.generators[x.device], device=x.device)
        return (x * (1 + PART * max(FLOAT32, torch.finfo(x.dtype).eps) * noise)).to(x.dtype)

    @contextmanager
    def inside(self, model: nn.Module | None) -> Iterator[None]:
        """What modules without others in them return has such errors."""
        leaves = [] if model is None else [m for m in model.modules() if not any(True for _ in m.children())]
        hooks = [m.register_forward_hook(lambda module, args, found: self.of(found)) for m in leaves]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
