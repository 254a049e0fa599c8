"""Which row of the table of index functions a model's own function follows, with which numbers: tried, and verified.

    function(inputs) of the model  =  candidate(grid, P, **numbers)     on every given batch and on drawn inputs

No function is known by its name.  A candidate may be any that has the right number of results, its numbers those that the
model's call was given or small ones, and the inputs that it reads any of the right shape.  What equals the model's function on
all cases is kept; if nothing does, the error says how the nearest candidate differs.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mmqc.aot.index_draw import Inputs, draw_grids, draw_tokens
from mmqc.aot.index_ops import BOUND, CANDIDATES, ENDS, Candidate
from mmqc.errors import MmqcError
from mmqc.front.handover import ValueSite
from mmqc.front.provenance import leaves

CLOSE = 1e-6  # of weights in [-1, 1], computed in float32 by the same formula
ALL = 9.0  # further away than any tensor of another shape
FEW = 3  # given batches that are enough where the model's function refuses drawn inputs
WRONG = "the grid does not add up to the number of patches"

logger = logging.getLogger(__name__)

Lengths = Mapping[str, tuple[str, int]]


class ExportError(MmqcError, RuntimeError):
    """A model cannot be exported with dynamic shapes; says what stands in the way.

    Attributes:
        reasons: one line for each function that no candidate follows, or for the step that failed.
    """

    def __init__(self, reasons: Sequence[str]) -> None:
        self.reasons = list(reasons)
        super().__init__("not exported:\n" + "\n".join(f"  {r}" for r in reasons))


@dataclass(frozen=True)
class Reading:
    """A candidate with the inputs that it reads and its numbers.

    Attributes:
        candidate: row of the table.
        grids: inputs with grids, by the type of the tokens that belong to them (0: patches only).
        types: input with the type of each token.
        mask: input that is 0 at padding.
        numbers: further arguments of the candidate.
        forms: of each result of the model: the type of a tensor, int for a number, None where there is none.
        single: whether the model returns one result rather than a tuple.
        lengths: where the number of patches of a grid can be read: input and axis.
    """

    candidate: Candidate
    grids: tuple[tuple[int, str], ...]
    types: str | None
    mask: str | None
    numbers: tuple[tuple[str, Any], ...]
    forms: tuple[Any, ...] = ()
    single: bool = False
    lengths: Lengths | None = None

    @property
    def roles(self) -> tuple[Any, ...]:
        """The inputs that it reads, and as what."""
        return self.grids, self.types, self.mask

    def results(self, inputs: Inputs, patches: int | None = None) -> tuple[Any, ...]:
        """What the candidate computes; for ``patches`` in all, if not those of the input that ``lengths`` names."""
        numbers = dict(self.numbers)
        if self.types is not None:
            mask = None if self.mask is None else inputs[self.mask]
            grids = {kind: inputs[name] for kind, name in self.grids}
            results = self.candidate.function(inputs[self.types], mask, grids, **numbers)
        else:
            name = self.grids[0][1]
            grid = inputs[name]
            if patches is None:
                source, axis = (self.lengths or {})[name]
                patches = inputs[source].shape[axis]
                torch._assert_async((grid.prod(-1).sum() == patches), WRONG)
            results = self.candidate.function(grid, patches, **numbers)
        return results if isinstance(results, tuple) else (results,)

    def compute(self, inputs: Inputs) -> Any:
        """What stands for the model's results, in their form."""
        results = [_as(form, r) for form, r in zip(self.forms, self.results(inputs), strict=True)]
        return results[0] if self.single else tuple(results)

    def __str__(self) -> str:
        given = [*(name for _, name in self.grids), *filter(None, (self.types, self.mask))]
        return f"{self.candidate.function.__name__}({', '.join([*given, *(f'{k}={v}' for k, v in self.numbers)])})"


@dataclass(frozen=True)
class Case:
    """Inputs of a function, what it computes from them, and whether they were drawn."""

    inputs: Inputs
    expected: tuple[Any, ...]
    drawn: bool


