"""What every rank of ``many_gpus quantize`` does by itself before the work divides, on the host alone: recording, rewrites.

    python -m benchmarks.end_to_end.many_gpus_host --shape 8b --recipes gptq awq mquant
    python -m benchmarks.end_to_end.many_gpus_host --shape 72b --layers 1

The model is on the meta device: shapes, graphs and channel spaces are those of the real one, and there are no weights, so any
size runs on a CPU.  Solving, folding of weights and whatever else needs values are not in it.  A line of JSON a recipe.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

from benchmarks.end_to_end import many_gpus_model as models
from benchmarks.end_to_end.quantize_speed import batch_of, config_of


def seconds(work: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """What ``work`` returns, and its seconds by the clock and of the process."""
    start, used = time.perf_counter(), time.process_time()
    result = work()
    return result, {"wall": round(time.perf_counter() - start, 2), "cpu": round(time.process_time() - used, 2)}


def measured(shape: str, layers: int, recipe: str, tokens: int) -> dict[str, Any]:
    """Seconds to record one batch and a decode step, of each pass, and of what the report says of towers; peak memory."""
    from mmqc.graph.record import record
    from mmqc.graph.runner import run
    from mmqc.pipeline import FACTS, exact_passes
    from mmqc.quantization.incoherence import weight_towers

    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(models.config_of(shape, layers), dtype=torch.bfloat16).eval()
    batch = {**batch_of(tokens, torch.bfloat16, 0), "use_cache": False}
    prog, recording = seconds(lambda: record(model, batch, decode=True))
    _, rewrites = seconds(lambda: run(prog, exact_passes(config_of(recipe, 1)), FACTS, text=True))
    _, towers = seconds(lambda: weight_towers(prog))
    return {
        "shape": shape,
        "layers": layers,
        "recipe": recipe,
        "tokens": tokens,
        "nodes": len(prog.graph.nodes),
        "record": recording,
        "passes": rewrites,
        "each": {r.name: round(r.ms / 1e3, 2) for r in prog.records if r.ms > 100},
        "towers": towers,
        "peak_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
        "torch": torch.__version__,
    }


def main() -> None:
    """One line a recipe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=models.LAYERS, default="8b")
    parser.add_argument("--layers", type=int, help="of the decoder")
    parser.add_argument("--recipes", nargs="+", default=["gptq"])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for recipe in args.recipes:
        print(json.dumps(measured(args.shape, args.layers or models.LAYERS[args.shape], recipe, args.tokens)), flush=True)


if __name__ == "__main__":
    main()
