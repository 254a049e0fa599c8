"""Decoding on the CPU: the text decoder of Qwen2-VL-2B with random weights, torch.compile against mmqc's W4A16.

    python -m benchmarks.end_to_end.cpu_decode [--ways "inductor bfloat16" ...] [--layers 28] [--rounds 5]

Batch 1, one token at a time, a static cache of 256 positions.  ``inductor`` is ``torch.compile(model)``; ``w4a16`` is
``recipes.rtn(4, group_size=128)`` compiled with ``backend="mmqc"``, its head in floating point; ``w4a16 head8`` has an 8-bit head.
Each way is a process of its own.  Those of a dtype are alive at once (12 GB) and timed in turns, so that a busy machine is busy
for all of them; float32 comes first, then bfloat16.  A figure is the median of its tokens.  ``floor_ms`` is the weights that a
token reads, in bytes, over the machine's read bandwidth.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
DTYPES = ("float32", "bfloat16")
METHODS = ("inductor", "w4a16", "w4a16 head8")
WAYS = [f"{method} {dtype}" for method in METHODS for dtype in DTYPES]
CACHE, PROMPT, TOKENS, THREADS = 256, 8, 8, 2
TEXT: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1e6},
}
VISION = {"depth": 1, "embed_dim": 64, "hidden_size": 1536, "num_heads": 4, "mlp_ratio": 1, "patch_size": 14}  # unused


def model_of(method: str, dtype: str, layers: int) -> Any:
    """The model as it is decoded with."""
    import transformers

    import mmqc

    text = {**TEXT, "num_hidden_layers": layers, "tie_word_embeddings": True}
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=VISION, tie_word_embeddings=True)
    auto: Any = transformers.AutoModelForImageTextToText
    model = auto.from_config(config, dtype=getattr(torch, dtype)).eval()
    if method != "inductor":
        head_bits = 8 if method.endswith("head8") else None
        mmqc.quantize_(model, mmqc.recipes.rtn(4, group_size=128, head_bits=head_bits), progress=False)
    return model


def weight_bytes(model: Any) -> dict[str, int]:
    """Bytes of the weights that one token reads, and the share of the head."""
    tensors = lambda module: [*module.parameters(), *module.buffers()]  # noqa: E731
    of = lambda module: sum(t.numel() * t.element_size() for t in tensors(module))  # noqa: E731
    layers, head = of(model.model.language_model.layers), of(model.lm_head)
    return {"bytes": layers + head, "head_bytes": head}


class Decoder:
    """One token after the other into a static cache."""

    def __init__(self, model: Any) -> None:
        from transformers import StaticCache

        self.model, self.at = model, 0
        self.cache = StaticCache(config=model.config, max_cache_len=CACHE)

    def step(self, forward: Any, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the last of ``tokens`` [1, n]."""
        positions = torch.arange(self.at, self.at + tokens.shape[1]).expand(3, 1, -1)
        self.at += tokens.shape[1]
        return forward(
            input_ids=tokens, position_ids=positions, past_key_values=self.cache, use_cache=True, logits_to_keep=1
        ).logits


def child(way: str, layers: int) -> None:
    """Build and compile one way, then answer every line on stdin with the times of some tokens."""
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    method, _, dtype = way.rpartition(" ")
    model = model_of(method, dtype, layers)
    decoder, token = Decoder(model), torch.tensor([[11]])
    compiled = torch.compile(model, backend="inductor" if method == "inductor" else "mmqc", dynamic=False)
    with torch.no_grad():
        decoder.step(model, torch.arange(1, PROMPT + 1)[None])
        twin = copy.copy(decoder)
        twin.cache = copy.deepcopy(decoder.cache)
        expected = twin.step(model, token).float()
        start = time.perf_counter()
        got = decoder.step(compiled, token).float()
        facts = {"compile_seconds": time.perf_counter() - start, "against_eager": float((got - expected).norm() / expected.norm())}
        decoder.step(compiled, token)
        print(json.dumps({**facts, **weight_bytes(model)}), flush=True)
        for _ in sys.stdin:
            times = []
            for _ in range(TOKENS):
                start = time.perf_counter()
                decoder.step(compiled, token)
                times.append(time.perf_counter() - start)
            print(json.dumps(times), flush=True)


