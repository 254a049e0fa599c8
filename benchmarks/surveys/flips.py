"""One flipped bit in a saved checkpoint: is it noticed when the checkpoint is loaded again?

    python -m benchmarks.surveys.flips [--flips 2000] [--seed 0] [--only mquant ...]

A tiny Qwen2-VL, saved four ways; in each copy of a checkpoint one bit of one file is another.  Half of the flips are in
safetensors (a third of those in the header, which is small), half in the JSON files, evenly.  Loaded in this process; what loads
runs a forward and samples four tokens as generation_config.json says, and both must equal the undamaged checkpoint's, bit for bit.

    noticed   an error; ``unclear`` counts those that are a bare KeyError, TypeError, JSONDecodeError, ... of whoever read the file
    equal     loads, and the outputs are equal (white space, a version number, a name that nothing reads)
    wrong     loads, and the outputs differ: what must not be

Writes benchmarks/results/flips.json; exit code 1 if any was wrong.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import random
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm.auto import tqdm
from transformers import AutoModelForImageTextToText

import mmqc
from mmqc import recipes
from tests.support.models import tiny_qwen2_vl

ROOT = Path(__file__).resolve().parents[2]
NEW_TOKENS, IN_HEADER = 4, 1 / 3
BARE = (LookupError, TypeError, AttributeError, UnicodeError, json.JSONDecodeError, AssertionError, RecursionError, ArithmeticError)
STATIC = recipes.mquant(4, vision_weight_bits=8, msq=False, rotate=False, suppress=False, solver="rtn")
CHECKPOINTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "mquant": (recipes.mquant(4, solver="rtn"), {}),
    "awq, shards": (recipes.awq(4, group_size=8), {"max_shard_size": "100KB"}),
    "resq": (recipes.resq(4, vision_bits=4), {}),
    "compressed-tensors": (STATIC, {"format": "compressed-tensors"}),
}
Answer = tuple[torch.Tensor, torch.Tensor]


def save(name: str, directory: Path) -> dict[str, Any]:
    """Quantizes and saves; the inputs to compare with."""
    config, options = CHECKPOINTS[name]
    model, inputs = tiny_qwen2_vl()
    generation: Any = model.generation_config
    generation.update(do_sample=True, temperature=0.7, top_k=20, repetition_penalty=1.2, pad_token_id=0)
    mmqc.quantize_(model, config, [inputs] if config.needs_calibration else None, progress=False)
    mmqc.save_pretrained(model, directory, **options)  # pyright: ignore[reportArgumentType]
    return inputs


@torch.no_grad()
def ask(model: Any, inputs: dict[str, Any]) -> Answer:
    """Logits, and tokens sampled from the same seed."""
    torch.manual_seed(0)
    return model(**inputs, use_cache=False).logits, model.generate(**inputs, max_new_tokens=NEW_TOKENS)


def places(directory: Path, flips: int, draw: random.Random) -> list[tuple[str, str, int]]:
    """(kind, file, bit) of every flip."""
    files: dict[str, list[Path]] = {}
    for path in sorted(directory.iterdir()):
        kind = "safetensors" if path.suffix == ".safetensors" else path.name
        files.setdefault(kind, []).append(path)
    texts = [kind for kind in files if kind != "safetensors"]
    chosen = []
    for number in range(flips):
        kind = "safetensors" if number % 2 else texts[number // 2 % len(texts)]
        path = draw.choice(files[kind])
        size = path.stat().st_size
        if kind == "safetensors" and draw.random() < IN_HEADER:
            size = 8 + int.from_bytes(path.read_bytes()[:8], "little")
        chosen.append((kind, path.name, draw.randrange(8 * size)))
    return chosen


class Flipped:
    """A file with one bit changed, for as long as the block lasts; another file each time, so that no mapped tensor changes."""

    def __init__(self, path: Path, bit: int) -> None:
        self.path, self.bit, self.good = path, bit, path.read_bytes()

    def __enter__(self) -> None:
        bad = bytearray(self.good)
        bad[self.bit // 8] ^= 1 << (self.bit % 8)
        self._replace(bytes(bad))

    def __exit__(self, *error: object) -> None:
        self._replace(self.good)

    def _replace(self, content: bytes) -> None:
        rough = self.path.with_name(self.path.name + ".part")
        rough.write_bytes(content)
        rough.replace(self.path)


@torch.no_grad()
def outcome(load: Callable[[], Any], inputs: dict[str, Any], wanted: Answer) -> tuple[str, BaseException | None]:
    """ "equal", "wrong", "noticed" or "unclear", and the error."""
    try:
        model = load()
        found = ask(model, inputs)
    except Exception as error:
        return ("unclear" if isinstance(error, BARE) else "noticed"), error
    same = all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    return ("equal" if same else "wrong"), None


def raised_in(error: BaseException) -> str:
    """The package whose code raised."""
    frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    known = (name for name in ("safetensors", "transformers", "mmqc") if f"/{name}/" in frames[-1].replace(str(ROOT), ""))
    return next(known, "another library")


def survey(name: str, flips: int, seed: int, bar: Any) -> dict[str, Any]:
    """All flips of one checkpoint."""
    draw = random.Random(f"{seed} {name}")
    counts: dict[str, Counter[str]] = {}
    unclear: Counter[str] = Counter()
    who: Counter[str] = Counter()
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "checkpoint"
        inputs = save(name, directory)
        load = mmqc.load_quantized if name == "compressed-tensors" else AutoModelForImageTextToText.from_pretrained
        wanted = ask(load(directory), inputs)
        assert outcome(lambda: load(directory), inputs, wanted)[0] == "equal", "the undamaged checkpoint answers twice alike"
        for kind, file, bit in places(directory, flips, draw):
            with Flipped(directory / file, bit):
                what, error = outcome(lambda: load(directory), inputs, wanted)
            counts.setdefault(kind, Counter())[what] += 1
            if what == "wrong":
                wrong.append({"file": file, "bit": bit})
            if error is not None:
                who[raised_in(error)] += 1
            if what == "unclear" and error is not None:
                unclear[f"{raised_in(error)}: {type(error).__name__}: {error}"[:160]] += 1
            bar.update(1)
    rows = {kind: {w: n[w] for w in ("noticed", "unclear", "equal", "wrong")} for kind, n in sorted(counts.items())}
    return {"checkpoint": name, "files": rows, "raised in": dict(who), "unclear": dict(unclear), "wrong": wrong}


def main() -> None:
    """Run and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=2000, help="over all checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", choices=CHECKPOINTS, default=list(CHECKPOINTS))
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "flips.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity(logging.CRITICAL)
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    each = options.flips // len(options.only)
    with tqdm(total=each * len(options.only), unit=" flips") as bar:
        rows = [survey(name, each, options.seed, bar) for name in options.only]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    facts = {"torch": torch.__version__, "transformers": transformers.__version__, "commit": commit.stdout.strip()}
    facts |= {"machine": platform.processor() or platform.machine(), "seed": options.seed}
    command = f"python -m benchmarks.surveys.flips --flips {options.flips} --seed {options.seed}"
    options.out.write_text(json.dumps({**facts, "command": command, "rows": rows}, indent=1) + "\n")
    for row in rows:
        print(json.dumps(row, indent=1))
    sys.exit(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    main()
