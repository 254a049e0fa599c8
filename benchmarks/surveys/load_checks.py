"""What the checks of a checkpoint cost when the model of digits-vqa is loaded: ms of one core, the median of 21 calls.

    python -m benchmarks.surveys.load_checks

Writes benchmarks/results/load_checks.json.
"""

from __future__ import annotations

import json
import logging
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForImageTextToText

import mmqc
from mmqc import recipes
from mmqc.checkpoint import manifest
from mmqc.checkpoint.checksum import hashes
from mmqc.checkpoint.field_types import check_fields
from mmqc.checkpoint.files import read_json
from mmqc.checkpoint.signature import check_config, check_generation

ROOT = Path(__file__).resolve().parents[2]
FIELDS = ("config", "modules", "parameters", "dtype", "untied", "visual_token_ids", "record", "hashes")


def milliseconds(call: Callable[[], Any], calls: int = 21) -> float:
    """The median over calls, after one more."""
    times = []
    for _ in range(calls + 1):
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return round(statistics.median(times[1:]), 2)


def own_format(directory: Path) -> dict[str, float]:
    """Of mquant(4), saved as mmqc's own format."""
    sample = mmqc.samples.load("digits-vqa")
    mmqc.quantize_(sample.model, recipes.mquant(4, solver="rtn"), calibration=sample.calibration(8), progress=False)
    sample.model.save_pretrained(directory)
    path = directory / "config.json"
    raw, state = read_json(path), sample.model.state_dict()
    fields = {name: raw["quantization_config"][name] for name in FIELDS}
    return {
        "load": milliseconds(lambda: AutoModelForImageTextToText.from_pretrained(directory)),
        "hashes of tensors, as before": milliseconds(lambda: hashes(state)),
        "config.json, done twice": milliseconds(lambda: check_config(read_json(path), path)),
        "types in quantization_config": milliseconds(lambda: check_fields(fields)),
        "generation_config.json, done twice": milliseconds(lambda: check_generation(raw, directory, required=True)),
        "bytes of safetensors": sum(p.stat().st_size for p in directory.glob("*.safetensors")),
        "bytes of config.json": path.stat().st_size,
    }


def compressed(directory: Path) -> dict[str, float]:
    """Of rtn(4, group_size=64), saved as compressed-tensors."""
    model = mmqc.samples.load("digits-vqa").model
    mmqc.quantize_(model, recipes.rtn(4, group_size=64), progress=False)
    mmqc.save_pretrained(model, directory, format="compressed-tensors")
    known, tensors = manifest.read(directory), manifest.read_tensors(directory)
    return {
        "load": milliseconds(lambda: mmqc.load_quantized(directory)),
        "hashes of tensors": milliseconds(lambda: manifest.check_tensors(known, tensors, directory)),
        "manifest and config.json": milliseconds(lambda: manifest.check_config(manifest.read(directory), directory)),
        "bytes of safetensors": sum(p.stat().st_size for p in directory.glob("*.safetensors")),
    }


def main() -> None:
    """Measure and write."""
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity(logging.CRITICAL)
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        rows = {"mmqc": own_format(Path(folder) / "own"), "compressed-tensors": compressed(Path(folder) / "compressed")}
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    facts = {"torch": torch.__version__, "transformers": transformers.__version__, "commit": commit.stdout.strip()}
    facts |= {"machine": platform.processor() or platform.machine(), "command": "python -m benchmarks.surveys.load_checks"}
    text = json.dumps({**facts, "ms": rows}, indent=1) + "\n"
    (ROOT / "benchmarks" / "results" / "load_checks.json").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
