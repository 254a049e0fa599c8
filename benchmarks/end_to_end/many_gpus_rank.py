"""What each rank of ``benchmarks.end_to_end.many_gpus`` does; rank 0 prints one JSON object a line.

A rank that is to measure says "ready" first and waits for a line on its stdin: groups of ranks compile side by side and are
timed in turn.  Nobody waits on the device meanwhile, which another group may be using.
"""

from __future__ import annotations

import contextlib
import copy
import cProfile
import json
import os
import statistics
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from benchmarks.end_to_end import many_gpus_model as models
from benchmarks.end_to_end import many_gpus_parts
from benchmarks.end_to_end.quantize_speed import batch_of, config_of
from benchmarks.host_profile import slowest

RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
GPU = torch.cuda.is_available()
DEVICE = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if GPU else "cpu"
ROWS = (1, 16)
EAGER, COMPILED = (4, 36), (16, 144)  # tokens of the two generations whose difference is timed
TIMES = 5
FAILED: list[Any] = []  # what did, on this rank
OPTIONS: dict[str, dict[str, Any]] = {  # of the backend: how a compiled step adds up over ranks
    "fused": {"collectives": "shared"},  # through memory that they share, with residual, norm and quantization in one kernel
    "words": {"collectives": "shared"},  # the same, the sum alone
    "one_shot": {"_collective.auto_select": True},  # Inductor's, over symmetric memory
    "nccl": {},
}


def say(**figures: Any) -> None:
    """One line, by rank 0."""
    if RANK == 0:
        print(json.dumps(figures), flush=True)


def seconds_of(work: Callable[[], object]) -> float:
    """Wall time until the device is done, all ranks starting together."""
    together()
    if GPU:
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if GPU:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def together() -> None:
    """Wait for the other ranks, on the host."""
    if RANKS > 1:
        dist.all_reduce(torch.zeros(1))


