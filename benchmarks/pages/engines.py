"""docs/results/engines.md: what vLLM makes of every recipe that mmqc writes for it, as ``mmqc check`` says.

    python -m benchmarks.pages.engines

The shipped sample is quantized by each recipe within the engine's limits, saved for it, and checked for two versions and three
GPUs.
"""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path

import mmqc
from benchmarks.pages.kernel_sections import ROOT, table
from mmqc import recipes
from mmqc.check.run import Checked, check
from mmqc.config import QuantConfig
from mmqc.engines.table import Answer, Case, Tabled, described, versions

PAGE = ROOT / "docs" / "results" / "engines.md"
GPUS = ("h100", "l40s", "a100")
STATIC = recipes.rtn(8, activation_bits=8)
RECIPES: dict[str, tuple[str, QuantConfig]] = {
    "`rtn(4, group_size=128)`, `gptq(4, 128)`, `awq(4)`": ("", recipes.rtn(4, group_size=128)),
    "`awq(4, symmetric=False)`": ("", recipes.awq(4, symmetric=False, solver="rtn")),
    "`rtn(8)`": ("", recipes.rtn(8)),
    "`rtn(8, activation_bits=8)`, `mquant(8, msq=False)`": ("", STATIC),
    "`mquant(8)`, `per_token(8, 8)`": ("", recipes.per_token(8, 8, solver="rtn")),
    "`rtn(8, activation_bits=8).with_float8()`": ("", STATIC.with_float8()),
    "`mquant(8).with_float8()`": ("", STATIC.with_token_scales().with_float8()),
    "`mquant(4)`": ("", recipes.rtn(4, activation_bits=8)),
    '`mquant(4)`, `activations="int8"`': ("int8", recipes.rtn(4, activation_bits=8)),
}
# Inputs and outputs as vLLM has them, q/k/v and gate/up joined.
WIDTHS = {
    "Qwen2-VL-7B, Qwen2.5-VL-7B, language": ((3584, 4608), (3584, 3584), (3584, 37888), (18944, 3584)),
    "Qwen2-VL-7B, tower": ((1280, 3840), (1280, 1280), (1280, 5120), (5120, 1280), (5120, 5120), (5120, 3584)),
    "Qwen2.5-VL-7B, tower": ((1280, 3840), (1280, 1280), (1280, 6840), (3420, 1280)),
    "Qwen3-VL-8B, tower": ((1152, 3456), (1152, 1152), (1152, 4304), (4304, 1152), (4608, 4608), (4608, 4096)),
    "InternVL2.5-8B, tower": ((1024, 3072), (1024, 1024), (1024, 4096), (4096, 1024)),
}
FORMS = {
    "int4 x float8, g128": "int4 group128 / float8 token dynamic / pack-quantized",
    "int4, g128": "int4 group128 / none / pack-quantized",
    "W8A8": "int8 channel / int8 tensor static / int-quantized",
    "W8A8, float8": "float8 channel / float8 tensor static / float-quantized",
}


def export(recipe: QuantConfig, activations: str, folder: Path) -> str:
    """Saves the sample by that recipe; what the engine is to be started with."""
    sample = mmqc.samples.load("digits-vqa")
    model = copy.deepcopy(sample.model)
    config = recipes.for_engine(recipe, f"vllm=={versions()[-1]}", **({"activations": activations} if activations else {}))
    mmqc.quantize_(model, config, sample.calibration(2), progress=False)
    mmqc.save_pretrained(model, folder, engine=f"vllm=={versions()[-1]}")
    return ", ".join(dict.fromkeys(map(str, config.schemes.values())))


def said(found: Checked) -> str:
    """The kernel, or the refusal, of a checkpoint whose linears are all alike."""
    answers = {described(Answer(**{k: v for k, v in e.items() if k in Answer.__annotations__}), e["form"]) for e in found.linears}
    return "; ".join(sorted(answers))


def by_recipe() -> list[str]:
    """Recipe x version x GPU."""
    rows = []
    for name, (activations, recipe) in RECIPES.items():
        with tempfile.TemporaryDirectory() as folder:
            scheme = export(recipe, activations, Path(folder) / "out")
            for gpu in GPUS:
                cells = [said(check(Path(folder) / "out", f"vllm=={version}", gpu=gpu)) for version in versions()]
                rows.append([name if gpu == GPUS[0] else "", scheme if gpu == GPUS[0] else "", gpu, *cells])
    return table(("recipe", "as `for_engine` has it", "GPU", *(f"vLLM {v}" for v in versions())), rows)


def by_width() -> list[str]:
    """Model x form, on Hopper."""
    rules, rows = Tabled(versions()[-1], 90), []
    for model, widths in WIDTHS.items():
        cells = []
        for form in FORMS.values():
            answers = rules.answers([Case(form, {}, k, n) for k, n in widths])
            words = [described(a, form).removesuffix(", groups of 128") if a else "" for a in answers]
            usual = max(dict.fromkeys(words), key=words.count)
            odd = [f"{k} x {n}: {w}" for (k, n), w in zip(widths, words, strict=True) if w != usual]
            cells.append("; ".join([usual, *odd]))
        rows.append([model, *cells])
    return table(("linears", *FORMS), rows)


def main() -> None:
    """Writes the page."""
    lines = [
        "# What vLLM runs",
        "",
        "Written by `python -m benchmarks.pages.engines`; do not edit. The answers are those of vLLM's own Python, by the tables",
        "that `make engine-tables` asks of it and `make test-vllm` compares with it; no kernel was run.",
        "",
        "## Recipes",
        "",
        "Every recipe within the engine's limits (`recipes.for_engine`), saved with `save_pretrained(model, dir, engine=...)` and",
        "looked at by `mmqc check`. W4A16 and W8A16 behind a kernel: it multiplies in 16 bits.",
        "",
        *by_recipe(),
        "",
        f"## Widths, on an H100 or H200, vLLM {versions()[-1]}",
        "",
        *by_width(),
    ]
    PAGE.write_text("\n".join(lines).rstrip() + "\n")


if __name__ == "__main__":
    main()
