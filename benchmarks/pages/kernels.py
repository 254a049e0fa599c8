"""docs/results/kernels.md and its figures from the JSON files of GPU runs in benchmarks/results.

python -m benchmarks.pages.kernels
"""

from __future__ import annotations

from typing import Any

from benchmarks.pages import roofline
from benchmarks.pages.kernel_sections import ROOT, SECTIONS, by_rows, earlier, measured, table

FIGURES = {
    "weight_traffic.png": [
        "![TB/s of every linear at 1 and 16 rows, next to a copy](weight_traffic.png)",
        "",
        "Few rows: bytes that must move (weights and scales, inputs, outputs, once each) in a second. Fewer bits are fewer bytes, "
        "so a lower mark may still be the faster kernel: the times are below.",
        "",
    ],
    "roofline.png": [
        "![TFLOP/s of every linear at 2,048 and 8,192 rows, and all rows against the roofline](roofline.png)",
        "",
        "Many rows: operations in a second, next to a bf16 product of side 8,192, measured in the same run, and to the dense rates "
        "of the data sheet. In the roofline int8 and torch's fp8 are drawn 7 % aside of fp8, which they would hide.",
        "",
    ],
}
COLUMNS = ("bf16", "int8", "int_mm", "fp8", "scaled_mm", "int4", "w4", "tinygemm", "gemlite", "humming")


def times(data: dict[str, Any]) -> list[str]:
    """Microseconds of every linear."""
    rows = [
        [name, *(f"{row[c]:.1f}" if isinstance(row.get(c), float) else "–" for c in COLUMNS)]
        for name, row in by_rows(data["microseconds"])
    ]
    return table(("linear / rows", *COLUMNS), rows)


def traffic(rows: dict[str, Any]) -> list[str]:
    """TB/s of the row kernels, as shares of a large copy and, where it was timed, of a copy of the same bytes."""
    copy, same = rows["tb_per_s"]["copy"], rows.get("same_bytes_tb_per_s", {})
    tuned = ("w ", "p/", "w/")  # other tiles, for tuning
    kernels = {k: v for k, v in rows["tb_per_s"].items() if "quantize" in k and not any(t in k for t in tuned)}
    head = ("kernel / width", "TB/s", "of a copy of 1 GiB")
    if not same:
        return table(head, [[k, f"{v:.2f}", f"{v / copy:.0%}"] for k, v in kernels.items()])
    share = lambda k, v: f"{v / same[k]:.0%} of {same[k]:.2f}" if k in same else ""  # noqa: E731
    return table(
        (*head, "of a copy of the same bytes"), [[k, f"{v:.2f}", f"{v / copy:.0%}", share(k, v)] for k, v in kernels.items()]
    )


def chain(rows: dict[str, Any]) -> list[str]:
    """Microseconds of norm, quantize, linear; a way that was not timed everywhere leaves a gap."""
    times = {k: v for k, v in rows["microseconds"].items() if k.startswith("chain ")}
    ways = list(dict.fromkeys(way for row in times.values() for way in row))
    cells = [[k.removeprefix("chain "), *(f"{row[w]:.0f}" if w in row else "" for w in ways)] for k, row in times.items()]
    return table(("N x K / rows", *ways), cells)


def one_row(rows: dict[str, Any]) -> list[str]:
    """Microseconds of the transforms of a decode step; nothing where they were not timed."""
    times = {k: v for k, v in rows["microseconds"].items() if k.startswith("hadamard_quantize ")}
    ways = list(dict.fromkeys(way for row in times.values() for way in row))
    cells = [[k, *(f"{row[w]:.1f}" if w in row else "" for w in ways)] for k, row in times.items()]
    text = "One row, microseconds, cut into slices or by one program; with silu and a second operand in front of it or without."
    return [text, "", *table(("width / rows", *ways), cells)] if cells else []


def sanitized(data: dict[str, Any] | None) -> list[str]:
    """What memcheck and racecheck said of every kernel; nothing where they never ran."""
    if data is None:
        return []
    columns = ("alone", "memcheck", "racecheck")
    kernels: dict[str, dict[str, str]] = data["kernels"]
    count = lambda kind, c: sum(v[c].startswith(kind) for v in kernels.values())  # noqa: E731
    kinds = [k for k in ("clean", "role", "warnings", "errors", "skipped") if any(count(k, c) for c in columns)]
    notes = dict.fromkeys(
        f"* {c}{'' if v[c].startswith('skipped') else f', {name}'}: {v[c]}"
        for c in columns
        for name, v in kernels.items()
        if v[c] != "clean"
    )
    planted = ", ".join(f"{tool}: {how}" for tool, how in data["planted"].items())
    return [
        "## Memory and races",
        "",
        f"`{data['command']}`: {len(kernels)} calls, at least one of every kernel, on small odd shapes, next to their references "
        f"and under compute-sanitizer {data['compute_sanitizer'] or '(not found)'}; {data['device']}, torch {data['torch']}, "
        f"Triton {data['triton']}. {f'An error planted for each tool: {planted}.' if planted else ''}{earlier(data)}",
        "",
        *table(("calls", *columns), [[kind, *(str(count(kind, c)) for c in columns)] for kind in kinds]),
        *([*notes, ""] if notes else []),
        *([ROLES, ""] if any(f"{kind}_kernel+" in note for note in notes for kind in ("pingpong", "wgmma")) else []),
    ]


ROLES = (
    "What racecheck reports of the warp-specialised kernels is the byte by which Triton tells a warp its role: in their machine "
    "code the address above is that load, behind a barrier of all warps that the tool does not follow. The rings that these "
    "kernels fill and empty themselves are tested by `tests/support/warp_simulator.py`."
)
GENERATE = ("decode, tokens/s", "first token, ms", "cold, s")


