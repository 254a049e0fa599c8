"""docs/results/kernels.md and its figures from the JSON files of GPU runs in benchmarks/results.

python benchmarks/kernel_page.py
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import roofline

ROOT = Path(__file__).resolve().parents[1]
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
KERNELS = {
    "linear": ("pingpong_matmul*", "pingpong_tiles*", "scaled_matmul*", "weight_only_matmul*"),
    "row_kernels": ("norm_quantize*", "hadamard_*"),
    "w4a8_groups": ("group_scaled_matmul*",),
    "kv_attention": ("kv_attention*", "kv_combine*", "kv_pack*", "kv_words*"),
    "kv_tokens": ("kv_token_attention*", "kv_round_keys*", "kv_pack*", "int4_codes*"),
    "epilogues": ("scaled_matmul*", "gated_matmul*", "activation_*", "epilogue_*", "hadamard_*"),
    "mixed_linear": ("mixed_*", "pingpong_*", "quantize_per_token*", "unpack_weight*"),
    "kv_rows": ("kv_rows_*", "kv_token_attention*", "int4_codes*"),
}
SAME = "; a copy of the same bytes reads and writes what the kernel does, so launch and ramp-up cost it as much"
COLUMNS = ("bf16", "int8", "int_mm", "fp8", "scaled_mm", "int4", "w4", "tinygemm", "gemlite", "humming")


def measured(name: str, data: dict[str, Any]) -> str:
    """The commit of a run, by default that of its file, and whether the kernels are other ones by now."""
    git = lambda *args: subprocess.run(["git", *args], cwd=ROOT, check=False, capture_output=True, text=True)  # noqa: E731
    commit = data.get("commit") or git("log", "-1", "--format=%h", f"benchmarks/results/{name}.json").stdout
    commit = commit.strip()[:7]
    changed = git(
        "diff", "--quiet", commit, "--", *(f":(glob)mmqc/kernels/{pattern}.py" for pattern in KERNELS[name])
    ).returncode
    return f"Commit {commit}{'; the kernels have changed since, and were not measured again.' if changed else '.'}"


def earlier(data: dict[str, Any]) -> str:
    """Which rows of a table are another run's."""
    other = data.get("earlier")
    if other is None:
        return ""
    return f" Rows {', '.join(map(str, other['rows']))}: `{other['command']}` at commit {other['commit']}, a run of its own."


def table(head: tuple[str, ...], rows: list[list[str]]) -> list[str]:
    """A Markdown table whose columns but the first are numbers."""
    return [
        f"| {' | '.join(head)} |",
        f"|---|{'--:|' * (len(head) - 1)}",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
    ]


def by_rows(found: dict[str, Any]) -> list[tuple[str, Any]]:
    """In the order of the number of rows, which a name ends in: "lm.qkv/16"."""
    return sorted(found.items(), key=lambda item: int(item[0].rsplit("/", 1)[1]))


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
        (*head, "of a copy of the same bytes"),
        [[k, f"{v:.2f}", f"{v / copy:.0%}", share(k, v)] for k, v in kernels.items()],
    )


def chain(rows: dict[str, Any]) -> list[str]:
    """Microseconds of norm, quantize, linear; a way that was not timed everywhere leaves a gap."""
    times = {k: v for k, v in rows["microseconds"].items() if k.startswith("chain ")}
    ways = list(dict.fromkeys(way for row in times.values() for way in row))
    cells = [
        [k.removeprefix("chain "), *(f"{row[w]:.0f}" if w in row else "" for w in ways)] for k, row in times.items()
    ]
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
    kinds = [k for k in ("clean", "warnings", "errors", "skipped") if any(count(k, c) for c in columns)]
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
        f"Triton {data['triton']}. {f'An error planted for each tool: {planted}.' if planted else ''}",
        "",
        *table(("calls", *columns), [[kind, *(str(count(kind, c)) for c in columns)] for kind in kinds]),
        *([*notes, ""] if notes else []),
        *([ROLES, ""] if any("pingpong_kernel+" in note for note in notes) else []),
    ]


