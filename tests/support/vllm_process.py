"""vLLM in processes of its own, for tests: MMQC_VLLM names the Pythons that have one (``make test-vllm``)."""

import atexit
import functools
import json
import os
import subprocess
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parent
PYTHONS = os.environ.get("MMQC_VLLM", "").split()
needs_vllm = pytest.mark.skipif(not PYTHONS, reason="make test-vllm sets it up")


@functools.cache
def _forks(python):
    changes = {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0", "PYTHONPATH": str(SUPPORT.parents[1])}
    command = [python, str(SUPPORT / "vllm_forks.py")]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **changes}
    )
    atexit.register(process.kill)
    return process


def run(python, *jobs):
    """Scripts of this folder with their arguments, all at once, in forks of one process that has imported vLLM."""
    forks = _forks(python)
    named = [[str(SUPPORT / script), *map(str, arguments)] for script, *arguments in jobs]
    assert forks.stdin
    assert forks.stdout
    assert forks.stderr
    forks.stdin.write(json.dumps(named) + "\n")
    forks.stdin.flush()
    line = forks.stdout.readline()
    assert line, forks.stderr.read()[-3000:]
    for errors in json.loads(line):
        assert not errors, errors
