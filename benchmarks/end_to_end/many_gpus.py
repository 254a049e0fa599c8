"""One GPU against two of the same host: quantizing by ranks, and a model that ranks share (transformers' tp_plan).

    python -m benchmarks.end_to_end.many_gpus quantize --shape 8b --recipes gptq awq        codes of both have to be equal
    python -m benchmarks.end_to_end.many_gpus quantize --shape 72b --layers 1 3 --offload --samples 32
    python -m benchmarks.end_to_end.many_gpus run --shape 8b --ways w4a8 bf16               decode, first token
    python -m benchmarks.end_to_end.many_gpus run --shape 72b --layers 4 12 --ways w4a8     two depths: 80 layers by a line
    python -m benchmarks.end_to_end.many_gpus run --shape 8b --ways w4a8 --loops compiled --collectives fused words one_shot nccl
    python -m benchmarks.end_to_end.many_gpus messages                                      all-reduce and all-gather alone

A line of JSON is added to ``--out`` as soon as it is known, with what failed among them; ``--seconds`` ends all of it.
Ranks are processes that this one starts; groups of fewer ranks than GPUs go side by side, each on its own GPUs.  ``run`` saves
the models in ``--folder`` once, compiles all groups side by side, and times them in turn; ``quantize`` times one-rank groups of
different recipes at the same time.  ``--repeat`` quantizes one layer and copies it, for models too large to be made whole.
``--shape tiny`` needs no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.command_line import command_line
from benchmarks.end_to_end import many_gpus_rank
from benchmarks.end_to_end.many_gpus_model import LAYERS

THREADS = COMPILERS = "6"  # of every rank, whether it is alone or not
WAYS = ("bf16", "w4a8", "w8a8", "w4a16", "mquant")


class Log:
    """Results as they come."""

    def __init__(self, path: Path) -> None:
        self.path, self.lock = path, threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        self.add(command=command_line(), gpus=gpus, cpus=os.cpu_count(), **versions)

    def add(self, **figures: Any) -> None:
        """One line."""
        with self.lock, self.path.open("a", encoding="utf-8") as out:
            line = json.dumps({k: round(v, 5) if isinstance(v, float) else v for k, v in figures.items()})
            out.write(line + "\n")
            print(line, flush=True)


class Group:
    """Ranks that work together, on GPUs of their own.

    Args:
        log: where lines of rank 0 go.
        ranks: how many.
        first: the number of the first GPU.
        arguments: for the ranks.
        seconds: when they are ended.
    """

    def __init__(self, log: Log, ranks: int, first: int, arguments: list[str], seconds: float) -> None:
        self.log, self.ready, self.name = log, threading.Event(), " ".join([*arguments, f"({ranks} ranks)"])
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count())))).split(",")
        common = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        common |= {"CUDA_VISIBLE_DEVICES": ",".join(gpus[first : first + ranks])} if torch.cuda.is_available() else {}
        common |= {"OMP_NUM_THREADS": THREADS if torch.cuda.is_available() else "1", "OMP_WAIT_POLICY": "passive"}
        common |= {"TORCHINDUCTOR_COMPILE_THREADS": COMPILERS}
        command = [sys.executable, "-m", "benchmarks.end_to_end.many_gpus", *arguments, "--child"]
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (lives as long as the ranks)
        self.processes = []
        for rank in range(ranks):
            env = {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            pipes: dict[str, Any] = (
                {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE} if rank == 0 else {"stdin": subprocess.DEVNULL}
            )
            if rank:
                pipes["stdout"] = subprocess.DEVNULL
            self.processes.append(
                subprocess.Popen(command, env=env, text=True, stderr=self.errors, start_new_session=True, **pipes)
            )
        self.limit = threading.Timer(max(1.0, seconds), self.kill)
        self.limit.daemon = True
        self.limit.start()
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self) -> None:
        """Lines of rank 0 until it ends."""
        out = self.processes[0].stdout
        assert out is not None
        for line in out:
            if line.startswith("{"):
                figures = json.loads(line)
                if figures.pop("ready", False):
                    self.ready.set()
                else:
                    self.log.add(**figures)
        self.ready.set()

    def go(self) -> None:
        """Let it measure."""
        pipe = self.processes[0].stdin
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):  # of a rank that has ended, which ``end`` reports with its last words
            pipe.write("go\n")
            pipe.flush()

    def end(self) -> None:
        """Wait; a rank that fails ends the others."""
        while any(p.poll() is None for p in self.processes):
            if any(p.poll() not in (None, 0) for p in self.processes):
                time.sleep(5)
                self.kill()
            time.sleep(0.2)
        self.limit.cancel()
        self.reader.join(5)
        codes = [p.returncode for p in self.processes]
        if any(codes):
            self.errors.seek(0)
            self.log.add(failed=self.name, codes=codes, stderr=self.errors.read()[-3000:])

    def kill(self) -> None:
        """All ranks, with what they have started."""
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


class Run:
    """The parts, with one time limit for all."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.log, self.deadline = args, Log(args.out), time.monotonic() + args.seconds

    def left(self) -> float:
        """Seconds."""
        return self.deadline - time.monotonic()

    def group(self, ranks: int, first: int, **more: Any) -> Group:
        """Started with this call's arguments, some of them replaced."""
        args = {**vars(self.args), **more}
        words = [args["part"] if "part" not in more else more["part"]]
        for name in ("shape", "samples", "tokens", "way", "model", "prefill"):
            words += [f"--{name}", str(args[name])] if args.get(name) is not None else []
        for name in ("layers", "recipes", "rows", "loops", "collectives"):
            words += [f"--{name}", *map(str, args[name])]
        words += [f"--{name.replace('_', '-')}" for name in ("offload", "repeat", "no_graphs", "profile", "parts") if args[name]]
        return Group(self.log, ranks, first, words, self.left())

    def side_by_side(self, jobs: list[dict[str, Any]]) -> None:
        """Jobs of one rank, as many at a time as there are GPUs."""
        width = max(1, torch.cuda.device_count())
        for start in range(0, len(jobs), width):
            groups = [self.group(1, place, **job) for place, job in enumerate(jobs[start : start + width])]
            for group in groups:
                group.end()

    def quantize(self) -> None:
        """Each recipe by one rank, then by all."""
        for ranks in self.args.ranks:
            if ranks == 1:
                self.side_by_side([{"recipes": [recipe]} for recipe in self.args.recipes])
            else:
                self.group(ranks, 0).end()

    def run(self) -> None:
        """Make, load and compile side by side, measure in turn."""
        folder, args = self.args.folder, self.args
        folder.mkdir(parents=True, exist_ok=True)
        cases = [(way, layers) for way in args.ways for layers in args.layers]
        places = {case: folder / f"{args.shape}-{case[1]}-{case[0]}" for case in cases}
        missing = [case for case in cases if not (places[case] / "config.json").exists()]
        self.side_by_side([{"part": "make", "way": w, "layers": [n], "model": places[w, n]} for w, n in missing])
        groups = []
        for ranks in args.ranks:
            for number, (way, layers) in enumerate(cases):
                if (places[way, layers] / "config.json").exists():
                    first = number % max(1, torch.cuda.device_count()) if ranks == 1 else 0
                    for how in args.collectives[: 1 if ranks == 1 or way == "bf16" else None]:
                        more: dict[str, Any] = {"way": way, "layers": [layers], "model": places[way, layers]}
                        groups.append(self.group(ranks, first, **more, collectives=[how]))
                        if args.in_turn:
                            self.measure(groups[-1:])
        if not args.in_turn:
            for group in groups:
                group.ready.wait()
            self.measure(groups)

    def measure(self, groups: list[Group]) -> None:
        """One after the other."""
        for group in groups:
            group.ready.wait()
            group.go()
            group.end()

    def messages(self) -> None:
        """By all ranks."""
        self.group(max(self.args.ranks), 0).end()