class Child:
    """A way in a process of its own."""

    def __init__(self, way: str, layers: int) -> None:
        self.way, self.times = way, list[float]()
        command = [sys.executable, "-m", "benchmarks.end_to_end.cpu_decode", "--child", way, "--layers", str(layers)]
        env = {**os.environ, "OMP_NUM_THREADS": str(THREADS)}
        self.process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.facts = self.answer()

    def answer(self) -> Any:
        """The next line that it prints."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.way} ended with {self.process.wait()}; run it alone with --child to see why")
        return json.loads(line)

    def measure(self) -> None:
        """Some more tokens."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        self.times += self.answer()

    def row(self, bandwidth: float) -> dict[str, Any]:
        """Its figures."""
        ms = statistics.median(self.times) * 1e3
        return {
            "ms_per_token": ms,
            "fastest_ms": min(self.times) * 1e3,
            "floor_ms": self.facts["bytes"] / bandwidth / 1e6,
            "gb_per_s": self.facts["bytes"] / ms / 1e6,
            "tokens": len(self.times),
            **self.facts,
        }


def read_bandwidth() -> float:
    """GB/s of a sum over half a GiB."""
    torch.set_num_threads(THREADS)
    x, times = torch.ones(2**27), []
    for _ in range(9):
        start = time.perf_counter()
        x.sum()
        times.append(time.perf_counter() - start)
    return x.nbytes / statistics.median(times) / 1e9


def measure(ways: list[str], layers: int, rounds: int) -> tuple[list[Child], list[float]]:
    """Build some ways, time them in turns; with the read bandwidth of every round."""
    children, bandwidths = [], []
    for way in ways:
        children.append(Child(way, layers))
        print(way, children[-1].facts, flush=True)
    for _ in range(rounds):
        bandwidths.append(read_bandwidth())
        for child_ in children:
            child_.measure()
    for child_ in children:
        child_.process.communicate()  # closes its stdin, which ends it
    return children, bandwidths


def cpu_name() -> str:
    """What the kernel calls it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def ratios(rows: dict[str, Any]) -> dict[str, float]:
    """How many times faster than the better ``inductor`` each quantized method is, in its better dtype."""
    best = {m: min((r["ms_per_token"] for way, r in rows.items() if way.rpartition(" ")[0] == m), default=0.0) for m in METHODS}
    return {m: best["inductor"] / best[m] for m in METHODS[1:] if best[m] and best["inductor"]}


def main() -> None:
    """Build all, measure in turns, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/cpu_decode.json")
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=WAYS)
    parser.add_argument("--layers", type=int, default=TEXT["num_hidden_layers"])
    parser.add_argument("--rounds", type=int, default=5, help=f"of {TOKENS} tokens a way")
    parser.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child, args.layers)
        return
    children: list[Child] = []
    bandwidths: list[float] = []
    for dtype in DTYPES:
        measured, rates = measure([way for way in args.ways if way.endswith(dtype)], args.layers, args.rounds)
        children, bandwidths = [*children, *measured], [*bandwidths, *rates]
    bandwidth = statistics.median(bandwidths)
    rows = {c.way: c.row(bandwidth) for c in children}
    data = {
        "command": "python -m benchmarks.end_to_end.cpu_decode",
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": THREADS,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "read_gb_per_s": bandwidth,
        "batch": 1,
        "cache": CACHE,
        "shapes": {**TEXT, "num_hidden_layers": args.layers},
        "ways": rows,
        "times_the_better_inductor": ratios(rows),
    }
    args.out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({way: round(row["ms_per_token"], 1) for way, row in rows.items()}), ratios(rows))


if __name__ == "__main__":
    main()
