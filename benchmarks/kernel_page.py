"""docs/results/kernels.md from benchmarks/results/{linear,row_kernels,e2e}.json.

python benchmarks/kernel_page.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = ("bf16", "int8", "int_mm", "fp8", "scaled_mm", "int4", "w4", "tinygemm", "gemlite", "humming")


def load(name: str) -> dict[str, Any]:
    """One result file."""
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text(encoding="utf-8"))


def table(head: tuple[str, ...], rows: list[list[str]]) -> list[str]:
    """A Markdown table whose columns but the first are numbers."""
    return [
        f"| {' | '.join(head)} |",
        f"|---|{'--:|' * (len(head) - 1)}",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
    ]


def times(data: dict[str, Any]) -> list[str]:
    """Microseconds of every linear."""
    rows = [
        [name, *(f"{row[c]:.1f}" if isinstance(row.get(c), float) else "" for c in COLUMNS)]
        for name, row in data["microseconds"].items()
    ]
    return table(("linear / rows", *COLUMNS), rows)


def main() -> None:
    """Write the page."""
    linear, rows, e2e = load("linear"), load("row_kernels"), load("e2e")
    copy = rows["tb_per_s"]["copy"]
    tuned = ("w ", "p/")  # other tiles, for tuning
    kernels = {k: v for k, v in rows["tb_per_s"].items() if "quantize" in k and not any(t in k for t in tuned)}
    lines = [
        "# Kernels",
        "",
        f"Written by `python benchmarks/kernel_page.py`; do not edit. {linear['device']}, torch {linear['torch']}, Triton "
        f"{linear['triton']}. Medians, CUDA graphs, weights rotated so that the L2 cache is cold; each table is one run.",
        "",
        "## Linears",
        "",
        f"Microseconds, the linears of Qwen2-VL-7B; `{linear['command']}`. *int8*, *fp8*, *int4* (W4A8) and *w4* (W4A16, groups "
        "of 128) are ours; *int_mm* and *scaled_mm* are torch's, without an epilogue for int_mm.",
        "",
        *times(linear),
        *table(("ratio (geometric mean) or rate", "value"), [[k, f"{v:.2f}"] for k, v in linear["summary"].items()]),
        "## One pass over the rows",
        "",
        f"4,096 rows; TB/s of the bytes that must move, as a share of a copy of 1 GiB ({copy:.2f} TB/s too). "
        f"`{rows['command']}`",
        "",
        *table(("kernel / width", "TB/s", "share"), [[k, f"{v:.2f}", f"{v / copy:.0%}"] for k, v in kernels.items()]),
        "## Norm, quantize, linear",
        "",
        "Microseconds for 6,417 rows: one static scale, a scale per modality by mask or by split index, a scale per token in "
        "the norm's kernel, and the same with eager torch operations, not compiled, in front of the product.",
        "",
        *table(
            ("N x K / rows", *next(iter(rows["microseconds"].values()))),
            [[k.removeprefix("chain "), *(f"{t:.0f}" for t in v.values())] for k, v in rows["microseconds"].items()],
        ),
        "## End to end",
        "",
        f"`{e2e['command']}`: {e2e['gpu']}, a Qwen2-VL-7B-shaped model with random weights, batch 1, {e2e['context']} tokens of "
        f"context, `generate` with a static cache and a compiled step in CUDA graphs. {e2e.get('note', '')}",
        "",
        *table(
            ("weights", "decode, tokens/s", "first token, ms", "cold, s"),
            [
                [
                    way,
                    f"{r['tokens_per_second']:.0f}",
                    f"{1e3 * r['first_token_seconds']:.0f}",
                    f"{r['cold_seconds']:.0f}",
                ]
                for way, r in e2e["ways"].items()
                if "failed" not in r
            ],
        ),
    ]
    (ROOT / "docs/results/kernels.md").write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
