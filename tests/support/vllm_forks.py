"""Runs in vLLM's Python: imports vLLM once, which takes most of a test's time, and runs scripts in forks of itself.

python vllm_forks.py        a line of stdin: [[script, argument...], ...] as JSON, run at once; a line of stdout: their errors,
                            "" of one that went well
"""

import importlib
import json
import os
import runpy
import sys
import tempfile
import traceback
from pathlib import Path

ASKING = Path(__file__).parents[2] / "mmqc" / "engines" / "ask_vllm.py"


def main():
    os.environ["VLLM_TARGET_DEVICE"] = "cpu"
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints as it likes
    asking = runpy.run_path(str(ASKING))
    for name in asking["IMPORTED_AS_ON_A_CPU"]:
        importlib.import_module(f"vllm.model_executor.{name}")
    from vllm.model_executor.models import ModelRegistry

    asking["load"](ModelRegistry.models["Qwen2VLForConditionalGeneration"].load_model_cls)
    for line in sys.stdin:
        running = [started(*job) for job in json.loads(line)]
        answers.write(json.dumps([errors_of(*job) for job in running]) + "\n")
        answers.flush()


def started(script, *arguments):
    """A fork that runs the script, and the file of what it says."""
    said = Path(tempfile.mkstemp()[1])
    child = os.fork()
    if child:
        return child, said
    code = 1
    try:
        with said.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        sys.argv = [script, *arguments]
        runpy.run_path(script, run_name="__main__")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def errors_of(child, said):
    """What a fork said before it failed; "" of one that did not."""
    _, status = os.waitpid(child, 0)
    text = said.read_text()
    said.unlink()
    return (text[-3000:] or f"ended with {status}") if status else ""


if __name__ == "__main__":
    main()
