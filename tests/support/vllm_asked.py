"""Runs in vLLM's Python: what engines/ask_vllm.py answers.

python vllm_asked.py QUESTIONS ANSWERS       JSON, as that file's stdin and stdout
"""

import runpy
import sys
from pathlib import Path


def main(questions, answers):
    asking = Path(__file__).parents[2] / "mmqc" / "engines" / "ask_vllm.py"
    with Path(questions).open() as sys.stdin, Path(answers).open("w") as sys.stdout:
        runpy.run_path(str(asking), run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