def parsed() -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("quantize", "run", "messages", "make"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/many_gpus.jsonl"))
    parser.add_argument("--seconds", type=float, default=470, help="time limit for all of it")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--shape", choices=LAYERS, default="8b")
    parser.add_argument("--layers", nargs="+", type=int, help="of the decoder; several for an extrapolation")
    parser.add_argument("--recipes", nargs="+", default=["gptq", "awq"])
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--offload", action="store_true", help="the model in host memory, one block of it on the GPU")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["w4a8", "bf16"])
    parser.add_argument("--loops", nargs="+", choices=("eager", "compiled"), default=["eager", "compiled"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--prefill", choices=("recorded", "graphs", "compiled", "eager"), default="graphs")
    parser.add_argument("--no-graphs", action="store_true", help="compiled, without CUDA graphs")
    parser.add_argument("--collectives", nargs="+", choices=many_gpus_rank.OPTIONS, default=["nccl"], help="how a step adds up")
    parser.add_argument("--repeat", action="store_true", help="quantize one layer, and copy it")
    parser.add_argument("--profile", action="store_true", help="where the time goes, on rank 0")
    parser.add_argument("--parts", action="store_true", help="seconds of quantize_'s parts on every rank, nothing overlapping")
    parser.add_argument("--in-turn", action="store_true", help="one group of ranks at a time, also for compiling")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "many_gpus")
    parser.add_argument("--clean", action="store_true", help="remove the folder at the end")
    for name in ("--way", "--model"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.layers = args.layers or [LAYERS[args.shape]]
    return args


def main() -> None:
    """One part."""
    args = parsed()
    if args.child:
        many_gpus_rank.main(args)
    run = Run(args)
    getattr(run, args.part)()
    run.log.add(part=args.part, done=True, seconds_left=run.left())
    if args.clean:
        shutil.rmtree(args.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
