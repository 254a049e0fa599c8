"""The command line on a model that nobody here has seen; later rows use what earlier ones wrote."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.newcomer.row import Row

MADE = "quantize model --calibration data --recipe gptq"
LISTED = ("quantize", "ask", "eval", "bench", "serve", "explain", "report", "export", "doctor")
LONG = "quantize model --calibration data --recipe learned"  # seconds a block
HALFWAY = "vision_tower.encoder.layers.1"  # the bar names the layer that it is at
HARNESS = ("lm_eval", "datasets")
QUICK = 4.0  # seconds of a processor before a mistake of typing is told, torch not imported


def nothing(name: str):
    """That a run has left no model there."""
    return lambda folder: f"{name} was written" if (folder / name / "model.safetensors").exists() else ""


def same(a: str, b: str):
    """That two directories hold the same tensors."""

    def compare(folder: Path) -> str:
        one, other = ((folder / name / "model.safetensors").read_bytes() for name in (a, b))
        return "" if one == other else f"{a} and {b} differ"

    return compare


ROWS = (
    Row("--help", "--help", LISTED),
    Row("a typing mistake in the command", "quantise model", ("No such command 'quantise'",), refused=True, within=QUICK),
    Row("a path that is not there", "quantize no/model --out x", ("no/model", "does not exist"), refused=True, within=QUICK),
    Row("a recipe that is not there", "quantize model --out x --recipe mquan", ("the recipes are awq",), refused=True),
    Row("bits that are not there", "quantize model --out x --recipe rtn --w 5", ("(2, 3, 4, 8)",), refused=True),
    Row("a setting that is not there", "quantize model --out x --set bitz=4", ("mquant takes weight_bits",), refused=True),
    Row("no output directory", "quantize model --calibration data", ("--out",), refused=True, within=QUICK),
    Row(
        "an output that cannot be written",
        "quantize model --calibration data --out /proc/x",
        ("/proc",),
        refused=True,
        within=QUICK,
    ),
    Row("own model, no data: gptq", "quantize model --recipe gptq --out x", ("--calibration",), refused=True),
    Row("own model, no data: mquant", "quantize model --out x", ("--calibration",), refused=True),
    Row("own model, no data: rtn needs none", "quantize model --recipe rtn --w 8 --out w8", ("saved in w8",), makes="w8"),
    Row("--dry-run", "quantize model --calibration data --out x --dry-run", ("linears", "memory"), then=nothing("x")),
    Row(
        "own model, own data: mquant",
        "quantize model --calibration data --out w4a8",
        ("layers quantized", "saved in w4a8"),
        makes="w4a8",
    ),
    Row("own model, own data: gptq", f"{MADE} --out w4", ("layers quantized", "saved in w4"), makes="w4"),
    Row("the output exists", f"{MADE} --out w4", ("--overwrite",), refused=True, within=QUICK),
    Row("the output exists, --overwrite", f"{MADE} --out w4 --overwrite", ("saved in w4",)),
    Row(
        "killed",
        f"{MADE} --out resumed --resume-dir job",
        interrupted=signal.SIGKILL,
        at=HALFWAY,
        then=nothing("resumed"),
        makes="job",
    ),
    Row("resumed", f"{MADE} --out resumed --resume-dir job", ("saved in resumed",), then=same("resumed", "w4"), after=("w4",)),
    Row("Ctrl-C", f"{LONG} --out stopped", interrupted=signal.SIGINT, at=HALFWAY, then=nothing("stopped")),
    Row("the data is empty", "quantize model --calibration empty --out x", ("data.jsonl is empty",), refused=True),
    Row("the data is broken", "quantize model --calibration broken --out x", ("data.jsonl:2:",), refused=True),
    Row("an image is missing", "quantize model --calibration missing --out x", ("data.jsonl:1:", "none.png"), refused=True),
    Row("an image is none", "quantize model --calibration noimage --out x", ("data.jsonl:1:", "PIL"), refused=True),
    Row("weights are cut off", "quantize cut --recipe rtn --w 8 --out x", ("cut: a file of its weights is damaged",), refused=True),
    Row("no processor", "quantize bare --calibration data --out x", ("processor",), refused=True),
    Row("ask", 'ask w4a8 --image data/0.png "w10 w20" --max-new-tokens 4', ("tokens: the first after", "W4A8")),
    Row("ask, no image there", 'ask w4a8 --image none.png "w10"', ("none.png", "does not exist"), refused=True),
    Row("eval, no data", "eval w4a8", ("--data",), refused=True),
    Row("eval", "eval w4a8 --against model --data data --json eval.json", ("recovery", "undefined"), makes="eval.json"),
    Row("eval --tasks without lm-eval", "eval w4a8 --tasks tiny", ("mmqc[eval]",), refused=True, without=("lm_eval",)),
    Row(
        "eval --tasks, a task that is not there",
        "eval w4a8 --tasks chartqq",
        ("'chartqq'", "chartqa"),
        refused=True,
        packages=HARNESS,
    ),
    Row("eval --tasks, no network for its data", "eval w4a8 --tasks chartqa", ("ChartQA", "Hub"), refused=True, packages=HARNESS),
    Row("eval --tasks, a task of one's own", "eval w4a8 --tasks task.yaml", ("own/exact_match",), packages=HARNESS),
    Row("bench, no data", "bench w4a8", ("--data",), refused=True),
    Row(
        "bench",
        "bench w4a8 --data data --new-tokens 8 --repeats 1 --json bench.json",
        ("tokens/s", "backend mmqc"),
        makes="bench.json",
    ),
    Row("explain, no data", "explain w4a8", ("--data",), refused=True),
    Row("explain", "explain w4a8 --data data --json explain.json", ("graph",), makes="explain.json"),
    Row("explain --spaces", "explain model --spaces --data data", ("space",)),
    Row("report", "report w4a8 w4 eval.json bench.json explain.json --out page.html", ("page.html written",)),
    Row("export", "export w4a8 m.pt2 --program model --data data", ("m.pt2: ",)),
    Row("passes", "passes", ("fuse_rotation",)),
    Row("doctor", "doctor", ("torchvision", "transformers")),
    Row("demo", "demo --questions 5 --calibration 4 --no-ablation --no-compile --out demo", ("mquant w4a8", "report.html written")),
)
