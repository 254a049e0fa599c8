"""Ways measure in turn, and what they know is kept however the run ends."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WAYS = """
import argparse, json, time
from pathlib import Path
from benchmarks.end_to_end import side_by_side

parser = argparse.ArgumentParser()
parser.add_argument("--ways", nargs="+", default=["fast", "slow"])
side_by_side.add_arguments(parser, 60.0)
args = parser.parse_args()


def measure(way):
    yield {"first": 1.2345678}
    if way == "slow":
        Path("slow_began").touch()
        time.sleep(60)
    yield {"second": [2]}


if args.child:
    side_by_side.child(args.child, args.ways, lambda: args.ways[0], measure)
else:
    found, failed = side_by_side.run("ways", args.ways, [], args.seconds)
    print(json.dumps([found, failed]))
"""
FAST, PART = {"first": 1.2346, "second": [2.0]}, {"first": 1.2346}


@pytest.mark.slow
def test_run__keeps_what_is_known_when_it_is_ended_from_outside(tmp_path: Path) -> None:
    (tmp_path / "ways.py").write_text(WAYS, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))}
    command = [sys.executable, "-m", "ways"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as process:
        while not (tmp_path / "slow_began").exists() and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        found, failed = json.loads(process.communicate()[0])
    assert failed[-1] == "slow"
    assert found["slow"] == PART
    assert found.get("fast", FAST) == FAST  # unless it was behind the slow one