ROLES = (
    "What racecheck reports of the warp-specialised kernels is the byte by which Triton tells a warp its role: in their machine "
    "code the address above is that load, behind a barrier of all warps that the tool does not follow. The rings that these "
    "kernels fill and empty themselves are tested by `tests/warp_simulator.py`."
)
GENERATE = ("decode, tokens/s", "first token, ms", "cold, s")


def generated(ways: dict[str, Any]) -> list[list[str]]:
    """Rows of what ``generate`` takes."""
    return [
        [
            way,
            f"{r['tokens_per_second']:.0f}",
            f"{1e3 * r['first_token_seconds']:.0f}",
            f"{r['cold_seconds']:.0f}",
        ]
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
        "otherwise it is the largest part of what is read.",
        "",
        *table(("weights", "ms a token", "GB of weights", "GB/s", "floor, ms"), rows),
    ]


def group_scales(data: dict[str, Any]) -> list[str]:
    """W4A8 and W8A8 with a scale for every 128 input channels: microseconds and ratios."""
    ways = ("bf16", "w8_channel", "w4_channel", "w8_float", "w8_integer", "w4_float", "w4_integer", "w4_progressive")
    rows = [
        [name.removeprefix("groups "), *(f"{row[w]:.1f}" if w in row else "–" for w in ways)]
        for name, row in by_rows(data["microseconds"])
    ]
    ratios = [[k, f"{v:.2f}"] for k, v in data["summary"].items() if "lowest" not in k]
    return [
        "## Scales of groups",
        "",
        f"Int8 activations, one scale for 128 input channels, as floats or as integers (Integer Scale), microseconds; "
        f"`{data['command']}`, {data['device']}. Both forms pay a pass over the accumulator for every group, which one scale a "
        "channel does not; the ratios are below. Why they come out so close is counted, not measured: by NVIDIA's tables of "
        "throughput an integer multiply-add issues at half the rate of a float one on Hopper, which is as many issue slots as the "
        "conversion that integers save. *w4_progressive*: integer scales of 8 bits, folded into the weight where it is unpacked "
        "once: the product then knows no groups. W8A8 was not tuned for all shapes. "
        + measured("w4a8_groups", data)
        + earlier(data),
        "",
        *table(("linear / rows", *ways), rows),
        *table(("ratio of times, geometric mean", "value"), ratios),
    ]


def packed_cache(data: dict[str, Any]) -> list[str]:
    """Decode attention over packed keys and values next to torch's bf16 kernels."""
    shape, times = data["shape"], data["microseconds"]
    names = ("bf16", "packed", "pack")
    rows = [[f"{name}: {way}", f"{t:.1f}"] for name in names for way, t in times.get(name, {}).items()]
    return [
        "## Attention over a packed cache",
        "",
        f"One layer's decode attention, batch {shape['batch']}, {shape['heads']} KV heads of {shape['width']} with "
        f"{shape['group']} query heads each, {shape['visual']} packed visual and {shape['text']} text tokens, microseconds; "
        f"`{data['command']}`, "
        f"{data['device']}. *pack* is done once, after the prompt. {measured('kv_attention', data)}",
        "",
        *table(("kernel", "microseconds"), rows),
        *table(("ratio", "value"), [[k, f"{v:.2f}"] for k, v in data["summary"].items()]),
        *[line for other in data.get("other_runs", []) for line in packed_ratios(other)],
    ]


def packed_ratios(data: dict[str, Any]) -> list[str]:
    """The same on another device, in short."""
    best = min(data["microseconds"]["bf16"].values())
    packed = [f"{way} {t:.1f}" for way, t in data["microseconds"]["packed"].items()]
    return [
        f"On {data['device']} at commit {data['commit']}, where memory is slower and bf16 with it: the best bf16 kernel "
        f"{best:.1f}, {', '.join(packed)} microseconds.",
        "",
        *table(("ratio", "value"), [[k, f"{v:.2f}"] for k, v in data["summary"].items()]),
    ]


