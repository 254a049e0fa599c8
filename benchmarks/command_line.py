"""How a benchmark was called, as a file of results says it: by its module, without the file that it wrote to."""

from __future__ import annotations

import shlex
import sys


def command_line() -> str:
    """The words that call this process again, but for ``--out``."""
    words = [a for a, before in zip(sys.argv[1:], sys.argv, strict=False) if "--out" not in (a, before)]
    return shlex.join(["python", "-m", sys.modules["__main__"].__spec__.name, *words])
