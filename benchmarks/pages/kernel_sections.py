"""Sections of the page of kernels, one for each file of results but the linears, rows and generation of kernels.py itself."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

KERNELS = {
    "linear": ("pingpong_matmul*", "pingpong_tiles*", "packed_*", "scaled_matmul*", "weight_only_matmul*"),
    "row_kernels": ("quantize", "norm_quantize*", "hadamard_*"),
    "w4a8_groups": ("group_scaled_matmul*",),
    "kv_attention": ("kv_attention*", "kv_combine*", "kv_pack*", "kv_words*"),
    "kv_tokens": ("kv_token_attention*", "kv_round_keys*", "kv_pack*", "int4_codes*"),
    "epilogues": ("scaled_matmul*", "gated_matmul*", "activation_*", "epilogue_*", "hadamard_*"),
    "mixed_linear": ("mixed_*", "pingpong_*", "packed_*", "quantize_per_token*", "unpack_weight*"),
    "linear_few": ("scaled_matmul*", "product*"),
    "some_rows": ("packed_*", "byte_*", "scaled_matmul*", "weight_only_matmul*", "product*"),
    "kv_rows": ("kv_rows_*", "kv_token_attention*", "int4_codes*"),
}


def measured(name: str, data: dict[str, Any]) -> str:
    """The commit of a run, by default that of its file, and whether the kernels are other ones by now."""
    git = lambda *args: subprocess.run(["git", *args], cwd=ROOT, check=False, capture_output=True, text=True)  # noqa: E731
    commit = data.get("commit") or git("log", "-1", "--format=%h", f"benchmarks/results/{name}.json").stdout
    commit = commit.strip()[:7]
    changed = git(
        "diff", "--quiet", commit, "--", *(f":(glob)mmqc/kernels/**/{pattern}.py" for pattern in KERNELS[name])
    ).returncode
    return f"Commit {commit}{'; the kernels have changed since, and were not measured again.' if changed else '.'}"


def earlier(data: dict[str, Any]) -> str:
    """Which rows of a table are another run's."""
    other = data.get("earlier")
    if other is None:
        return ""
    return f" Rows {', '.join(map(str, other['rows']))}: `{other['command']}` at commit {other['commit']}, a run of its own."


def table(head: Sequence[str], rows: Iterable[Sequence[str]], column: str = "--:") -> list[str]:
    """A Markdown table whose columns but the first are numbers (``---``: text)."""
    return [f"| {' | '.join(head)} |", f"|---|{f'{column}|' * (len(head) - 1)}", *(f"| {' | '.join(row)} |" for row in rows), ""]


def by_rows(found: dict[str, Any]) -> list[tuple[str, Any]]:
    """In the order of the number of rows, which a name ends in: "lm.qkv/16"."""
    return sorted(found.items(), key=lambda item: int(item[0].rsplit("/", 1)[1]))


def ratios(data: dict[str, Any]) -> list[str]:
    """The summary of a run."""
    return table(("ratio", "value"), [[k, f"{v:.2f}"] for k, v in data["summary"].items()])


def by_way(data: dict[str, Any], names: tuple[str, ...]) -> list[str]:
    """Microseconds of every way of these kernels, and the summary."""
    rows = [[f"{name}: {way}", f"{t:.1f}"] for name in names for way, t in data["microseconds"].get(name, {}).items()]
    return [*table(("kernel", "microseconds"), rows), *ratios(data)]


def group_scales(data: dict[str, Any]) -> list[str]:
    """W4A8 and W8A8 with a scale for every 128 input channels: microseconds and ratios."""
    ways = ("bf16", "w8_channel", "w4_channel", "w8_float", "w8_integer", "w4_float", "w4_integer", "w4_progressive")
    rows = [
        [name.removeprefix("groups "), *(f"{row[w]:.1f}" if w in row else "–" for w in ways)]
        for name, row in by_rows(data["microseconds"])
    ]
    means = [[k, f"{v:.2f}"] for k, v in data["summary"].items() if "lowest" not in k]
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
        *table(("ratio of times, geometric mean", "value"), means),
    ]


def packed_cache(data: dict[str, Any]) -> list[str]:
    """Decode attention over packed keys and values next to torch's bf16 kernels."""
    shape = data["shape"]
    return [
        "## Attention over a packed cache",
        "",
        f"One layer's decode attention, batch {shape['batch']}, {shape['heads']} KV heads of {shape['width']} with "
        f"{shape['group']} query heads each, {shape['visual']} packed visual and {shape['text']} text tokens, microseconds; "
        f"`{data['command']}`, "
        f"{data['device']}. *pack* is done once, after the prompt. {measured('kv_attention', data)}",
        "",
        *by_way(data, ("bf16", "packed", "pack")),
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
        *ratios(data),
    ]


