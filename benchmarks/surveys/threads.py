"""Many threads on one quantized model: does every answer equal the one of a single thread?

    python -m benchmarks.surveys.threads [--threads 8] [--calls 200] [--only mquant/eager ...] [--device cuda]

The model of digits-vqa, quantized by mquant, by calibquant and by both; prompts with and without images, of equal and of other
lengths, in batches of 1 and 2, drawn anew by each thread; called eagerly, through ``generate``, compiled, and through ``generate``
with ``mmqc.compiled_loop``.  The interpreter switches threads every 0.1 ms.  Writes benchmarks/results/threads.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

import mmqc
from mmqc import recipes

ROOT = Path(__file__).resolve().parents[2]
NEW_TOKENS, LIMIT = 4, 1e-5
MODELS = ("mquant", "calibquant", "both")
WAYS = ("eager", "generate", "compiled", "compiled_loop")
Answer = Callable[[dict[str, Any]], torch.Tensor]


def quantized(which: str, device: str) -> tuple[Any, list[dict[str, Any]]]:
    """The model, and the prompts."""
    sample = mmqc.samples.load("digits-vqa")
    model: Any = sample.model
    batches = sample.calibration(8)
    if which in ("mquant", "both"):
        mmqc.quantize_(model, recipes.mquant(8, solver="rtn"), calibration=batches[:4], progress=False)
    if which in ("calibquant", "both"):
        mmqc.quantize_(model, recipes.calibquant(bits=2), calibration=batches[:4], progress=False)
    length = batches[0]["input_ids"].shape[1]
    draw = torch.Generator().manual_seed(0)
    text = [torch.randint(5, 12, shape, generator=draw) for shape in ((1, length), (2, 9), (1, 5))]
    prompts = [*batches[:5], *({"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in text)]
    return model.to(device), [{name: value.to(device) for name, value in prompt.items()} for prompt in prompts]


def answers(model: Any, way: str) -> Answer:
    """How the model is asked."""
    if way == "eager":
        return lambda prompt: model(**prompt).logits
    if way == "compiled":
        compiled = torch.compile(model, backend="mmqc")
        return lambda prompt: compiled(**prompt).logits
    static = hasattr(model, "_mmqc_kv") or way == "generate"
    more: dict[str, Any] = {} if static else {"cache_implementation": "static"}
    more |= {"custom_generate": mmqc.compiled_loop} if way == "compiled_loop" else {}
    return lambda prompt: model.generate(**prompt, max_new_tokens=NEW_TOKENS, do_sample=False, **more)


def is_wrong(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Another answer: of compiled logits, by more than rounding."""
    if got.shape != wanted.shape or not got.is_floating_point():
        return not torch.equal(got, wanted)
    return bool((got - wanted).norm() > LIMIT * wanted.norm())


@torch.no_grad()
def survey(which: str, way: str, threads: int, calls: int, device: str) -> dict[str, Any]:
    """Ask in one thread, then in all of them."""
    model, prompts = quantized(which, device)
    ask = answers(model, way)
    for prompt in prompts:  # compiles
        ask(prompt)
    wanted = [ask(prompt) for prompt in prompts]
    wrong, errors = [0] * threads, []

    def work(number: int) -> None:
        draw = torch.Generator().manual_seed(number)
        for index in torch.randint(len(prompts), (calls,), generator=draw).tolist():
            try:
                with torch.no_grad():
                    wrong[number] += is_wrong(ask(prompts[index]), wanted[index])
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}"[:200])

    frames = torch._dynamo.utils.counters["frames"]
    before, start = frames["ok"], time.perf_counter()
    workers = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return {
        "model": which,
        "way": way,
        "calls": threads * calls,
        "wrong": sum(wrong),
        "errors": sorted(set(errors)),
        "compiled meanwhile": frames["ok"] - before,
        "seconds": round(time.perf_counter() - start, 1),
    }


def _machine(device: str) -> str:
    return torch.cuda.get_device_name() if device.startswith("cuda") else platform.processor() or platform.machine()


def main() -> None:
    """Run and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--only", nargs="*", default=[f"{model}/{way}" for model in MODELS for way in WAYS])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "threads.json")
    options = parser.parse_args()
    sys.setswitchinterval(1e-4)
    torch.set_num_threads(1)
    rows = []
    for name in options.only:
        which, way = name.split("/")
        torch._dynamo.reset()
        rows.append(survey(which, way, options.threads, options.calls, options.device))
        print(rows[-1], flush=True)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    facts = {"torch": torch.__version__, "transformers": transformers.__version__, "commit": commit.stdout.strip()}
    facts |= {"machine": _machine(options.device), "threads": options.threads, "calls a thread": options.calls}
    command = "python -m benchmarks.surveys.threads"
    options.out.write_text(json.dumps({**facts, "command": command, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
