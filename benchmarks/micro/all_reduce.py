"""The sum over the GPUs of one host behind a linear that they share, and what follows it in a decode step, in CUDA graphs.

    python -m benchmarks.micro.all_reduce --out results.json [--seconds 300] [--ranks 2] [--rows 1 4 16 64] [--widths 3584 8192]
    TRITON_INTERPRET=1 python -m benchmarks.micro.all_reduce --dry        two processes without GPUs, by shared memory

Microseconds of one of 56 sums with buffers of their own, as a step of 28 layers has them, each followed by residual, norm and
static quantization ("norm" is these alone), and of the sums alone ("..., alone"):

    nccl            NCCL's all-reduce
    one_shot        torch's over symmetric memory, which the producer has written itself; "copied": which it has not
    two_shot        torch's, a part of the row a rank
    signal          a kernel of this file: barrier by flags, then everyone reads everyone's rows
    words           kernels/rows/all_reduce.py: numbers and flags in one word; of more than --few rows a flag each, behind them
                    (kernels/rows/all_reduce_many.py)
    fused           the same with residual, norm and quantization: one kernel (kernels/rows/all_reduce_norm_quantize.py)

``--warps`` tries other numbers of warps of the last two.  Each way is checked with fresh numbers a hundred times, in a graph, with
NaN where it writes.  A rank that fails or hangs ends all; what is known by then is in the file.
"""

# Tuples of Triton are compiled, not run.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.gpu_run import Run, facts
from mmqc.kernels.rows import all_reduce, all_reduce_norm_quantize, norm_quantize
from mmqc.kernels.rows.norm_quantize import Norm
from mmqc.kernels.shared.inboxes import SLOTS, Inboxes, inboxes, parts
from mmqc.kernels.shared.plan import Plan, Refusal
from mmqc.kernels.shared.row_scale import row_scale
from mmqc.ops.norm_quantize import reference

CALLS, ROUNDS = 56, 100
DRY_SLOTS = 3
EPS, SCALE = 1e-6, 0.02