class Search:
    """The search for one call of one function of a model.

    Args:
        site: the function, with this call alone.
        batches: the given inputs.
        lengths: see ``Reading``.
    """

    def __init__(self, site: ValueSite, batches: Sequence[Inputs], lengths: Lengths) -> None:
        self.site, self.batches, self.lengths = site, batches, lengths
        self.names = sorted({leaf.name for leaf in leaves(site.calls[0])})
        self.given = [self.case(batch, False) for batch in batches]
        self.drawn: dict[Any, list[Case]] = {}
        self.nearest: tuple[int, float, str] = (-1, 0.0, "no candidate reads inputs of these shapes")

    def case(self, inputs: Inputs, drawn: bool) -> Case:
        """What the model computes."""
        result = self.site.compute(inputs)[0]
        return Case(inputs, result if isinstance(result, tuple) else (result,), drawn)

    def find(self) -> Reading:
        """The reading that equals the function on all cases; the first one, should there be several."""
        for reading in self.readings():
            if len(reading.candidate.results) == len(self.given[0].expected) and self.agrees(reading):
                drawn = len(self.drawn[reading.roles])
                if not drawn and len(self.given) < FEW:
                    raise ExportError([f"{self}: {reading} equals it, but on {len(self.given)} cases only"])
                logger.info("%s: %s on %d given and %d drawn cases", self, reading, len(self.given), drawn)
                expected = self.site.compute(self.batches[0])[0]
                forms = tuple(_form(r) for r in self.given[0].expected)
                return replace(reading, forms=forms, single=not isinstance(expected, tuple), lengths=self.lengths)
        raise ExportError([f"{self}: no index function equals it; {self.nearest[-1]}"])

    def __str__(self) -> str:
        owner = self.site.owner
        where = type(owner).__name__ if isinstance(owner, nn.Module) else self.site.function.__module__
        shapes = ", ".join(f"{n} {tuple(self.batches[0][n].shape)}" for n in self.names)
        return f"{self.site.name} of {where}({shapes})"

    def agrees(self, reading: Reading) -> bool:
        """Whether the reading equals the function on given and drawn cases; the nearest miss is noted."""
        for passed, case in enumerate(itertools.chain(self.given, self.draw(reading))):
            try:
                patches = int(case.inputs[reading.grids[0][1]].prod(-1).sum())
                wrong, reason = difference(reading.candidate.results, reading.results(case.inputs, patches), case.expected)
            except Exception as error:
                wrong, reason = ALL, f"raises {type(error).__name__}: {error}"
            if reason:
                where = {name: case.inputs[name].tolist() for _, name in reading.grids}
                reason = f"nearest is {reading}, which for {where} {reason}"
                self.nearest = max(self.nearest, (passed, -wrong, reason), key=lambda miss: miss[:2])
                return False
        return True

    def draw(self, reading: Reading) -> Iterator[Case]:
        """Drawn cases; those that the model's function refuses are left out."""
        if reading.roles not in self.drawn:
            grids = dict(reading.grids)
            if reading.types is None:
                drawn = draw_grids(self.names[0], self.batches)
            else:
                others = [n for n in self.names if n not in (*grids.values(), reading.types, reading.mask)]
                drawn = draw_tokens(reading.types, reading.mask, others, grids, self.batches)
            self.drawn[reading.roles] = []
            for inputs in drawn:
                try:
                    self.drawn[reading.roles].append(self.case(inputs, True))
                except Exception:  # whatever the model's code says to inputs that it does not know
                    continue
        yield from self.drawn[reading.roles]

    # --- what to try --------------------------------------------------------------------------------------------------

    def readings(self) -> Iterator[Reading]:
        """Every candidate with every choice of inputs and numbers."""
        matrices = [n for n in self.names if all(b[n].dim() == 2 for b in self.batches)]
        grids = [n for n in matrices if all(b[n].shape[1] == 3 for b in self.batches)]
        tokens = [n for n in matrices if n not in grids]
        if not grids or len(matrices) < len(self.names):
            return
        for candidate in CANDIDATES:
            if candidate.of_tokens == bool(tokens):
                for roles in self.roles(grids, tokens):
                    for numbers in self.numbers(candidate):
                        yield Reading(candidate, *roles, numbers)

    def roles(self, grids: list[str], tokens: list[str]) -> Iterator[tuple[Any, str | None, str | None]]:
        """Grids by type, types, mask."""
        if not tokens:
            if len(grids) == 1 and grids[0] in self.lengths:
                yield ((0, grids[0]),), None, None
            return
        for types, mask in itertools.product(tokens, [*tokens, None]):
            if types != mask:
                for kinds in itertools.permutations((1, 2), len(grids)):
                    yield tuple(zip(kinds, grids, strict=True)), types, mask

    def numbers(self, candidate: Candidate) -> Iterator[tuple[tuple[str, Any], ...]]:
        """The numbers of the model's call first, those of the same name before all."""
        call = self.site.calls[0]
        known = [v for v in call.values() if type(v) is int]
        pools: list[list[Any]] = []
        for name, values in candidate.numbers.items():
            kind = type(values[0]) if values else int
            same = [call[name]] if type(call.get(name)) is kind else []
            pools.append(list(dict.fromkeys([*same, *(known if kind is int else []), *values])))
        for combination in itertools.product(*pools):
            yield tuple(zip(candidate.numbers, combination, strict=True))


