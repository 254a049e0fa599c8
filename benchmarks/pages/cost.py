"""docs/results/cost.md, from benchmarks/results/{quantize_speed,kv_throughput}.json: what quantizing costs at full size, and what a
packed cache saves.

    python -m benchmarks.pages.cost
"""

from __future__ import annotations

import json
from typing import Any

from benchmarks.pages.kernel_sections import ROOT, table

NAMES = {
    "rtn": "round to nearest, W4",
    "gptq": "GPTQ, W4 a channel",
    "gptq-asymmetric": "GPTQ, W4 a channel, asymmetric inputs",
    "gptq-offload": "GPTQ, W4 a channel, offloaded",
    "awq": "AWQ, W4 g128",
    "mquant": "MQuant, W4A8",
    "resq": "ResQ, W4A4KV4",
    "learned": "learned, W2 g64",
    "gptq-part": "GPTQ again, in part",
    "awq-part": "AWQ again, in part",
}


def _by_block(r: dict[str, Any]) -> dict[str, float]:
    """Seconds of a block of either tower."""
    seconds = {name: (kind["seconds"] + kind.get("scales", 0)) / kind["blocks"] for name, kind in r["blocks"].items()}
    return {tower: next(s for name, s in seconds.items() if tower in name) for tower in ("visual", "language")}


def _figures(r: dict[str, Any]) -> list[str]:
    """Seconds and memory; of a part of the blocks only the seconds are those of the whole."""
    if "tower_blocks" in r:
        return [f"{r['whole_seconds']:.0f}*", "", "", ""]
    return [f"{r['seconds']:.0f}", f"{r['peak_gpu_gb']:.1f}", f"{r['peak_over_model']:.2f}", f"{r['peak_host_gb']:.1f}"]


def quantizing(run: dict[str, Any]) -> list[str]:
    """Seconds and memory of every recipe."""
    rows = [
        [
            NAMES[name],
            f"{r['samples']} x {r['tokens']:,}" if r["samples"] else "none",
            *_figures(r),
            r["commit"],
        ]
        for name, r in run["recipes"].items()
        if "seconds" in r
    ]
    shortened = [
        f"    {r['command']}  # {r['seconds']:.0f} s, {of['visual']:.1f} a block of the tower, {of['language']:.1f} a layer"
        for r in run["recipes"].values()
        if "tower_blocks" in r and (of := _by_block(r))
    ]
    head = ("recipe", "samples x tokens", "seconds", "GPU, GB", "over the weights", "host, GB", "commit")
    return [
        "## Quantizing",
        "",
        f"The whole of `mmqc.quantize_` on a model of Qwen2-VL-7B's shape (both towers, random weights, bf16), {run['gpu']}, torch "
        f"{run['torch']}; `{run['command']}`. Memory is the peak of the process.",
        "",
        *table(head, rows),
        "\\* the sum of its parts: some blocks of each tower were run, which all do the same work, and the others are added.",
        "",
        *shortened,
        "",
    ]


def decoding(run: dict[str, Any]) -> list[str]:
    """Throughput within a budget."""
    rows = [
        [
            str(r["bits"]),
            r["way"],
            f"{r['budget']:g}",
            str(r["batch"]),
            f"{r['cache']:.1f}",
            f"{1e3 * r['step']:.1f}",
            f"{r['throughput']:,.0f}",
        ]
        for r in run["rows"]
        if r["throughput"]
    ]
    s = run["settings"]
    ratios = [f"* {ratio:.1f} x: {name}" for name, ratio in run["over_16_bits"].items() if name.startswith("1 bit")]
    return [
        "## Decoding within a memory budget",
        "",
        f"InternVL2.5-8B's decoder, random weights, {s['visual']:,} visual and {s['text']} text tokens a sequence, {s['tokens']} "
        f"more to come; the largest batch whose cache and activations fit. {run['device']}, torch {run['torch']}, commit "
        f"{run['commit']}; `{run['command']}`. 16 bits is transformers' cache: `dynamic` its default, the others its static one.",
        "",
        *table(("bits", "way", "budget, GB", "batch", "cache, GB", "ms a step", "tokens/s"), rows),
        "Throughput at 1 bit over 16 bits:",
        "",
        *ratios,
    ]


def main() -> None:
    """Write the page."""
    lines = ["# Time and memory at full size", "", "Written by `python -m benchmarks.pages.cost`; do not edit.", ""]
    for name, part in {"quantize_speed": quantizing, "kv_throughput": decoding}.items():
        lines += part(json.loads((ROOT / f"benchmarks/results/{name}.json").read_text(encoding="utf-8")))
    (ROOT / "docs/results/cost.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