def generated(ways: dict[str, Any]) -> list[list[str]]:
    """Rows of what ``generate`` takes."""
    return [
        [way, f"{r['tokens_per_second']:.0f}", f"{1e3 * r['first_token_seconds']:.0f}", f"{r['cold_seconds']:.0f}"]
        for way, r in ways.items()
        if "failed" not in r
    ]


def on_cpu(cpu: dict[str, Any]) -> list[str]:
    """Decoding on the CPU."""
    rows = [
        [way, f"{r['ms_per_token']:.0f}", f"{r['bytes'] / 1e9:.2f}", f"{r['gb_per_s']:.1f}", f"{r['floor_ms']:.0f}"]
        for way, r in cpu["ways"].items()
    ]
    return [
        "## Decoding on two CPU cores",
        "",
        f"`{cpu['command']}`: {cpu['cpu']}, {cpu['threads']} threads, torch {cpu['torch']}, a decoder of Qwen2-VL-2B's shape with "
        f"random weights, batch 1, medians; reading reaches {cpu['read_gb_per_s']:.0f} GB/s. *head8*: the output head has 8 bits; "
        f"otherwise it is the largest part of what is read. Commit {cpu['commit']}.",
        "",
        *table(("weights", "ms a token", "GB of weights", "GB/s", "floor, ms"), rows),
        "Times of the better dtype of `torch.compile`, in this run and in others:",
        "",
        *table(
            ("CPU, commit", *cpu["times_the_better_inductor"]),
            [
                [f"{run['cpu']}, {run['commit']}", *(f"{ratio:.2f}" for ratio in run["times_the_better_inductor"].values())]
                for run in (cpu, *cpu["other_runs"])
            ],
        ),
    ]


def linears(linear: dict[str, Any], figures: list[str]) -> list[str]:
    """The products: pictures, microseconds, ratios."""
    return [
        "## Linears",
        "",
        *[line for name, lines in FIGURES.items() if name in figures for line in lines],
        f"Microseconds, the linears of Qwen2-VL-7B; `{linear['command']}`. *int8*, *fp8*, *int4* (W4A8) and *w4* (W4A16, groups "
        "of 128) are ours; *int_mm* and *scaled_mm* are torch's, without an epilogue for int_mm. "
        + measured("linear", linear)
        + earlier(linear),
        "",
        *times(linear),
        *table(("ratio (geometric mean) or rate", "value"), [[k, f"{v:.2f}"] for k, v in linear["summary"].items()]),
    ]


def one_pass(rows: dict[str, Any]) -> list[str]:
    """The kernels that make one pass over the rows, and what they are between a norm and a linear."""
    lines = [
        "## One pass over the rows",
        "",
        f"4,096 rows; TB/s of the bytes that must move. A copy of 1 GiB reaches {rows['tb_per_s']['copy']:.2f} TB/s; a copy of the "
        "same bytes reads and writes what the kernel does, so launch and ramp-up cost it as much. "
        f"`{rows['command']}`, {rows['device']}. {measured('row_kernels', rows)}",
        "",
        *traffic(rows),
    ]
    for other in rows.get("other_runs", []):
        where, copy = f"On {other['device']} at commit {other['commit']}", other["tb_per_s"]["copy"]
        lines += [f"{where}, where a copy of 1 GiB reaches {copy:.2f}:", "", *traffic(other)]
    return [
        *lines,
        *one_row(rows),
        "## Norm, quantize, linear",
        "",
        "Microseconds for 6,417 rows: one static scale, a scale per modality by mask (of earlier runs: by split index, and a scale "
        "per token in the norm's kernel), and a scale per token by torch operations in front of the product, eager or, where "
        f"there is a column for it, through `torch.compile`; `{rows['chain']['command']}`, commit {rows['chain']['commit']}.",
        "",
        *chain(rows),
    ]


def end_to_end(e2e: dict[str, Any]) -> list[str]:
    """What ``generate`` takes, and the device's own part of it."""
    return [
        "## End to end",
        "",
        f"`{e2e['command']}`: {e2e['gpu']}, a Qwen2-VL-7B-shaped model with random weights, batch 1, {e2e['context']} tokens of "
        "context (one image of 840 x 840), `generate` with a static cache and a compiled step in CUDA graphs; *loop*: "
        '`custom_generate=mmqc.compiled_loop, prefill="graphs"`. The quantized models have a head of 8 bits. '
        f"Commit {e2e['commit']}. All ways are loaded beside each other and measured in turn.",
        "",
        *table(("weights", *GENERATE), generated(e2e["ways"])),
    ]


def main() -> None:
    """Write the page."""
    linear, rows, e2e, cpu = (roofline.load(name) for name in ("linear", "row_kernels", "e2e", "cpu_decode"))
    if linear is None or rows is None or e2e is None:
        raise SystemExit("the page needs linear.json, row_kernels.json and e2e.json in benchmarks/results")
    lines = [
        "# Kernels",
        "",
        f"Written by `python -m benchmarks.pages.kernels`; do not edit. {linear['device']}, torch {linear['torch']}, Triton "
        f"{linear['triton']}. Medians, CUDA graphs, weights rotated so that the L2 cache is cold; each table is one run, but "
        "where it says otherwise.",
        "",
        *linears(linear, [path.name for path in roofline.draw()]),
        *one_pass(rows),
        *[line for name, section in SECTIONS.items() if (data := roofline.load(name)) for line in section(data)],
        *sanitized(roofline.load("sanitize")),
        *end_to_end(e2e),
        *(on_cpu(cpu) if cpu is not None else []),
    ]
    (ROOT / "docs/results/kernels.md").write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
