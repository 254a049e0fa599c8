"""A model at work: the modes, hooks and devices that one ``quantize_`` needs, all of them as they were afterwards."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from mmqc.calibration.blocks import block_lists
from mmqc.calibration.generated import with_generated
from mmqc.calibration.residency import Residency
from mmqc.checkpoint.linear_like import looks_linear
from mmqc.distributed.ranks import ALONE, Ranks
from mmqc.kv import scores
from mmqc.nn.eval_mode import evaluating
from mmqc.nn.modality import visual_token_ids
from mmqc.nn.uncompiled import uncompiled
from mmqc.quantization.convert import Journal, size_of
from mmqc.quantization.progress import Progress, explained
from mmqc.quantization.request import Batch, Request
from mmqc.quantization.resume import Store, fingerprint
from mmqc.quantization.same_request import check_device, check_same
from mmqc.quantization.untouched import untouched

COMPARED = 4


@dataclass(frozen=True, eq=False)
class Job:
    """What the phases of one ``quantize_`` share.

    Attributes:
        request: what was asked for.
        batches: those of the request, continued by the model itself if it asks for that.
        journal: every edit of the model goes through it.
        bar: is told what is being done.
        residency: where blocks run.
        store: keeps finished units, if they are kept.
        size: bytes of the model before.
        seen: by the model's attention before anything changed, if the cache is to be packed.
        ranks: the processes that share the batches and the linears.
    """

    request: Request
    batches: tuple[Batch, ...]
    journal: Journal
    bar: Progress
    residency: Residency
    store: Store | None
    size: int
    seen: scores.Seen | None
    ranks: Ranks = ALONE

    @property
    def model(self) -> nn.Module:
        """The model that is quantized."""
        return self.request.model

    def place(self, batch: Batch) -> dict[str, Any]:
        """A batch on the device that computes; where only the cache is packed, as it was given."""
        return self.residency.batch(dict(batch)) if self.request.records else dict(batch)

    def call(self, batch: Batch) -> dict[str, Any]:
        """A batch as keyword arguments of one whole forward."""
        batch = self.place(batch)
        return {**batch, "use_cache": False} if takes_cache(self.model) else batch

    def forward(self, batch: Batch) -> Any:
        """One whole forward."""
        return self.model(**self.call(batch))

    def forwards(self, batches: Iterable[Batch]) -> list[Callable[[], Any]]:
        """Whole forwards, one a batch."""
        return [functools.partial(self.forward, batch) for batch in batches]

    def differing(self) -> list[Batch]:
        """The first batch, and the one that differs from it most in what it holds and in its shapes."""
        first = self.batches[0]
        other = max(self.batches, key=lambda batch: _difference(first, batch))
        return [first] if _difference(first, other) == 0 else [first, other]

    def compared(self) -> list[Batch]:
        """Up to ``COMPARED`` batches, those that are recorded first: the rewritten model has to answer them as before."""
        others = [batch for batch in self.batches if not any(batch is known for known in self.differing())]
        wanted = max(0, COMPARED - len(self.differing()))
        return [*self.differing(), *others[:: max(1, len(others) // max(1, wanted))][:wanted]]


@contextmanager
def working(request: Request, ranks: Ranks = ALONE) -> Iterator[Job]:
    """The job of a request; what an error leaves behind is the model as it was."""
    check_same(request, ranks)
    model, batches, journal = request.model, request.batches or (), Journal(request.model)
    size = size_of(model) if request.changes_weights else 0
    with ExitStack() as stack:
        stack.enter_context(uncompiled(model))
        if batches:
            stack.enter_context(untouched(model, journal.buffers))
        seen = scores.observe(model, batches) if request.kv is not None else None
        if batches:
            stack.enter_context(evaluating(model))
        if not request.records:
            bar = stack.enter_context(Progress(False))
            job = Job(request, batches, stack.enter_context(journal), bar, Residency(model), None, size, seen, ranks)
            with _telling(ranks):
                yield job
            return
        bar = stack.enter_context(Progress(request.progress and ranks.first, request.device or next(model.parameters()).device))
        stack.enter_context(explained(bar))
        store = _store(request, ranks)
        linears = [name for name, module in model.named_modules() if looks_linear(module)]
        blocks = [child for children in block_lists(model, linears).values() for child in children]
        residency = stack.enter_context(Residency(model, blocks, request.device))
        check_device(residency.device, ranks)
        if request.generate_tokens:
            bar.say("generating")
            ids, count = visual_token_ids(model), request.generate_tokens
            mine = [with_generated(model, residency.batch(dict(b)), count, ids) for b in ranks.mine(batches)]
            batches = tuple(ranks.collected(mine))
        job = Job(request, batches, stack.enter_context(journal), bar, residency, store, size, seen, ranks)
        with _telling(ranks):
            yield job


@contextmanager
def _telling(ranks: Ranks) -> Iterator[None]:
    """The others learn of an error before the model is taken back, which takes a while."""
    try:
        yield
    except BaseException as error:
        ranks.tell(error)
        raise


def _store(request: Request, ranks: Ranks) -> Store | None:
    """Where finished units are kept, if anywhere."""
    if request.resume_dir is None:
        return None
    asked = (request.inputs, request.generate_tokens, [dict(weights) for weights in request.row_weights])
    digests = lambda: fingerprint(request.model, request.config.to_dict(), request.batches or (), asked)  # noqa: E731
    return Store(request.resume_dir, digests, ranks)


def takes_cache(model: nn.Module) -> bool:
    """Whether the model's forward knows ``use_cache``."""
    parameters = inspect.signature(model.forward).parameters
    return "use_cache" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _difference(a: Batch, b: Batch) -> int:
    """How many of two batches' tensors are in one only, or have other shapes; equal-shaped values count nothing."""
    shapes = [{n: tuple(v.shape) for n, v in batch.items() if isinstance(v, Tensor)} for batch in (a, b)]
    return 100 * len(set(shapes[0]) ^ set(shapes[1])) + sum(shapes[0][n] != shapes[1].get(n) for n in shapes[0])
