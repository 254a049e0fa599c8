"""docs/results/any_size.md, from benchmarks/results/any_size.json: images of sizes that never came, and batches.

python -m benchmarks.pages.any_size
"""

from __future__ import annotations

import json
from typing import Any

from benchmarks.pages.kernel_sections import ROOT, table

SIZES, COMPILED = "unseen sizes: seconds of the first call, and then", "compiled for unseen sizes"
NAMES = {"nvidia_h100_80gb_hbm3": "H100 80GB", "nvidia_h200": "H200"}
WORDS = """# Any size, any batch

Qwen2-VL-7B's shape with random weights through `generate` and `mmqc.compiled_loop`, as a service uses it: after prompts of four
sizes and batches of some numbers of prompts, images of sizes that never came. Each prompt of a batch has one image of 1,024
patches. Ways of one run compile side by side and measure one after the other, in processes of their own. Written by
`python -m benchmarks.pages.any_size`; do not edit.
"""


def batches(figures: dict[str, Any]) -> list[str]:
    """Tokens a second, and the ratio to bf16 in the same run; nothing where no batch was measured."""
    names = sorted({n for way in figures.values() for n in way if n.startswith("batch of")}, key=lambda n: int(n.split()[-1]))
    rows = []
    for name in names:
        rates = {way: found[name]["tokens_per_second"] for way, found in figures.items() if name in found}
        plain = rates.get("bf16")
        for way, rate in rates.items():
            ratio = "–" if plain is None or way == "bf16" else f"{rate / plain:.2f}"
            first = figures[way][name]["first_token_s"]
            rows.append([name.removeprefix("batch of "), way, f"{rate:,.0f}", ratio, f"{1e3 * first:.0f}"])
    return rows and table(("prompts", "way", "tokens/s", "over bf16", "first token, ms"), rows)


def prompts(figures: dict[str, Any]) -> list[str]:
    """Clock and device of a prompt that came before, and the slowest first call of a size that did not."""
    rows = []
    for way, found in figures.items():
        for name in (n for n in found if n.startswith("first token")):
            clock, device = found[name]["clock_ms"], found[name]["device_ms"]
            of = found[name].get("products", {"device_ms": 0.0})
            rate = f"{1e3 * of['tera_operations'] / of['device_ms']:,.0f}" if of["device_ms"] else "–"
            image = name.removeprefix("first token, ")
            rows.append([way, image, f"{clock:.1f}", f"{device:.1f}", f"{clock / device:.2f}", rate])
    lines = table(("way", "image", "first token, ms", "on the device, ms", "ratio", "TOP/s of products"), rows)
    for way, found in figures.items():
        first, then = max(found[SIZES].values())
        size = max(found[SIZES], key=lambda grid: found[SIZES][grid][0])
        made = ", ".join(f"{n} {what}" for what, n in found[COMPILED].items())
        lines += [
            "",
            f"{way}: {len(found[SIZES])} sizes that never came, compiled for them: {made}; the slowest first call {first:.2f} s "
            f"({size} patches; later {then:.2f}). Memory held {found['held_gib']:.1f} GiB, at most {found['peak_gib']:.1f}.",
        ]
    return lines


def main() -> None:
    """Write the page."""
    runs = json.loads((ROOT / "benchmarks/results/any_size.json").read_text(encoding="utf-8"))["runs"]
    lines = [WORDS]
    for run in runs:
        figures = {way: found for way, found in run["figures"].items() if SIZES in found}
        if figures:
            head = f"{NAMES.get(run['device'], run['device'])}, torch {run['torch']}, commit {run['commit']}"
            about = f" ({run['about']})" if run.get("about") else ""
            tables = (part for part in (batches(figures), prompts(figures)) if part)
            lines += [f"## {head}", "", f"`{run['command']}`{about}", *(line for part in tables for line in ("", *part)), ""]
    (ROOT / "docs/results/any_size.md").write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
