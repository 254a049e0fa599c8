"""What the studies share: where figures come from, files of figures, tables, intervals, samples that are quantized.

A study measures into a JSON file and draws its page from that file, so that a page can be redrawn without measuring again.
"""

from __future__ import annotations

import json
import platform
import subprocess
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import mmqc
from mmqc.config import QuantConfig

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = ("digits-vqa", "digits-vqa-stress")
DRAWS = 2000


def about(command: str, **more: Any) -> dict[str, Any]:
    """The command, the commit, the day, the device and the versions behind a file of figures."""
    git = lambda *args: subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True).stdout.strip()  # noqa: E731
    return {
        "command": command,
        **more,
        "commit": git("rev-parse", "--short", "HEAD") + (" and changes" if git("status", "--porcelain") else ""),
        "date": time.strftime("%Y-%m-%d"),
        "device": device(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def device(name: str = "cpu") -> str:
    """E.g. "CPU, x86_64, 1 thread", "NVIDIA H200"."""
    if name != "cpu":
        return torch.cuda.get_device_name(name)
    threads = torch.get_num_threads()
    return f"CPU, {platform.machine()}, {threads} thread{'s' if threads > 1 else ''}"


def quantized(name: str, config: QuantConfig, calibration: int) -> tuple[Any, Any]:
    """A sample whose model is quantized on so many calibration prompts, and the report."""
    sample = mmqc.samples.load(name)
    return sample, mmqc.quantize_(sample.model, config, sample.calibration(calibration), progress=False)


def store(path: Path, data: dict[str, Any], indent: int | None = 1) -> None:
    """The figures to their file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=indent) + "\n", encoding="utf-8")


def read(path: Path) -> dict[str, Any]:
    """The figures on file."""
    return json.loads(path.read_text(encoding="utf-8"))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown; every column but the first is set to the right."""
    lines = [head, ["---" if i == 0 else "--:" for i in range(len(head))], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def put(page: Path, parts: dict[str, str]) -> None:
    """Text between ``<!-- name -->`` and ``<!-- end of name -->`` of a page."""
    text = page.read_text(encoding="utf-8")
    for name, part in parts.items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        head, tail = text.split(begin)[0], text.split(end)[1]
        text = f"{head}{begin}\n{part}\n{end}{tail}"
    page.write_text(text, encoding="utf-8")


def paired(a: Sequence[float], b: Sequence[float], kinds: Sequence[str]) -> tuple[float, float, float]:
    """Mean of a - b over the same questions, and its bootstrap 95 % interval; every kind of question weighs the same."""
    rng, of = np.random.default_rng(0), np.array(kinds)
    difference = np.array(a) - np.array(b)
    parts = [difference[of == kind] for kind in dict.fromkeys(kinds)]
    draws = np.mean([d[rng.integers(len(d), size=(DRAWS, len(d)))].mean(1) for d in parts], axis=0)
    low, high = np.quantile(draws, [0.025, 0.975])
    return float(np.mean([d.mean() for d in parts])), float(low), float(high)
