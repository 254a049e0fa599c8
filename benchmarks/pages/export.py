"""docs/results/export.md from benchmarks/results/{export_families,split_families,cpp_runner,packages,whole_package,
carry_model,package_libraries}.json.

    python -m benchmarks.pages.export

Files that are not there are left out.
"""

from __future__ import annotations

import json
from typing import Any

from benchmarks.pages.kernel_sections import ROOT, table

RESULTS = ROOT / "benchmarks/results"


def read(name: str) -> dict[str, Any] | None:
    """One file of results."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def where(run: dict[str, Any]) -> str:
    """Command, machine, versions."""
    names = {"torch": "torch", "transformers": "transformers"}
    versions = ", ".join(f"{names[k]} {run[k]}" for k in names if run.get(k))
    return f"`{run['command'].strip()}`; {run.get('machine', run['device'])}, {versions}."


def exact(value: float | None) -> str:
    """In powers of ten."""
    if value is None:
        return "–"
    if value == 0:
        return "0"
    digits, power = f"{value:.0e}".split("e")
    return f"{digits}·10{''.join('⁻⁰¹²³⁴⁵⁶⁷⁸⁹'['-0123456789'.index(c)] for c in str(int(power)))}"


def sizes(row: dict[str, Any]) -> str:
    """What may differ from the example."""
    axes = {name: set(found) for name, found in row["dynamic"].items()}
    words = []
    tokens = axes.get("input_ids", set())
    words += ["rows"] * (0 in tokens) + ["length"] * (1 in tokens)
    pixels = next((v for n, v in axes.items() if n.startswith("pixel_values")), set())
    words += ["images"] * bool(pixels) + ["grids"] * bool(axes.get("image_grid_thw"))
    return ", ".join(words)


def families(run: dict[str, Any]) -> list[str]:
    """The families of the zoo, and those that are refused."""
    good = [r for r in run["rows"] if r.get("cases")]
    rows = [
        [
            r["family"],
            str(r["nodes"]),
            sizes(r),
            f"{exact(r['error'])} ({r['cases']})",
            "refused" if "steps_refused" in r else f"compiled: {exact(r['steps_error'])}" if "steps_error" in r else "exported",
            f"{r['cpu_seconds']:.0f}",
            str(r["peak_mib"]),
        ]
        for r in good
    ]
    head = ["family", "nodes", "dynamic", "error (batches)", "vision, prefill, decode", "CPU, s", "peak, MiB"]
    why = [[r["family"], "all", r["failed"]] for r in run["rows"] if "failed" in r]
    why += [[r["family"], "all", r["refused"][0][1]] for r in run["rows"] if r.get("refused") and not r.get("cases")]
    why += [[r["family"], "vision, prefill, decode", r["steps_refused"]] for r in good if "steps_refused" in r]
    why = [
        [name, what, reason.replace("|", "\\|").removeprefix("ExportError: ").removeprefix("not exported:").strip()[:330]]
        for name, what, reason in why
    ]
    return [
        "## Families",
        "",
        f"{where(run)} Tiny random models in float32, exported from one batch. Error: ‖package − model‖ / ‖model‖ of the "
        "logits, the largest over the example and batches of sizes that no export was given, in a process without mmqc and "
        "transformers. *exported*: traced and compared with the forward on the prompt and three more tokens; *compiled*: that "
        "package was run on the same batches.",
        "",
        *table(head, rows, "---"),
        *(["", "Refused:", "", *table(["family", "program", "reason"], why, "---")] if why else []),
    ]


def split(run: dict[str, Any]) -> list[str]:
    """Families that have a vision, a prefill and a decode."""
    good = [r for r in run["rows"] if "refused" not in r]
    rows = [[r["family"], exact(r["error"]), str(r["cases"])] for r in good]
    why = [[r["family"], r["refused"].replace("|", "\\|")] for r in run["rows"] if "refused" in r]
    return [
        "## Vision, prefill and decode, before any trace",
        "",
        f"{where(run)} {len(good)} of {len(run['rows'])} families: the modules that become programs against the model's forward, "
        "in eager mode, on the prompt and three more tokens of the example and of batches of other sizes with padding.",
        "",
        *table(["family", "error", "batches"], rows, "---"),
        "",
        "Refused: these have the whole forward alone (`model`).",
        "",
        *table(["family", "reason"], why, "---"),
    ]


def runner(run: dict[str, Any]) -> list[str]:
    """The C++ program."""
    rows = [
        [
            r["model"],
            f"{r['same_answers']} of {r['questions']}",
            str(r["tokens"]),
            str(r["mib"]),
            f"{r['export_seconds']:.0f}",
            f"{max(r['peak_mib'])}",
        ]
        for r in run["rows"]
    ]
    head = ["model", "answers alike", "tokens", "package, MiB", "export, s", "peak, MiB"]
    return [
        "## The C++ program",
        "",
        f"{where(run)} The shipped sample; greedy answers of `examples/cpp_runner` to questions about images, token by token "
        "against `generate`.",
        "",
        *table(head, rows, "---"),
    ]


def of_real_widths(run: dict[str, Any]) -> list[str]:
    """Recipes in half precision, on a GPU."""
    rows = []
    for way, found in run["figures"].items():
        lengths = {name: row for name, row in found.items() if isinstance(row, dict)}
        errors = [row["relative_error"] for row in lengths.values()]
        times = [f"{row['package_ms']:.1f} / {row['compiled_ms']:.1f}" for row in lengths.values() if "package_ms" in row]
        moved = f"{found['moved_by_rounding']:.1%}"
        cells = [f"{min(errors):.1%} to {max(errors):.1%}", moved, *times, f"{found['mib']:.0f}", f"{found['export_s']:.0f}"]
        rows.append([way, *cells])
    timed = [name for name, row in lengths.items() if "package_ms" in row]
    head = ["recipe", "error", "moved by rounding", *(f"{name}: package / compiled, ms" for name in timed), "MiB", "export, s"]
    return [
        "## Two blocks and two layers of Qwen2-VL-7B's widths",
        "",
        f"{where(run)[:-1]}, commit {run['commit'][:8]}. Random weights in bfloat16, exported with prompts of up to 109 tokens. "
        f"Error: of the logits, relative to the model's own, for {', '.join(lengths)}. Moved by rounding: what rounding errors of "
        "inputs and layers move the model's own logits by. Milliseconds by the clock, one call after the other, of the package and "
        'of `torch.compile(model, backend="mmqc")`; the packages were made side by side.',
        "",
        *table(head, rows, "---"),
    ]


def whole(run: dict[str, Any]) -> list[str]:
    """A decoder of all layers, with one file of weights."""
    rows = [
        [
            f"`{r['recipe']}`",
            str(r["layers"]),
            ", ".join(r["programs"]),
            "yes" if r["fused"] else "no",
            f"{r['export_s'] / 60:.1f}",
            f"{r['package_mib']:.0f}",
            f"{r['weights_gib']:.2f}",
            f"{r['load_s']:.1f}",
            f"{r['loaded_gib']:.2f}",
            f"{r['left_behind_gib']:.2f}",
            *(f"{r[name]:.2f}" if name in r else "–" for name in ("prefill_ms", "decode_ms", "decode_graph_ms")),
            r["commit"][:8],
        ]
        for r in run["rows"]
    ]
    head = ["recipe", "layers", "programs", "fused", "export, min", "package, MiB", "weights, GiB", "loading, s", "loaded, GiB"]
    head += ["export left, GiB", "prefill of 917 tokens, ms", "decode, ms", "decode in a CUDA graph, ms", "commit"]
    return [
        "## A whole decoder with one file of weights",
        "",
        f"{where(run)} Qwen2-VL-7B's widths, random weights in bfloat16, the tower's blocks two, "
        "which these programs do not have. Milliseconds by the clock, one call after the other; the CUDA graph is of a program "
        "loaded with `run_single_threaded=True`. What export left is on the device when the model is gone. "
        "Fused: with the run-time passes ([ADR 58](../adr/0058-packages-are-fused.md)). Rows of another commit are of another "
        "machine of the same kind.",
        "",
        *table(head, rows, "---"),
    ]


def carried(run: dict[str, Any]) -> list[str]:
    """A model on two machines."""
    saved = run["saved"]
    return [
        "## Saved there, loaded here",
        "",
        f"`{run['command']}`. The sample with `recipes.mquant(4)`, quantized and saved on {saved['machine']} with torch "
        f"{saved['torch']}, loaded on {run['machine']} with torch {run['torch']}: {run['same_answers']} of "
        f"{run['questions']} answers are the same ({run['tokens']} tokens); the logits differ by at most "
        f"{exact(run['logits_error'])}, and {run['equal_to_the_bit']} of the questions' are equal to the bit.",
    ]


def libraries(run: dict[str, Any]) -> list[str]:
    """A package of one linear."""
    rows = [
        [r["compiler"], r["linked"], "yes" if "libstdc++.so.6" in r.get("needed", []) else "no", r.get("loaded", r["built"])]
        for r in run["rows"]
    ]
    return [
        "## The C++ library of a package",
        "",
        f"`{run['command']}`, torch {run['torch']}, {run['compiler']}. A compiler that is set up to link its C++ library "
        "statically brings a second one into torch's process, whose symbols mix with the first one's, and loading any package "
        "of AOTInductor ends in `std::bad_cast` or a segmentation fault. `mmqc.export` links the file that the process has "
        "loaded; the library's plain name does not do where the compiler finds an archive first.",
        "",
        *table(["compiler", "linked", "asks for libstdc++.so.6", "loading"], rows, "---"),
    ]


def main() -> None:
    lines = ["# Packages", "", "Written by `python -m benchmarks.pages.export`; do not edit."]
    parts = {
        "export_families": families,
        "split_families": split,
        "cpp_runner": runner,
        "packages": of_real_widths,
        "whole_package": whole,
        "carry_model": carried,
        "package_libraries": libraries,
    }
    for name, part in parts.items():
        if (run := read(name)) is not None:
            lines += ["", *part(run)]
    (ROOT / "docs/results/export.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
