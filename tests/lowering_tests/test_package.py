"""What a package is linked with."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import mmqc
from mmqc import recipes
from mmqc.aot.fused import fused
from mmqc.lowering import package
from mmqc.lowering.package import in_float64

PROGRAM = """if True:
    import sys, torch
    from torch._inductor import config
    config.aot_inductor.precompile_headers = False  # would be compiled for this compiler's path alone
    from mmqc.lowering.package import compile_program, load_program, write_package
    model = torch.nn.Linear(8, 8).eval()
    x = torch.randn(2, 8)
    files = compile_program(torch.export.export(model, (x,)), as_eager=False, metadata={})
    write_package(sys.argv[1], {"forward": files})
    with torch.no_grad():
        assert torch.equal(load_program(sys.argv[1], "forward")(x), model(x))
"""


# A compiler that is told to link its C++ library statically, and one that has no other.
STATIC = 'case " $* " in *" -shared "*) set -- "$@" -static-libstdc++;; esac\nexec {gcc} "$@"'
ARCHIVE = 'case " $* " in *" -shared "*) exec {c} -L{folder} "$@" -lstdc++ -lm;; esac\nexec {gcc} "$@"'


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("g++") is None, reason="needs g++ on Linux")
@pytest.mark.parametrize("how", [pytest.param(STATIC, marks=pytest.mark.slow), pytest.param(ARCHIVE, marks=pytest.mark.slow)])
def test_compile_program__compiler_that_links_its_cpp_library_statically(how, tmp_path):
    """A second C++ library in the process breaks the loader: the package takes the one that torch has."""
    gcc, compiler, archives = shutil.which("g++"), tmp_path / "g++", tmp_path / "archives"
    archive = Path(subprocess.check_output([gcc, "-print-file-name=libstdc++.a"], text=True).strip())
    archives.mkdir()
    (archives / archive.name).symlink_to(archive.resolve())
    compiler.write_text("#!/bin/sh\n" + how.format(gcc=gcc, c=shutil.which("gcc"), folder=archives) + "\n")
    compiler.chmod(0o755)
    environment = {**os.environ, "CXX": str(compiler), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "linear.pt2")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(("config", "count"), [(recipes.integer_scale(group_size=8), 1), (recipes.mquant(4), 0)])
def test_in_float64__linears_with_scales_of_groups(config: mmqc.QuantConfig, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4, 16)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)).eval()  # the last one is the head
    mmqc.quantize_(model, config, calibration=[{"input": x}], progress=False)
    program = torch.export.export(model, (x,))
    assert in_float64(program) == count
    monkeypatch.setattr(package, "why_no_kernel", lambda node: None)  # as on a GPU
    assert in_float64(program) == 0


class Pair(nn.Module):
    """Two linears of one tensor, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.head = (nn.Linear(16, 16, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.one(x) + self.other(x))


@torch.no_grad()
def test_in_float64__counts_linears_of_one_launch() -> None:
    x = torch.randn(4, 16)
    model = Pair().eval()
    mmqc.quantize_(model, recipes.integer_scale(group_size=8), calibration=[{"x": x}], progress=False)
    plain = torch.export.export(model, (x,))
    program = fused(plain).run_decompositions({})
    assert any("scaled_matmuls" in str(n.target) for n in program.graph.nodes)
    assert in_float64(plain) == in_float64(program) == 2