@triton.jit
def signal_kernel(
    x_ptr, y_ptr, buffers_ptr, flags_ptr, count_ptr, D, rank, RANKS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """One row: into this rank's buffer, a flag to each of the others, and their rows once their flags are here."""
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    mask = at < D
    count = tl.load(count_ptr + row) + 1
    place = ((count & 1) * ROWS + row) * D
    x = tl.load(x_ptr + row * D + at, mask=mask, other=0.0)
    mine = tl.load(buffers_ptr + rank).to(tl.pointer_type(x_ptr.dtype.element_ty))
    tl.store(tl.multiple_of(mine, 16) + place + at, x, mask=mask)
    tl.debug_barrier()
    for peer in tl.static_range(RANKS):
        if peer != rank:
            flags = tl.load(flags_ptr + peer).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(flags + rank * ROWS + row, count, sem="release", scope="sys")
    own = tl.load(flags_ptr + rank).to(tl.pointer_type(tl.int32))
    for peer in tl.static_range(RANKS):
        if peer != rank:
            while tl.atomic_add(own + peer * ROWS + row, 0, sem="acquire", scope="sys") != count:
                pass
    tl.debug_barrier()
    total = tl.zeros((BLOCK,), tl.float32)
    for peer in tl.static_range(RANKS):
        theirs = tl.load(buffers_ptr + peer).to(tl.pointer_type(x_ptr.dtype.element_ty))
        part = tl.load(tl.multiple_of(theirs, 16) + place + at, mask=mask, other=0.0, volatile=True)
        total += part.to(tl.float32)
    tl.store(y_ptr + row * D + at, total.to(x.dtype), mask=mask)
    tl.store(count_ptr + row, count)


def run_with(plan: Plan[Any] | Refusal, warps: int) -> Any:
    """What the plan gives, with another number of warps unless it is 0."""
    assert isinstance(plan, Plan), plan
    return Plan(tuple(x._replace(num_warps=warps or x.num_warps) for x in plan.launches), plan.out).run()


class Rank:
    """One process.

    Args:
        rank, ranks: which of how many.
        port: where they meet.
        shared: without GPUs, the inboxes' memory of all ranks.
        args: the command's.
    """

    def __init__(self, rank: int, ranks: int, port: int, shared: Tensor, args: argparse.Namespace) -> None:
        self.rank, self.ranks, self.args, self.shared = rank, ranks, args, shared
        self.run = Run(args.dry, args.seconds)
        self.calls, self.rounds = (2, 3) if args.dry else (CALLS, ROUNDS)
        self.device = torch.device("cpu" if args.dry else f"cuda:{rank}")
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        if not args.dry:
            torch.cuda.set_device(self.device)
        dist.init_process_group("gloo" if args.dry else "cpu:gloo,cuda:nccl", rank=rank, world_size=ranks)
        self.times: dict[str, dict[str, float | str]] = {}
        self.boxes: dict[tuple[int, int], Inboxes] = {}

    def inboxes(self, width: int, slots: int) -> Inboxes:
        """This rank's, for all numbers of rows: over symmetric memory or, without GPUs, shared memory of the host."""
        if (width, slots) not in self.boxes:
            few = [rows for rows in self.args.rows if rows <= self.args.few]
            self.boxes[width, slots] = self.new_inboxes(max(few, default=1), width, slots)
        return self.boxes[width, slots]

    def new_inboxes(self, rows: int, width: int, slots: int) -> Inboxes:
        """A pair of halves."""
        if not self.args.dry:
            return inboxes(dist.group.WORLD, rows, width, self.device, slots)
        mine = self.shared.view(self.ranks, -1)
        mine[self.rank].zero_()
        dist.barrier()
        peers = torch.tensor([m.data_ptr() for m in mine])
        slots = min(slots, DRY_SLOTS) if self.ranks == 2 else 0
        counts = torch.zeros(rows + slots, dtype=torch.int32)
        return Inboxes(peers, counts, self.rank, rows, width, slots, mine[self.rank], 1 << 20)

    def symmetric(self, *size: int, dtype: torch.dtype) -> tuple[Tensor, list[int]]:
        """Zeros, and where they are for each rank."""
        import torch.distributed._symmetric_memory as symmetric

        world: Any = dist.group.WORLD
        made = symmetric.empty(*size, dtype=dtype, device=self.device)
        handle = symmetric.rendezvous(made, world)
        made.zero_()
        torch.cuda.synchronize()
        dist.barrier()
        return made, list(handle.buffer_ptrs)

    def all(self) -> None:
        """Every size; rank 0 writes what is known after each way."""
        for width in self.args.widths:
            for rows in self.args.rows:
                case = Case(self, rows, width)
                found = self.times.setdefault(f"{rows} x {width}", {})
                for name, make in case.ways().items():
                    if self.args.ways and name not in self.args.ways:
                        continue
                    found[name] = self.attempt(case, name, make)
                    self.write()

    def attempt(self, case: Case, name: str, make: Callable[[], Way]) -> float | str:
        """Microseconds, or what is wrong."""
        self.together()
        try:
            way = make()
            if way.checked:
                said: list[str] = [""] * self.ranks
                dist.all_gather_object(said, case.wrong(way))
                if wrong := "; ".join(filter(None, said)):
                    return wrong
            return case.microseconds(way)
        except Exception as error:  # what this machine does not have; open-ended
            return f"{type(error).__name__}: {str(error)[:300]}"

    def together(self) -> None:
        """Wait for the others, on the host."""
        dist.all_reduce(torch.zeros(1))

    def write(self) -> None:
        """By rank 0."""
        if self.rank == 0:
            text = json.dumps({**facts(self.run), "ranks": self.ranks, "microseconds": self.times}, indent=1)
            print(list(self.times)[-1], list(list(self.times.values())[-1].items())[-1], flush=True)
            if self.args.out:
                self.args.out.write_text(text + "\n", encoding="utf-8")


class Way:
    """How call i is made: from ``xs[i]``, which ``put`` fills, to (q, h) or to the sum alone."""

    def __init__(self, xs: list[Tensor], call: Callable[[int], Any], checked: bool = True) -> None:
        self.xs, self.call, self.checked = xs, call, checked


class Case:
    """Operands of one size."""

    def __init__(self, at: Rank, rows: int, width: int) -> None:
        self.at, self.rows, self.width, self.dtype = at, rows, width, at.run.dtype
        torch.manual_seed(rows + width)  # the ranks agree on everything but their partial sums
        new = lambda *size: torch.randn(*size, device=at.device).to(self.dtype)  # noqa: E731
        self.residuals = [new(rows, width) for _ in range(at.calls)]
        self.gain = 1 + 0.1 * new(width)
        self.scale = torch.tensor([SCALE], device=at.device)
        self.plain = [new(rows, width) for _ in range(at.calls)]
        self.outputs: list[Tensor] = []

    def poisoned(self, width: int, dtype: torch.dtype) -> Tensor:
        """Memory for results, which a check fills with NaN first."""
        made = torch.empty(self.rows, width, dtype=dtype, device=self.at.device)
        self.outputs.append(made)
        return made

    def norm(self, i: int, x: Tensor) -> Any:
        """Residual, norm, codes."""
        norm = Norm(EPS, self.gain, None, self.residuals[i], True)
        return norm_quantize.plan(x, norm, row_scale(self.scale, self.rows), new=self.poisoned).run()

    def ways(self) -> dict[str, Callable[[], Way]]:
        """By name."""
        both = {"words": self.words, "fused": self.fused}
        found: dict[str, Callable[[], Way]] = {}
        if not self.at.args.dry:
            both = {
                "nccl": self.nccl,
                "one_shot": self.one_shot,
                "one_shot, copied": self.copied,
                "two_shot": self.two_shot,
                "signal": self.signal,
                **both,
            }
            found = {"norm": lambda: Way(self.plain, lambda i: self.norm(i, self.plain[i]), False)}
        for name, make in both.items():
            found[name] = make
            if name != "fused":
                found[f"{name}, alone"] = lambda make=make: make(alone=True)
        for warps in self.at.args.warps:
            found |= {
                f"words, {warps} warps, alone": lambda w=warps: self.words(True, w),
                f"fused, {warps} warps": lambda w=warps: self.fused(w),
            }
        for slots in self.at.args.slots if self.rows > self.at.args.few else ():
            found[f"fused, {slots} slots"] = lambda n=slots: self.fused(slots=n)
            for warps in self.at.args.warps:
                found[f"fused, {slots} slots, {warps} warps"] = lambda n=slots, w=warps: self.fused(w, n)
        return found

    def behind(self, xs: list[Tensor], sum_of: Callable[[int], Tensor], alone: bool) -> Way:
        return Way(xs, sum_of, False) if alone else Way(xs, lambda i: self.norm(i, sum_of(i)))

    def nccl(self, alone: bool = False) -> Way:
        def sum_of(i: int) -> Tensor:
            dist.all_reduce(self.plain[i])
            return self.plain[i]

        return self.behind(self.plain, sum_of, alone)

    def one_shot(self, alone: bool = False) -> Way:
        xs, group = self.placed(), dist.group.WORLD.group_name  # type: ignore[union-attr]
        return self.behind(xs, lambda i: torch.ops.symm_mem.one_shot_all_reduce(xs[i], "sum", group), alone)

    def copied(self, alone: bool = False) -> Way:
        xs, group = self.placed(), dist.group.WORLD.group_name  # type: ignore[union-attr]
        op = torch.ops.symm_mem.one_shot_all_reduce
        return self.behind(self.plain, lambda i: op(xs[i].copy_(self.plain[i]), "sum", group), alone)

    def two_shot(self, alone: bool = False) -> Way:
        xs, group = self.placed(), dist.group.WORLD.group_name  # type: ignore[union-attr]
        return self.behind(xs, lambda i: torch.ops.symm_mem.two_shot_all_reduce_(xs[i], "sum", group), alone)

    def placed(self) -> list[Tensor]:
        """Partial sums in symmetric memory."""
        return list(self.at.symmetric(self.at.calls, self.rows, self.width, dtype=self.dtype)[0])

    def signal(self, alone: bool = False) -> Way:
        ranks, rows, width, device = self.at.ranks, self.rows, self.width, self.at.device
        buffers, flags = (
            self.at.symmetric(2 * rows * width, dtype=self.dtype),
            self.at.symmetric(ranks * rows, dtype=torch.int32),
        )
        where = [torch.tensor(addresses, device=device) for _, addresses in (buffers, flags)]
        count, block = torch.zeros(rows, dtype=torch.int32, device=device), triton.next_power_of_2(width)

        def sum_of(i: int) -> Tensor:
            y, _ = torch.empty_like(self.plain[i]), (buffers, flags)  # which live as long as this does
            signal_kernel[(rows,)](
                self.plain[i], y, *where, count, width, self.at.rank, ranks, rows, block, num_warps=all_reduce.warps_of(block)
            )
            return y

        return self.behind(self.plain, sum_of, alone)

    def words(self, alone: bool = False, warps: int = 0) -> Way:
        box = self.at.inboxes(self.width, SLOTS)

        def sum_of(i: int) -> Tensor:
            return run_with(all_reduce.plan(self.plain[i], box, new=self.poisoned), warps)

        return self.behind(self.plain, sum_of, alone)

    def fused(self, warps: int = 0, slots: int = SLOTS) -> Way:
        box = self.at.inboxes(self.width, slots)

        def call(i: int) -> Any:
            norm, scales = Norm(EPS, self.gain, None, self.residuals[i], True), row_scale(self.scale, self.rows)
            return run_with(all_reduce_norm_quantize.plan(self.plain[i], box, norm, scales, new=self.poisoned), warps)

        return Way(self.plain, call)

    def recorded(self, way: Way, calls: int) -> tuple[Callable[[], object], list[Any]]:
        """Some calls, each recorded once; what they fill."""
        found: list[Any] = []
        for i in range(min(3, calls)):  # kernels are compiled
            way.call(i)
        if self.at.args.dry:
            return lambda: (found.clear(), found.extend(map(way.call, range(calls)))), found
        torch.cuda.synchronize()
        self.at.together()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found += [way.call(i) for i in range(calls)]
        torch.cuda.synchronize()
        self.at.together()
        return graph.replay, found

    def wrong(self, way: Way) -> str:
        """Nothing, or how results differ from plain torch's, with numbers that are fresh every time."""
        self.outputs.clear()
        calls = min(4, self.at.calls)
        replay, found = self.recorded(way, calls)
        torch.manual_seed(1)
        worst, wrong = 0.0, ""
        for turn in range(self.at.rounds):
            parts = torch.randn(self.at.ranks, calls, self.rows, self.width, device=self.at.device).to(self.dtype)
            for x, new in zip(way.xs, parts[self.at.rank], strict=False):
                x.copy_(new)
            for made in self.outputs:
                made.fill_(float("nan") if made.is_floating_point() else 99)
            replay()
            sums = parts.float().sum(0).to(self.dtype)
            for i, (q, h) in enumerate(found):
                codes, total = reference(self.residuals[i], sums[i], self.gain, None, EPS, False, True, self.scale, None, 8)
                off = (q.int() - codes.int()).abs()
                worst = max(worst, (off > 0).float().mean().item())
                wide = (h.float() - total.float()).abs().max().item()  # of two numbers there is one order
                # rounded the other way both in front of the gain and behind it, a large number is two codes off: one of millions
                if not (off.max() <= 2 and (off > 1).sum() <= 4 and worst < 0.02 and wide <= (0 if self.at.ranks == 2 else 0.05)):
                    wrong = wrong or f"round {turn}, call {i}: codes {off.max()}, {worst:.3f} differ; sums {wide}"
        for q, h in () if wrong else found:
            for mine in (q.float(), h.float()):
                least, most = mine.cpu(), mine.cpu()
                dist.all_reduce(least, dist.ReduceOp.MIN)
                dist.all_reduce(most, dist.ReduceOp.MAX)
                wrong = wrong if torch.equal(least, most) else "ranks differ"
        return wrong

    def microseconds(self, way: Way) -> float:
        """Of one call, the median over several runs of replays; the slowest rank's."""
        replay, _ = self.recorded(way, self.at.calls)
        found, replays = [], 1 if self.at.args.dry else 20
        for _ in range(1 if self.at.args.dry else 9):
            self.at.together()
            start = time.perf_counter()
            for _ in range(replays):
                replay()
            if not self.at.args.dry:
                torch.cuda.synchronize()
            found.append(1e6 * (time.perf_counter() - start) / (replays * self.at.calls))
        slowest = torch.tensor([statistics.median(found)])
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return round(slowest.item(), 2)


def one_rank(rank: int, ranks: int, port: int, shared: Tensor, args: argparse.Namespace) -> None:
    """What a process does."""
    Rank(rank, ranks, port, shared, args).all()
    sys.stdout.flush()
    os._exit(0)  # groups are not waited for


def main() -> int:
    """Start the ranks; end them all if one fails, or at the time limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=300, help="time limit for all of it")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--widths", type=int, nargs="+", default=[3584, 8192])
    parser.add_argument("--few", type=int, default=64, help="the most rows that go as words; more with a flag a row")
    parser.add_argument("--slots", type=int, nargs="*", default=[], help="other numbers of slots for many rows")
    parser.add_argument("--warps", type=int, nargs="*", default=[])
    parser.add_argument("--ways", nargs="*", default=[], help="some of them, by name")
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    if args.dry:
        args.rows, args.widths, args.few = [1, 3, 8], [64], 3
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    memory = args.ranks * sum(parts(args.ranks, max(args.rows), max(args.widths), DRY_SLOTS)) if args.dry else 1
    shared = torch.zeros(memory, dtype=torch.int32)
    end = time.monotonic() + args.seconds
    ranks = mp.spawn(one_rank, (args.ranks, port, shared.share_memory_(), args), args.ranks, join=False)
    assert ranks is not None
    try:
        while not ranks.join(timeout=1):
            if time.monotonic() > end:
                print("ended by the time limit", file=sys.stderr)
                return 1
    finally:
        for process in filter(None, ranks.processes):
            process.kill()
    return 0


if __name__ == "__main__":
    sys.exit(main())
