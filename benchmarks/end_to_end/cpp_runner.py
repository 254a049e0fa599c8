"""The C++ program's tokens against the model's own, on questions of the shipped sample.

    python -m benchmarks.end_to_end.cpp_runner [--questions 20] [--out results.json] [WAY ...]

A package with vision, prefill and decode is exported from one prompt, `examples/cpp_runner` is built by CMake, every question is
answered greedily by it and by ``generate``.  Rows that ``--out`` has already are kept, those of the named models are replaced.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

import mmqc
from mmqc.samples.processor import END

ROOT = Path(__file__).resolve().parents[2]

KV = mmqc.recipes.calibquant(bits=2, tau=((0, 0),))
CONFIGS: dict[str, mmqc.QuantConfig | None] = {
    "float32": None,
    "mquant-w4a8": mmqc.recipes.mquant(4),
    "calibquant-2bit": KV,
    "both": mmqc.recipes.mquant(4) | KV,
}


def built(folder: Path) -> Path:
    """The program."""
    source, build = ROOT / "examples/cpp_runner", folder / "build"
    subprocess.run(
        ["cmake", "-S", source, "-B", build, f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"],
        check=True,
        capture_output=True,
    )
    subprocess.run(["cmake", "--build", build], check=True, capture_output=True)
    return build / "runner"


def measured(name: str, questions: int, folder: Path, runner: Path) -> dict[str, Any]:
    """One row."""
    started, cpu = time.monotonic(), _cpu()
    sample, config = mmqc.samples.load("digits-vqa"), CONFIGS[name]
    if config is not None:
        mmqc.quantize_(sample.model, config, calibration=sample.calibration(16), progress=False)
    programs = ["vision", "prefill", "decode"]
    package = mmqc.export(sample.model, sample.prompts(1)[0], folder / f"{name}.pt2", programs=programs, say=print)
    row: dict[str, Any] = {"model": name, "mib": round(package.stat().st_size / 2**20, 1)}
    row |= {"export_seconds": round(time.monotonic() - started, 1), "export_cpu_seconds": round(_cpu() - cpu, 1)}
    same, tokens, differ = 0, 0, []
    for number, question in enumerate(sample.questions(questions)):
        batch = sample.processor(question.prompt, question.images)
        longest = len(question.answer) + 1
        file = folder / f"{number}.safetensors"
        save_file({n: t.contiguous() for n, t in batch.items()}, file)
        command = [str(runner), str(package), str(file), str(longest), str(END)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        ids = sample.model.generate(**batch, max_new_tokens=longest, do_sample=False)
        expected = ids[0, batch["input_ids"].shape[1] :].tolist()
        got = [int(t) for t in done.stdout.split()]
        same += got == expected
        tokens += len(expected)
        differ += [] if got == expected else [number]
    used = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {
        **row,
        "questions": questions,
        "same_answers": same,
        "tokens": tokens,
        "differ": differ,
        "peak_mib": [round(u / 1024) for u in used],
    }


def _cpu() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--out", type=Path)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(CONFIGS)}; default: all")
    options = parser.parse_args()
    rows = json.loads(options.out.read_text())["rows"] if options.out and options.out.exists() else []
    facts = {
        "device": "cpu",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "command": "python -m benchmarks.end_to_end.cpp_runner",
    }
    with tempfile.TemporaryDirectory() as folder:
        runner = built(Path(folder))
        for name in options.names or list(CONFIGS):
            rows = [*(r for r in rows if r["model"] != name), measured(name, options.questions, Path(folder), runner)]
            print(json.dumps(rows[-1]), flush=True)
            if options.out:
                options.out.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
