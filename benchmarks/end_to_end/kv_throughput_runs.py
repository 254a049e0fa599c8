"""Throughput of decoding under memory budgets, by bits of the cache: the paper's Figure 3 (CalibQuant, arXiv:2502.14882).

budget   cache and activations: the device's peak less the weights; without an accelerator, the cache's tensors alone
batch    the largest that fits: memory is linear in the batch, so a few probes say it; a run that is over is run again, smaller
steps    some of the tokens to come, about their middle, stand for all of them: a step costs what its length makes it cost

ways     dynamic   transformers' default, eager (16 bits alone)        eager   a static cache, eager
compiled  the step compiled as a whole, in a CUDA graph       graph   the eager step in a CUDA graph: nothing to wait for
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.end_to_end.kv_throughput_model import Shape, cache_bytes, decoder, filled

GB = 1e9
WAYS = ("dynamic", "eager", "compiled", "graph")
PROBES = (2, 6)
WARM = 3


@dataclass(frozen=True)
class Settings:
    """What to measure; memory in GB of 10^9 bytes."""

    bits: tuple[int, ...] = (16, 8, 4, 2, 1)
    budgets: tuple[float, ...] = (5, 10, 15, 20, 25, 30)
    visual: int = 8192
    text: int = 64
    tokens: int = 500
    steps: int = 64
    ways: tuple[str, ...] = ("compiled",)
    largest: int = 4096
    seconds: float = math.inf

    def __post_init__(self) -> None:
        wrong = [w for w in self.ways if w not in WAYS]
        if wrong or not self.ways:
            raise ValueError(f"ways = {list(self.ways)}: some of {', '.join(WAYS)}")
        if not set(self.bits) <= {16, 8, 4, 2, 1} or not self.bits:
            raise ValueError(f"bits = {list(self.bits)}: some of 16, 8, 4, 2, 1")
        if min(self.visual, self.tokens, self.steps, self.largest) < 1 or self.text < 0 or min(self.budgets, default=0) <= 0:
            raise ValueError("budgets, visual tokens, tokens, steps and the largest batch are positive")

    @property
    def cases(self) -> list[tuple[int, str]]:
        """(bits, way): the baseline in all ways, packed caches in the fast ones, if there are any; what is compiled comes last."""
        fast = [w for w in self.ways if w in ("compiled", "graph")] or ["eager"]
        cases = [(b, w) for b in self.bits for w in (self.ways if b == 16 else fast)]
        return sorted(cases, key=lambda case: case[1] == "compiled")


@dataclass
class Row:
    """One measurement; ``why`` says what went wrong, if something did."""

    bits: int
    way: str
    budget: float
    batch: int = 0
    memory: float = math.nan
    step: float = math.nan
    throughput: float = math.nan
    cache: float = math.nan
    why: str = ""


class Bench:
    """A decoder on a device, and how to time a step of it.

    Args:
        shape: of the decoder.
        settings: what to measure.
        device: where.
    """

    def __init__(self, shape: Shape, settings: Settings, device: torch.device) -> None:
        self.settings, self.device, self.start = settings, device, time.perf_counter()
        s = settings
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model = decoder(shape, device, dtype, s.visual + s.text + s.tokens + WARM + 2)
        self.weights = self.allocated()
        self.lines: dict[tuple[int, str], tuple[float, float]] = {}

    def allocated(self) -> float:
        """GB in use."""
        return torch.cuda.memory_allocated(self.device) / GB if self.device.type == "cuda" else 0.0

    def rows(self, done: Callable[[], Any] = int) -> Iterator[Row]:
        """Every case and budget, the largest budget first; ``done`` is called after each."""
        for bits, way in self.settings.cases:
            for budget in sorted(self.settings.budgets, reverse=True):
                row = Row(bits, way, budget)
                if time.perf_counter() - self.start > self.settings.seconds:
                    row.why = "no time left"
                else:
                    try:
                        self.measure(row)
                    except (RuntimeError, NotImplementedError, ValueError) as error:  # the next row may do better
                        row.why = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                self.clear()
                done()
                yield row

    def measure(self, row: Row) -> None:
        """Fill in the row."""
        fixed, each = self.line(row.bits, row.way)
        row.batch = min(self.settings.largest, int((row.budget - fixed) / each))
        for _ in range(3):
            if row.batch < 1:
                row.why = f"one sequence takes {fixed + each:.2f} GB"
                return
            row.step, row.memory, row.cache = self.run(row.bits, row.way, row.batch, self.settings.steps)
            if row.memory <= row.budget:
                row.throughput = row.batch / row.step
                return
            self.clear()
            row.batch = min(row.batch - 1, int(row.batch * row.budget / row.memory))
        row.why = f"{row.memory:.2f} GB"

    def line(self, bits: int, way: str) -> tuple[float, float]:
        """GB of a run without sequences, and of each sequence; probed eagerly."""
        kind = "dynamic" if way == "dynamic" else "eager"
        if (bits, kind) not in self.lines:
            (m, a), (n, b) = ((batch, self.run(bits, kind, batch, 1)[1]) for batch in PROBES)
            each = (b - a) / (n - m)
            most = min(self.settings.largest, int(n + (max(self.settings.budgets) - b) / each))
            if most > 2 * n:  # what kernels set aside for few sequences says little of many
                each = (self.run(bits, kind, most, 1)[1] - b) / (most - n)
            self.lines[(bits, kind)] = b - each * n, each
        return self.lines[(bits, kind)]

    @torch.no_grad()
    def run(self, bits: int, way: str, batch: int, steps: int) -> tuple[float, float, float]:
        """Seconds a step, peak GB of cache and activations, and GB of the cache."""
        s = self.settings
        steps = min(steps, s.tokens)
        before = (s.tokens - steps) // 2  # the measured ones lie in the middle
        cache = filled(self.model, bits, batch, s.visual, s.text + before, s.tokens - before + WARM + 2, dynamic=way == "dynamic")
        size = cache_bytes(cache) / GB
        tokens = torch.zeros(batch, 1, dtype=torch.int64, device=self.device)
        position = torch.full((batch, 1), s.visual + s.text + before, device=self.device)
        self.reset_peak()
        call = self.prepared(way, tokens, position, cache)
        for _ in range(WARM):
            call()
        self.wait()
        start = time.perf_counter()
        for _ in range(steps):
            call()
        self.wait()
        seconds = (time.perf_counter() - start) / steps
        return seconds, self.peak(size), size

    def prepared(self, way: str, tokens: Tensor, position: Tensor, cache: Any) -> Callable[[], object]:
        """One step: the next token of every sequence, greedily."""

        def forward(tokens: Tensor, position: Tensor) -> Tensor:
            out = self.model(input_ids=tokens, position_ids=position, past_key_values=cache, use_cache=True)
            return out.logits[:, -1].argmax(-1, keepdim=True)

        if way == "compiled":
            torch.compiler.reset()
            options: Any = {"triton.cudagraphs": True} if self.device.type == "cuda" else {}
            forward = torch.compile(forward, fullgraph=True, dynamic=False, options=options)

        def step() -> None:
            tokens.copy_(forward(tokens, position))
            position.add_(1)

        return self.captured(step) if way == "graph" else step

    def captured(self, step: Callable[[], None]) -> Callable[[], None]:
        """The step as one launch."""
        if self.device.type != "cuda":
            raise ValueError("way = 'graph': CUDA graphs need a CUDA device")
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return graph.replay

    def wait(self) -> None:
        """Until the device has done all it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def reset_peak(self) -> None:
        """Forget what filling the cache took."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self, cache: float) -> float:
        """GB beside the weights."""
        if self.device.type != "cuda":
            return cache
        return torch.cuda.max_memory_allocated(self.device) / GB - self.weights

    def clear(self) -> None:
        """Let go of the last run's graphs and cache."""
        torch.compiler.reset()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def summary(settings: Settings, shape: Shape, rows: list[Row], device: str) -> dict[str, Any]:
    """Everything as plain data."""
    import transformers

    return {
        "device": device,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "shape": asdict(shape),
        "settings": {**asdict(settings), "seconds": None if math.isinf(settings.seconds) else settings.seconds},
        "memory": "peak of the device less the weights" if device != "cpu" else "tensors of the cache",
        "rows": [{k: None if v != v else v for k, v in asdict(row).items()} for row in rows],
        "over_16_bits": ratios(rows),
    }


def ratios(rows: list[Row]) -> dict[str, float]:
    """By what factor packed caches are faster than each way of the plain one, at the same budget."""
    plain = {(r.way, r.budget): r.throughput for r in rows if r.bits == 16 and r.throughput > 0}
    return {
        f"{r.bits} bits {r.way} over {way}, {budget:g} GB": r.throughput / base
        for r in rows
        for (way, budget), base in plain.items()
        if r.bits < 16 and r.budget == budget and r.throughput > 0
    }