def attempt(what: dict[str, Any], work: Callable[[], dict[str, Any]]) -> bool:
    """Print what ``work`` finds, or why it failed; ranks fail together, or the group's time limit ends them."""
    start = time.perf_counter()
    try:
        found = work()
    except Exception as error:  # open-ended: it is what is to be found out
        last = [f"{f.filename}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)[-3:]]
        FAILED.append(what)
        say(**what, failed=f"{type(error).__name__}: {str(error)[-1500:]}", where=last, after=time.perf_counter() - start)
        traceback.print_exc()
        return False
    say(**what, **found)
    return True


def quantize(args: Any) -> None:
    """``quantize_`` of every recipe for every number of layers."""
    import mmqc

    for recipe in args.recipes:
        for layers in args.layers:
            attempt(
                {"part": "quantize", "shape": args.shape, "recipe": recipe, "layers": layers, "ranks": RANKS},
                lambda recipe=recipe, layers=layers: _quantized(mmqc, args, recipe, layers),
            )
            if GPU:
                torch.cuda.empty_cache()


def _quantized(mmqc: Any, args: Any, recipe: str, layers: int) -> dict[str, Any]:
    model = models.build(args.shape, layers, DEVICE)
    weights = models.fingerprint(dict(model.named_parameters()))
    if args.offload:
        model = model.cpu()
    config = config_of(recipe, args.samples)
    batches = [batch_of(args.tokens, model.dtype, i) for i in range(args.samples)] if config.needs_calibration else None
    more = {"device": DEVICE} if args.offload else {}
    if GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    report: list[Any] = []
    watch = cProfile.Profile()
    run: Callable[..., Any] = watch.runcall if args.profile else lambda work: work()
    with many_gpus_parts.timed() if args.parts else contextlib.nullcontext() as parts:
        seconds = seconds_of(lambda: run(lambda: report.append(mmqc.quantize_(model, config, batches, progress=False, **more))))
    peak = torch.cuda.max_memory_allocated() / 1e9 if GPU else 0.0
    state = model.state_dict()
    if args.offload and GPU:
        state = {name: t.to(DEVICE) for name, t in state.items() if t.dtype in (torch.int8, torch.uint8)}
    return {
        "seconds": seconds,
        "samples": args.samples if batches else 0,
        "tokens": args.tokens if batches else 0,
        "linears": len(report[0].layers),
        "offload": args.offload,
        "peak_gpu_gb": peak,
        "weights": weights,
        "codes": models.fingerprint({n: t for n, t in state.items() if not t.is_floating_point()}),
        "floats": models.fingerprint({n: t for n, t in state.items() if t.is_floating_point()}),
        **({} if parts is None else {"parts": parts.of_all_ranks()}),
        "passes": {p.name: round(p.ms / 1e3, 2) for p in report[0].passes if p.ms > 500},
        **({"host": slowest(watch, "tottime", 24), "calls": slowest(watch, "cumulative", 80)} if args.profile else {}),
    }


def make(args: Any) -> None:
    """Save the model of a way: bf16, or a recipe of which one layer is quantized and repeated if ``repeat`` is asked."""
    import mmqc

    target, layers = Path(args.model), args.layers[0]
    whole = args.way == "bf16" or not args.repeat
    model = models.build(args.shape, layers if whole else 1, DEVICE)
    start = time.perf_counter()
    if args.way != "bf16":
        config = {
            "w4a8": lambda: mmqc.recipes.rtn(4, 8, head_bits=8),
            "w8a8": lambda: mmqc.recipes.rtn(8, 8, head_bits=8),
            "w4a16": lambda: mmqc.recipes.rtn(4, group_size=128, head_bits=8),
            "mquant": lambda: mmqc.recipes.mquant(4, solver="rtn", head_bits=8),
        }[args.way]()
        batches = [models.image_prompt(model, "tiny")] if config.needs_calibration else None
        mmqc.quantize_(model, config, batches, progress=False)
    models.repeat_layers(model, layers)
    quantized = time.perf_counter() - start
    model.save_pretrained(target)
    size = sum(f.stat().st_size for f in target.iterdir())
    seconds = {"quantize_seconds": quantized, "save_seconds": time.perf_counter() - start - quantized}
    say(part="make", way=args.way, shape=args.shape, layers=layers, gb=size / 1e9, **seconds)


def run(args: Any) -> None:
    """Load, compile, wait for the turn, measure."""
    what = {"part": "run", "way": args.way, "shape": args.shape, "layers": args.layers[0], "ranks": RANKS}
    what |= {"collectives": args.collectives[0]} if RANKS > 1 else {}
    held: list[Any] = []
    if not attempt({**what, "step": "load"}, lambda: _loaded(args, held)):
        return
    model = held[0]
    if RANKS > 1:
        add_up_by(args.collectives[0], model)
    loops = {}
    for loop in args.loops:
        prepare = Loop(model, args, loop)
        if attempt({**what, "step": "compile", "loop": loop}, prepare.warm):
            loops[loop] = prepare
    say(ready=True)
    if RANK == 0:
        sys.stdin.readline()
    together()
    for loop, prepared in loops.items():
        for rows in args.rows:
            attempt({**what, "loop": loop, "rows": rows}, lambda prepared=prepared, rows=rows: prepared.measured(rows))
    attempt({**what, "step": "logits"}, lambda: _compared(model, args))
    together()


def add_up_by(collectives: str, model: Any) -> None:
    """What ``OPTIONS`` do not say."""
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    from mmqc.passes import rewrite_all_reduce

    if collectives == "one_shot":
        enable_symm_mem_for_group(model._device_mesh.get_group().group_name)
    if collectives == "words":
        rewrite_all_reduce.norm_behind = lambda wait: None


def _loaded(args: Any, held: list[Any]) -> dict[str, Any]:
    import transformers
    from transformers.distributed import DistributedConfig

    import mmqc  # noqa: F401

    how: dict[str, Any] = {"distributed_config": DistributedConfig(tp_plan="auto")} if RANKS > 1 else {"device_map": DEVICE}
    start = time.perf_counter()
    model = transformers.AutoModelForImageTextToText.from_pretrained(args.model, dtype="auto", **how)
    held.append(model.eval())
    here = [*model.parameters(), *model.buffers()]
    local = [getattr(t, "_local_tensor", t) for t in here]
    splits: list[Any] = [m.split for m in model.modules() if getattr(m, "split", None)]
    return {
        "seconds": time.perf_counter() - start,
        "gb": sum(t.numel() * t.element_size() for t in local) / 1e9,
        "peak_gpu_gb": torch.cuda.max_memory_allocated() / 1e9 if GPU else 0.0,
        "by_inputs": sum(s.by == "inputs" for s in splits),
        "by_outputs": sum(s.by == "outputs" for s in splits),
        "gathered": sum(bool(s.reason) for s in splits),
    }


def _compared(model: Any, args: Any) -> dict[str, Any]:
    """Logits of the prompt against those of one rank, if they lie there."""
    with torch.no_grad():
        logits = model(**models.image_prompt(model, args.shape), logits_to_keep=1).logits.float().cpu()
    path = Path(f"{args.model}.logits.pt")
    if RANKS == 1:
        torch.save(logits, path)
        return {"largest": float(logits.abs().max())}
    if not path.exists():
        return {"difference": None}
    one = torch.load(path)
    return {
        "difference": float((logits - one).abs().max() / one.abs().max()),
        "same_token": bool(logits.argmax() == one.argmax()),
    }


class Loop:
    """One way to generate: "eager" is transformers' own loop with a static cache, "compiled" is ``mmqc.compiled_loop``."""

    def __init__(self, model: Any, args: Any, loop: str) -> None:
        from transformers import CompileConfig, GenerationConfig

        import mmqc

        self.model, self.args, self.compiled = model, args, loop == "compiled"
        backend: Any = "inductor" if args.way == "bf16" else "mmqc"
        mode: Any = "reduce-overhead" if GPU and not args.no_graphs else None
        more = OPTIONS[args.collectives[0]] if RANKS > 1 and backend == "mmqc" else {}
        if more:  # torch.compile takes a mode or options
            mode, more = None, {**more, **({"mode": mode} if mode else {})}
        compile_config = CompileConfig(backend=backend, mode=mode, options=more or None, fullgraph=False) if self.compiled else None
        self.config = GenerationConfig(
            do_sample=False,
            pad_token_id=0,
            cache_implementation="static",
            disable_compile=not self.compiled,
            compile_config=compile_config,
        )
        self.more: dict[str, Any] = {"custom_generate": mmqc.compiled_loop} if self.compiled else {}
        self.inputs: dict[int, dict[str, torch.Tensor]] = {}
        self.lengths = COMPILED if self.compiled else EAGER
        if args.shape == "tiny":
            self.lengths = (2, 4)

    def generate(self, rows: int, tokens: int) -> torch.Tensor:
        """The tokens; inputs are made once: drawing an image's numbers takes as long as a first token."""
        one = rows == 1
        if rows not in self.inputs:
            make = models.image_prompt if one else partial(models.text_prompts, rows=rows)
            self.inputs[rows] = make(self.model, self.args.shape)
        inputs = self.inputs[rows]
        how = {"prefill": self.args.prefill if one else "eager"} if self.compiled else {}
        config = copy.copy(self.config)
        config.max_new_tokens = config.min_new_tokens = tokens
        with torch.no_grad():
            return self.model.generate(**inputs, generation_config=config, **self.more, **how)[:, inputs["input_ids"].shape[1] :]

    def warm(self) -> dict[str, Any]:
        """Everything once, and once more where CUDA graphs are recorded; how many sums of a graph are made how."""
        from mmqc.compiler.record import collect_records

        found: dict[str, Any] = {}
        with collect_records() as records:
            for rows in self.args.rows:
                found[f"first_{rows}"] = seconds_of(lambda rows=rows: self.generate(rows, self.lengths[1]))
                found[f"second_{rows}"] = seconds_of(lambda rows=rows: self.generate(rows, self.lengths[0]))
        sums = [p for r in records for p in r.passes if p.name == "rewrite_all_reduce"]
        found["sums"] = [{"rewritten": len(p.sites), **Counter(m.reason for m in p.misses)} for p in sums]
        return {**found, "peak_gpu_gb": torch.cuda.max_memory_allocated() / 1e9 if GPU else 0.0}

    def measured(self, rows: int) -> dict[str, Any]:
        """Decode is the difference of two lengths, by turns: a prompt whose tower began late once is in neither's best."""
        few, many = self.lengths
        tokens: list[torch.Tensor] = []
        self.generate(rows, few)
        times = TIMES if self.compiled else 2
        pairs = [
            (seconds_of(lambda: self.generate(rows, few)), seconds_of(lambda: tokens.append(self.generate(rows, many))))
            for _ in range(times)
        ]
        short, long = (min(of) for of in zip(*pairs, strict=True))
        found = {
            "ms_per_step": 1e3 * (long - short) / (many - few),
            "tokens_per_second": rows * (many - few) / (long - short),
            "tokens": tokens[-1][0, :12].tolist(),
        }
        if rows == 1:
            self.generate(1, 1)
            found["first_token_ms"] = 1e3 * min(seconds_of(lambda: self.generate(1, 1)) for _ in range(times + 2))
        if (kept := vars(self.model).get("_mmqc_loop")) is not None:
            found |= _of_all_ranks(_recordings(kept))
        return {**found, **(self.profiled(rows) if self.args.profile else {})}

    def profiled(self, rows: int) -> dict[str, Any]:
        """Where a step's time goes on rank 0: on the device by kernel, idle between kernels, and on the host."""
        many = self.lengths[1]
        device: list[list[Any]] = []
        for tokens in (1, many):
            with profile(activities=[ProfilerActivity.CUDA if GPU else ProfilerActivity.CPU]) as run:
                seconds_of(lambda tokens=tokens: self.generate(rows, tokens))
            events = [e for e in run.events() or () if e.device_type == torch.autograd.DeviceType.CUDA]
            device.append(sorted(events, key=lambda e: e.time_range.start))
        prompt, all_of_it = device
        watch = cProfile.Profile()
        watch.runcall(lambda: self.generate(rows, many))
        return {
            "first_token": _along(prompt, 1),
            "step": _along(all_of_it[len(prompt) :], many - 1),
            "host": slowest(watch, "tottime", 24),
        }


def _recordings(loop: Any) -> dict[str, Any]:
    """What this rank replayed so far, and what it did not, with the reasons."""
    from mmqc.compiler import recorded_sizes

    prompts = recorded_sizes.all_graphs()
    return {
        "prompts replayed": sum(sizes.replays for sizes in prompts),
        "prompts not recorded": sorted({reason for sizes in prompts for reason in sizes.refusals()}),
        "towers ahead": loop.ahead.right,
        "steps replayed": loop.steps.replays,
        "steps not recorded": loop.steps.refusals(),
    }


def _of_all_ranks(found: dict[str, Any]) -> dict[str, Any]:
    """Rank 0's, and the other ranks' where they differ."""
    if RANKS == 1:
        return found
    said: list[Any] = [None] * RANKS
    dist.all_gather_object(said, found)
    return {**found, **{f"of rank {rank}": other for rank, other in enumerate(said) if other != found}}


def _along(events: list[Any], steps: int) -> dict[str, Any]:
    """Where the device's time goes, by kernel, in microseconds of one of ``steps``.

    Kernels overlap: one that was launched ahead waits inside for the one before.  So a kernel counts for what it adds to the time
    at which all before it had ended (``kernels``: that, its own length, its number), and ``idle`` is when none ran.
    """
    each: dict[str, list[float]] = {}
    idle, front = 0.0, None
    for event in sorted(events, key=lambda e: e.time_range.end):
        start, end = event.time_range.start, event.time_range.end
        found = each.setdefault(event.name[:70], [0.0, 0.0, 0.0])
        since = start if front is None else max(start, front)
        idle += 0.0 if front is None else max(0.0, start - front)
        found[:] = found[0] + max(0.0, end - since), found[1] + end - start, found[2] + 1
        front = end
    first = sorted(each.items(), key=lambda item: -item[1][0])[:20]
    return {
        "idle": round(idle / steps, 1),
        "busy": round(sum(added for added, _, _ in each.values()) / steps, 1),
        "kernels": {name: [round(n / steps, 1) for n in numbers] for name, numbers in first},
    }


def messages(args: Any) -> None:
    """Microseconds of the messages of one layer: NCCL's, in a CUDA graph and out of it, and symmetric memory's."""
    for width in (8192, 3584):
        for tokens in (1, 16, 917):
            attempt({"part": "messages", "width": width, "tokens": tokens, "ranks": RANKS}, lambda w=width, t=tokens: _times(w, t))


def _times(width: int, tokens: int) -> dict[str, Any]:
    dtype = torch.bfloat16 if GPU else torch.float32
    x = torch.zeros(tokens, width, dtype=dtype, device=DEVICE)
    gathered = x.new_empty(RANKS * x.numel())
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(x),
        "all_gather": lambda: dist.all_gather_into_tensor(gathered, x.view(-1)),
    }
    if GPU:
        import torch.distributed._symmetric_memory as symmetric

        world: Any = dist.group.WORLD
        shared = symmetric.empty(tokens * width, dtype=dtype, device=torch.device(DEVICE)).view(tokens, width)
        symmetric.rendezvous(shared, world)
        group = world.group_name
        calls["one_shot"] = lambda: torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", group)
        calls["two_shot"] = lambda: torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", group)
    found: dict[str, Any] = {"kib": x.numel() * x.element_size() / 1024}
    for name, call in calls.items():
        try:
            found[name] = _microseconds(call)
            if GPU:
                found[f"{name}_graph"] = _microseconds(_recorded(call), each=50)
        except Exception as error:  # what this machine does not have
            found[name] = f"{type(error).__name__}: {str(error)[:200]}"
    return found


def _recorded(call: Callable[[], object]) -> Callable[[], object]:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(50):
            call()
    return graph.replay


def _microseconds(call: Callable[[], object], each: int = 1, repeats: int = 50) -> float:
    for _ in range(5):
        call()
    found = []
    for _ in range(5):
        found.append(seconds_of(lambda: [call() for _ in range(repeats // each or 1)]) * 1e6 / (max(1, repeats // each) * each))
    return statistics.median(found)


def main(args: Any) -> None:
    """One part."""
    if GPU:
        torch.cuda.set_device(DEVICE)
    if RANKS > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if GPU else "gloo")
        dist.all_reduce(torch.zeros(1, device=DEVICE))  # NCCL meets here, and not in what is timed
    {"quantize": quantize, "make": make, "run": run, "messages": messages}[args.part](args)
    if RANKS > 1 and not FAILED:  # as a script would: it hangs where something still holds NCCL's communicators
        start = time.perf_counter()
        dist.destroy_process_group()
        say(part=args.part, ranks=RANKS, step="end", seconds=time.perf_counter() - start)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # where an operation has failed, a group waits for it