def rounded_text(data: dict[str, Any]) -> list[str]:
    """Attention to text in 8 and 4 bits, and keys rounded for queries, next to plain torch code."""
    shape, times = data["shape"], data["microseconds"]
    names = ("bf16", "text", "rounded keys", "plain torch")
    rows = [[f"{name}: {way}", f"{t:.1f}"] for name in names for way, t in times.get(name, {}).items()]
    return [
        "## Rounded text, and keys rounded for queries",
        "",
        f"One layer, batch {shape['batch']}, {shape['heads']} KV heads of {shape['width']} with {shape['group']} query heads each, "
        f"{shape['text']} text tokens with scales for {shape['block']} channels (every decode step), or {shape['visual']} visual "
        f"keys (once, after the prompt), microseconds; `{data['command']}`, {data['device']}. {measured('kv_tokens', data)}",
        "",
        *table(("kernel", "microseconds"), rows),
        *table(("ratio", "value"), [[k, f"{v:.2f}"] for k, v in data["summary"].items()]),
    ]


def mixed(data: dict[str, Any]) -> list[str]:
    """The linear in two precisions next to cuBLAS bf16: microseconds, quantization of the input included."""
    times = data["times"]
    ways = [w for w in dict.fromkeys(way for row in times.values() for way in row) if not w.startswith("unpack ")]
    rows = [[name, *(f"{row[w]:.0f}" if w in row else "–" for w in ways)] for name, row in by_rows(times)]
    return [
        "## Two precisions",
        "",
        "ResQ's linear: 7/8 of the channels in 4 bits, 1/8 in 8, inputs quantized by token; microseconds. *mixed*: quantization "
        "and product, low weights packed in 4 bits and written out with the high ones in every call; *kept*: the weight as it is "
        "written out, from the start; *product* is with that one alone. "
        f"`{data['command']}`, {data['device']}, torch {data['torch']}. {measured('mixed_linear', data)}",
        "",
        *table(("linear / rows", *ways), rows),
        *table(("ratio", "value"), [[k, f"{v:.2f}"] for k, v in data["summary"].items()]),
    ]


def epilogues(data: dict[str, Any]) -> list[str]:
    """What stands between two linears, in the epilogue and behind it."""
    found = {k.removeprefix("epilogue "): t for k, t in data["microseconds"].items() if k.startswith("epilogue ")}
    rows = [
        [name, f"{t['unfused']:.1f}", f"{t['fused']:.1f}", f"{t['unfused'] / t['fused']:.2f}"]
        for name, t in by_rows(found)
    ]
    return [
        "## Epilogues",
        "",
        "From the codes of one linear to those of the next, as compiled with `fuse_epilogues` and without, microseconds: *vit* has "
        f"5,120 outputs of 1,280 inputs, *lm* twice 18,944 of 3,584, *lm.down* is up to the codes behind the norm; "
        f"`{data['command']}`, {data['device']}. " + measured("epilogues", data),
        "",
        *table(("linear, activation / rows", "unfused", "fused", "ratio"), rows),
    ]


def byte_rows(data: dict[str, Any]) -> list[str]:
    """Decode attention to keys and values in rows of bytes, ResQ's, next to torch's bf16 kernels."""
    shape, times, tuned = data["shape"], data["microseconds"], data["tuned"]
    rows = []
    for name, best in tuned.items():
        bf16 = min(times[f"bf16/{name.rsplit('/', 1)[1]}"].values())
        us, c = best["microseconds"], best["config"]
        tile = f"{c['tokens']} tokens, {c['warps']} warps, {c['per_sm']} programs"
        rows.append([name, tile, f"{us:.1f}", f"{bf16:.1f}", f"{times[name]['plain torch']:.0f}", f"{bf16 / us:.2f}"])
    return [
        "## Rows of bytes",
        "",
        f"One layer's decode attention, {shape['heads']} KV heads of {shape['width']} with {shape['group']} query heads each, "
        f"{shape['tokens']} tokens, microseconds: 4 bits with one eighth of the channels at 8, and all in one width. The tiles are "
        f"the fastest of a list, which are what the kernel takes; bf16 is torch's fastest. `{data['command']}`, {data['device']}. "
        + measured("kv_rows", data),
        "",
        *table(("bits / batch", "tile", "ours", "bf16", "plain torch", "bf16 / ours"), rows),
    ]


SECTIONS = {
    "epilogues": epilogues, "w4a8_groups": group_scales, "kv_attention": packed_cache, "kv_tokens": rounded_text,
    "kv_rows": byte_rows, "mixed_linear": mixed,
}  # fmt: skip