def find_readings(site: ValueSite, batches: Sequence[Inputs], lengths: Lengths) -> list[Reading]:
    """One reading for each call of the site.

    Raises:
        ExportError: no candidate equals the model's function; names function, module, shapes and the nearest miss.
    """
    return [Search(replace(site, calls=[call]), batches, lengths).find() for call in site.calls]


def find_lengths(batches: Sequence[Inputs]) -> dict[str, tuple[str, int]]:
    """For each integer input [n, 3], the floating-point input and its axis with as many entries as the grids have patches."""
    found: dict[str, tuple[str, int]] = {}
    for name, value in batches[0].items():
        if not _is_grid(value):
            continue
        for source, tensor in batches[0].items():
            for axis in range(tensor.dim() if isinstance(tensor, Tensor) and tensor.is_floating_point() else 0):
                if all(b[source].shape[axis] == int(b[name].prod(-1).sum()) for b in batches):
                    found.setdefault(name, (source, axis))
    return found


def difference(kinds: Sequence[str], got: Sequence[Any], expected: Sequence[Any]) -> tuple[float, str]:
    """How results differ from the model's, each in the sense of its kind.

    Returns:
        The share of entries that differ, or more where shapes do, and the first difference in words; empty if there is none.
    """
    for kind, a, b in zip(kinds, got, expected, strict=True):
        if kind == BOUND:
            if b is not None and not (isinstance(b, int) and b <= a):
                return ALL, f"bounds {b} by {a}"
            continue
        if not isinstance(b, Tensor):
            return ALL, f"computes a tensor where the model has {b!r}"
        if kind == ENDS and b.dim() == 1:
            a, b = a.unique_consecutive(), b.unique_consecutive()
        if a.shape != b.shape:
            far = 1 + abs(a.dim() - b.dim()) + (a.shape[1:] != b.shape[1:])
            return far, f"has shape {tuple(a.shape)}, the model {tuple(b.shape)}"
        wrong = (a - b).abs() > CLOSE if b.is_floating_point() else a != b
        if wrong.any():
            at = tuple(wrong.nonzero()[0].tolist())
            words = f"has {a[at].item()} at {list(at)}, the model {b[at].item()}; {int(wrong.sum())} of {b.numel()} differ"
            return float(wrong.float().mean()), words
    return 0.0, ""


def _is_grid(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 2 and value.shape[1] == 3 and not value.is_floating_point()


def _form(result: Any) -> Any:
    return result.dtype if isinstance(result, Tensor) else None if result is None else int


def _as(form: Any, result: Any) -> Any:
    return result.to(form) if isinstance(form, torch.dtype) else result if form is int else None
