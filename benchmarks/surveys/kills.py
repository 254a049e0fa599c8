"""Saves that are killed, and saves that find the disk full: is the old checkpoint there, or the new one, whole?

    python -m benchmarks.surveys.kills [--kills 200] [--cli 20] [--budgets 60]

A child that is forked from a process with a quantized model saves it over an older checkpoint, and gets SIGKILL at a moment
that is drawn, from before its first write to after its last; ``--cli`` of the kills go to ``mmqc quantize --overwrite``.  What
is there then is compared byte by byte with both checkpoints, and loaded.  For the full disk the directory lies on a file system
of its own, with room for the old checkpoint and a budget that goes from nothing to all that the new one takes; mounting it
needs root, without which this part is left out.  Writes benchmarks/results/kills.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm
from transformers import AutoModelForImageTextToText

import mmqc
from mmqc import recipes

ROOT = Path(__file__).resolve().parents[2]
FORMATS: dict[str, dict[str, Any]] = {
    "mmqc": {},
    "mmqc, sharded": {"max_shard_size": "4MB"},
    "compressed-tensors": {"format": "compressed-tensors"},
}
CLI = ["quantize", "digits-vqa", "--recipe", "rtn", "--w", "4", "--calibration", "0", "--overwrite", "--out"]
MIB = 1 << 20
Files = dict[str, str]


def model_of(bits: int) -> Any:
    """The model of digits-vqa with weights of so many bits."""
    sample = mmqc.samples.load("digits-vqa")
    mmqc.quantize_(sample.model, recipes.rtn(bits), progress=False)
    return sample.model


def contents(directory: Path) -> Files:
    """The digest of every file, by name."""
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(directory.iterdir()) if p.is_file()}


def left_beside(directory: Path) -> int:
    """How many directories a killed save has left beside it."""
    return len(list(directory.parent.glob(f".{directory.name}.saving-*")))


def loads(directory: Path, form: str) -> bool:
    """Whether the checkpoint loads."""
    load = mmqc.load_quantized if form.startswith("compressed") else AutoModelForImageTextToText.from_pretrained
    return load(directory) is not None


class Case:
    """A directory with an older checkpoint, a save of a newer one, and what both are."""

    def __init__(self, form: str, folder: Path, models: tuple[Any, Any]) -> None:
        self.form, self.old, self.new, self.at = form, folder / "old", folder / "new", folder / "model"
        self.model = models[1]
        for path, model in zip((self.old, self.new), models, strict=True):
            self.save(model, path)
        self.files = {"old": contents(self.old), "new": contents(self.new)}
        self.reset()
        start = time.perf_counter()
        os.waitpid(forked(lambda: self.save(self.model, self.at)), 0)
        self.seconds = 1.2 * (time.perf_counter() - start)

    def save(self, model: Any, path: Path) -> None:
        """As a user does."""
        mmqc.save_pretrained(model, path, **FORMATS[self.form])

    def reset(self) -> None:
        """The older checkpoint; what was left beside it stays, for the next save to remove."""
        shutil.rmtree(self.at, ignore_errors=True)
        shutil.copytree(self.old, self.at)

    def state(self) -> str:
        """Which of the two is there; "damaged" if neither is."""
        found = contents(self.at)
        kind = next((name for name, files in self.files.items() if files == found), "damaged")
        return kind if kind != "damaged" and loads(self.at, self.form) else "damaged"


def forked(work: Callable[[], None]) -> int:
    """The id of a child that does ``work``, and says why it could not."""
    child = os.fork()
    if child:
        return child
    try:
        work()
        os._exit(0)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def kills(case: Case, count: int, draw: random.Random) -> dict[str, Any]:
    """Kill so many saves."""
    states: Counter[str] = Counter()
    most = 0
    for _ in tqdm(range(count), desc=f"kills, {case.form}"):
        case.reset()
        child = forked(lambda: case.save(case.model, case.at))
        time.sleep(draw.uniform(0, case.seconds))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        states[case.state()] += 1
        most = max(most, left_beside(case.at))
    case.save(case.model, case.at)
    return row(case.form, count, states, {"left beside, at most": most, "after the next save": left_beside(case.at)})


def cli_kills(folder: Path, count: int, draw: random.Random) -> dict[str, Any]:
    """Kill the command line, from its first second to its last."""
    command = [sys.executable, "-m", "mmqc.cli", *CLI]
    at, old, new = folder / "model", folder / "old", folder / "new"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    start = time.perf_counter()
    subprocess.run([*command, str(new)], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    seconds = time.perf_counter() - start
    shutil.copytree(new, old)
    (old / "config.json").write_text((new / "config.json").read_text(encoding="utf-8") + "\n", encoding="utf-8")
    weights = {name: contents(path) for name, path in (("old", old), ("new", new))}
    states: Counter[str] = Counter()
    for _ in tqdm(range(count), desc="kills, mmqc quantize"):
        shutil.rmtree(at, ignore_errors=True)
        shutil.copytree(old, at)
        child = subprocess.Popen([*command, str(at)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
        time.sleep(draw.uniform(0.5 * seconds, 1.1 * seconds))
        child.kill()
        child.wait()
        found = {name: digest for name, digest in contents(at).items() if not name.startswith("quantization.")}
        same = (name for name, files in weights.items() if "config.json" in found and found.items() <= files.items())
        states[next(same, "damaged")] += 1
    return row("mmqc quantize --overwrite", count, states, {"left beside": left_beside(at)})


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[None]:
    """A file system of so many bytes, mounted at ``folder``."""
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True, capture_output=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def full_disks(case: Case, count: int, disk: Path) -> dict[str, Any]:
    """Save over the older checkpoint with less room than that takes."""
    need = [sum(p.stat().st_size for p in path.iterdir()) for path in (case.old, case.new)]
    states, errors = Counter[str](), Counter[str]()
    for number in tqdm(range(count), desc=f"full disk, {case.form}"):
        budget = int(need[1] * 1.02 * number / (count - 1))
        with small_disk(disk, need[0] + 64 * 4096 + budget):
            case.at = disk / "model"
            case.reset()
            try:
                case.save(case.model, case.at)
                errors["saved"] += 1
            except OSError as error:
                errors[f"{type(error).__name__}: {os.strerror(error.errno) if error.errno else error}"] += 1
            except Exception as error:
                errors[f"{type(error).__name__}: {error}".replace(str(disk), "DIR")[:120]] += 1
            states[case.state()] += 1
            states["left beside"] += left_beside(case.at)
    return row(case.form, count, states, {"errors": dict(errors)})


def row(what: str, count: int, states: Counter[str], more: dict[str, Any]) -> dict[str, Any]:
    """For the table."""
    return {"save": what, "saves": count, **dict(sorted(states.items())), **more}


def can_mount(folder: Path) -> bool:
    """Whether this process may mount a file system."""
    try:
        with small_disk(folder, MIB):
            return True
    except (subprocess.CalledProcessError, FileNotFoundError):
        return False


def main() -> None:
    """Run all, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="of saves, those of the command line included")
    parser.add_argument("--cli", type=int, default=20)
    parser.add_argument("--budgets", type=int, default=60, help="room on the disk, by format")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "kills.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tqdm.set_lock(threading.RLock())  # its own is shared between processes, and a killed child may hold it
    draw, models = random.Random(options.seed), (model_of(8), model_of(4))
    killed, full = [], []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        mountable = can_mount(root / "disk")
        shares = [(options.kills - options.cli + i) // len(FORMATS) for i in range(len(FORMATS))]
        for form, share in zip(FORMATS, shares, strict=True):
            (root / form).mkdir()
            case = Case(form, root / form, models)
            killed.append(kills(case, share, draw))
            print(killed[-1], flush=True)
            if mountable:
                full.append(full_disks(case, options.budgets, root / "disk"))
                print(full[-1], flush=True)
        if options.cli:
            (root / "cli").mkdir()
            killed.append(cli_kills(root / "cli", options.cli, draw))
            print(killed[-1], flush=True)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    facts = {"torch": torch.__version__, "transformers": transformers.__version__, "commit": commit.stdout.strip()}
    facts |= {"machine": platform.processor() or platform.machine(), "command": "python -m benchmarks.surveys.kills"}
    options.out.write_text(json.dumps({**facts, "kills": killed, "full disk": full}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
