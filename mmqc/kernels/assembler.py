"""One assembler for all kernels: Triton's own ``ptxas``, unless the environment names another.

Why:     torch 2.11 brings a newer one, which Inductor puts into the environment when it compiles its first kernel, in this
         process and in those that compile for it.  So which one makes a kernel depended on what had been compiled before; the
         key of Triton's cache names the first that was asked for, so kernels made by one process were not found by another;
         and a kernel that a thread was compiling meanwhile was written for the one and given to the other, which fails.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

VARIABLE = "TRITON_PTXAS_PATH"


def name_assembler() -> None:
    """Before anything is compiled."""
    triton = importlib.util.find_spec("triton")
    own = Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "ptxas" if triton and triton.origin else None
    if own is not None and os.access(own, os.X_OK):
        os.environ.setdefault(VARIABLE, str(own))
