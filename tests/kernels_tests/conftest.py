"""The kernels run twice: on the CPU in Triton's interpreter, and (mark ``gpu``) compiled on a CUDA device.

Triton decides when it is imported.  ``make test`` sets TRITON_INTERPRET; without it, and with Triton not imported yet, it is
set here; where another test module was faster, test_interpreter.py runs this folder in a process of its own.
"""

import os
import sys

import numpy as np
import pytest
import torch

if not torch.cuda.is_available() and "triton" not in sys.modules:
    os.environ.setdefault("TRITON_INTERPRET", "1")

triton = pytest.importorskip("triton")
INTERPRETED = bool(triton.knobs.runtime.interpret) and not isinstance(triton.language.zeros, triton.JITFunction)

if not (INTERPRETED or torch.cuda.is_available()):
    collect_ignore_glob = ["test_*[!r].py", "test_*[!e]r.py"]  # all but test_interpreter.py

# The interpreter of Triton 3.6 converts arrays of one element to int, which NumPy 2.4 refuses.
BROKEN = np.lib.NumpyVersion(triton.__version__) < "3.7.0" and np.lib.NumpyVersion(np.__version__) >= "2.4.0"


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cpu" and INTERPRETED and BROKEN:
        pytest.skip("Triton 3.6's interpreter needs NumPy < 2.4")
    if request.param == "cpu" and not INTERPRETED:
        pytest.skip("the CPU needs Triton's interpreter")
    if request.param == "cuda" and (INTERPRETED or not torch.cuda.is_available()):
        pytest.skip("needs a CUDA device and compiled kernels")
    return torch.device(request.param)


@pytest.fixture
def nan_memory(monkeypatch):
    """What a launcher allocates is NaN until a kernel writes it."""
    empty = torch.empty

    def nan(*args, **kwargs):
        made = empty(*args, **kwargs)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", nan)
