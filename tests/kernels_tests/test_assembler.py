"""Which assembler Triton's kernels are made by is the same before and after Inductor compiles, here and in other processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mmqc.kernels.assembler import VARIABLE, name_assembler

triton = pytest.importorskip("triton")
OWN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"


@pytest.mark.skipif(not OWN.exists(), reason="this build of Triton has no ptxas")
def test_name_assembler__is_tritons_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    name_assembler()
    assert os.environ[VARIABLE] == str(OWN)


def test_name_assembler__leaves_the_one_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "/their/own/ptxas")
    name_assembler()
    assert os.environ[VARIABLE] == "/their/own/ptxas"


def test_name_assembler__without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    name_assembler()
    assert VARIABLE not in os.environ


@pytest.mark.slow
@pytest.mark.skipif(not OWN.exists(), reason="this build of Triton has no ptxas")
def test_the_package__names_it_before_inductor_is_there() -> None:
    """Inductor's processes begin with its import, and keep the environment of that moment."""
    program = (
        "import os, sys\n"
        "from mmqc import kernels\n"
        "assert not [m for m in sys.modules if m.startswith(('torch._inductor.async_compile', 'triton'))]\n"
        "import mmqc.lowering\n"
        "from torch._inductor.runtime.compile_tasks import _set_triton_ptxas_path\n"
        "_set_triton_ptxas_path()\n"
        f"print(os.environ['{VARIABLE}'])\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    found = subprocess.run([sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True)
    assert found.stdout.strip() == str(OWN)