def main() -> None:
    """Write the page."""
    linear, rows, e2e = (roofline.load(name) for name in ("linear", "row_kernels", "e2e"))
    if linear is None or rows is None or e2e is None:
        raise SystemExit("the page needs linear.json, row_kernels.json and e2e.json in benchmarks/results")
    figures = [path.name for path in roofline.draw()]
    lines = [
        "# Kernels",
        "",
        f"Written by `python benchmarks/kernel_page.py`; do not edit. {linear['device']}, torch {linear['torch']}, Triton "
        f"{linear['triton']}. Medians, CUDA graphs, weights rotated so that the L2 cache is cold; each table is one run, but "
        "where it says otherwise.",
        "",
        "## Linears",
        "",
        *(FIGURES["weight_traffic.png"] if "weight_traffic.png" in figures else []),
        *(FIGURES["roofline.png"] if "roofline.png" in figures else []),
        f"Microseconds, the linears of Qwen2-VL-7B; `{linear['command']}`. *int8*, *fp8*, *int4* (W4A8) and *w4* (W4A16, groups "
        "of 128) are ours; *int_mm* and *scaled_mm* are torch's, without an epilogue for int_mm. "
        + measured("linear", linear)
        + earlier(linear),
        "",
        *times(linear),
        *table(("ratio (geometric mean) or rate", "value"), [[k, f"{v:.2f}"] for k, v in linear["summary"].items()]),
        "## One pass over the rows",
        "",
        f"4,096 rows; TB/s of the bytes that must move. A copy of 1 GiB reaches {rows['tb_per_s']['copy']:.2f} TB/s; a copy of the "
        "same bytes reads and writes what the kernel does, so launch and ramp-up cost it as much. "
        + f"`{rows['command']}`, {rows['device']}. {measured('row_kernels', rows)}",
        "",
        *traffic(rows),
        *[
            line
            for other in rows.get("other_runs", [])
            for line in [
                f"On {other['device']} at commit {other['commit']}, where a copy of 1 GiB reaches {other['tb_per_s']['copy']:.2f}:",
                "",
                *traffic(other),
            ]
        ],
        *one_row(rows),
        "## Norm, quantize, linear",
        "",
        "Microseconds for 6,417 rows: one static scale, a scale per modality by mask or by split index, a scale per token in "
        "the norm's kernel, and a scale per token by torch operations in front of the product, eager (not compiled) or, where "
        f"there is a column for it, through `torch.compile`; `{rows['chain']['command']}`, commit {rows['chain']['commit']}.",
        "",
        *chain(rows),
        *[line for name, section in SECTIONS.items() if (data := roofline.load(name)) for line in section(data)],
        *sanitized(roofline.load("sanitize")),
        "## End to end",
        "",
        f"`{e2e['command']}`: {e2e['gpu']}, a Qwen2-VL-7B-shaped model with random weights, batch 1, {e2e['context']} tokens of "
        "context (one image of 840 x 840), `generate` with a static cache and a compiled step in CUDA graphs; *loop*: "
        '`custom_generate=mmqc.compiled_loop, prefill="graphs"`. The quantized models have a head of 8 bits. '
        f"Commit {e2e['commit']}.",
        "",
        *table(("weights", *GENERATE), generated(e2e["ways"])),
        "Other runs, on other machines of the kind; before 077a1cc without CUDA graphs for the prompt. Between two steps there is "
        "Python, so the "
        "host counts, and what is beside it: here the processes of the ways that are timed later.",
        "",
        *table(
            ("weights", *GENERATE, "commit"),
            [[*row, run["commit"]] for run in e2e["other_runs"] for row in generated(run["ways"])],
        ),
        f"What of it is the device's own time, by the profiler; {' and '.join(e2e['waits'])} at commit {e2e['waits_commit']}, "
        "the others before:",
        "",
        *table(
            ("weights", "first token, ms", "kernels", "a token, ms", "kernels"),
            [[way, *map(str, times.values())] for way, times in e2e["device_time"].items()],
        ),
    ]
    cpu = roofline.load("cpu_decode")
    if cpu is not None:
        lines += on_cpu(cpu)
    (ROOT / "docs/results/kernels.md").write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