def rounded_text(data: dict[str, Any]) -> list[str]:
    """Attention to text in 8 and 4 bits, and keys rounded for queries, next to plain torch code."""
    shape = data["shape"]
    return [
        "## Rounded text, and keys rounded for queries",
        "",
        f"One layer, batch {shape['batch']}, {shape['heads']} KV heads of {shape['width']} with {shape['group']} query heads each, "
        f"{shape['text']} text tokens with scales for {shape['block']} channels (every decode step), or {shape['visual']} visual "
        f"keys (once, after the prompt), microseconds; `{data['command']}`, {data['device']}. {measured('kv_tokens', data)}",
        "",
        *by_way(data, ("bf16", "text", "rounded keys", "plain torch")),
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


def mixed(data: dict[str, Any]) -> list[str]:
    """The linear in two precisions next to cuBLAS bf16: microseconds, quantization of the input included."""
    times = data["times"]
    ways = [w for w in dict.fromkeys(way for row in times.values() for way in row) if not w.startswith("unpack ")]
    rows = [[name, *(f"{row[w]:.0f}" if w in row else "–" for w in ways)] for name, row in by_rows(times)]
    return [
        "## Two precisions",
        "",
        "ResQ's linear: 7/8 of the channels in 4 bits, 1/8 in 8, inputs quantized by token; microseconds. *mixed*: quantization "
        "and product, low weights packed in 4 bits, unpacked on the way or written out first, as tuned; *kept*: the weight as "
        "it is written out, from the start; *product* is with that one alone. "
        f"`{data['command']}`, {data['device']}, torch {data['torch']}. {measured('mixed_linear', data)}",
        "",
        *table(("linear / rows", *ways), rows),
        *ratios(data),
    ]


def epilogues(data: dict[str, Any]) -> list[str]:
    """What stands between two linears, in the epilogue and behind it."""
    found = {k.removeprefix("epilogue "): t for k, t in data["microseconds"].items() if k.startswith("epilogue ")}
    rows = [[name, f"{t['unfused']:.1f}", f"{t['fused']:.1f}", f"{t['unfused'] / t['fused']:.2f}"] for name, t in by_rows(found)]
    return [
        "## Epilogues",
        "",
        "From the codes of one linear to those of the next, as compiled with `fuse_epilogues` and without, microseconds: *vit* has "
        f"5,120 outputs of 1,280 inputs, *lm* twice 18,944 of 3,584, *lm.down* is up to the codes behind the norm; "
        f"`{data['command']}`, {data['device']}. {measured('epilogues', data)} {data['note']}",
        "",
        *table(("linear, activation / rows", "unfused", "fused", "ratio"), rows),
    ]


def some_hundred(data: dict[str, Any]) -> list[str]:
    """Rows between those of a step and those of a prompt with a large image."""
    ways = ("bf16", "int8", "int_mm", "fp8", "scaled_mm", "int4")
    rows = [[name, *(f"{t[way]:.1f}" if way in t else "–" for way in ways)] for name, t in by_rows(data["microseconds"])]
    return [
        "## Some hundred rows",
        "",
        "A batch of 64, a page of text, an image of 32 x 32 patches: microseconds, as above, with the tiles that were tuned in the "
        f"same run; `{data['command']}`, {data['device']}, torch {data['torch']}, Triton {data['triton']}. "
        f"{measured('linear_few', data)}",
        "",
        *table(("linear / rows", *ways), rows),
    ]


def some_rows(data: dict[str, Any]) -> list[str]:
    """Weights that are widened in registers, of several linears in a launch."""
    ways = ("bf16", "W4A8 by pointers", "W4A8", "W4A8, a pass", "W4A8 to codes", "W8A16 by pointers", "W8A16")
    rows = [[name, *(f"{t[way]:.1f}" if way in t else "–" for way in ways)] for name, t in by_rows(data["times_us"])]
    return [
        "## 17 to 512 rows",
        "",
        "All linears of an input, microseconds. *By pointers*: the kernels of few rows, which a package without Python has for "
        "all; the others widen weights in registers, and have linears of packed weights in one launch. *bf16*: cuBLAS, one product "
        "of all columns. Gate and up also to the codes of silu(gate) up: *a pass* behind their products, or one launch "
        "(*to codes*). "
        f"`{data['command']}`, {data['device']}, torch {data['torch']}, Triton {data['triton']}. "
        f"{measured('some_rows', data)}",
        "",
        *table(("linears / rows", *ways), rows),
    ]


SECTIONS = {
    "linear_few": some_hundred,
    "some_rows": some_rows,
    "epilogues": epilogues,
    "w4a8_groups": group_scales,
    "kv_attention": packed_cache,
    "kv_tokens": rounded_text,
    "kv_rows": byte_rows,
    "mixed_linear": mixed,
}
