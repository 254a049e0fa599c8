"""What a package is linked with."""

import os
import shutil
import subprocess
import sys

import pytest

PROGRAM = """if True:
    import sys, torch
    from mmqc.lowering.package import compile_program, load_program, write_package
    model = torch.nn.Linear(8, 8).eval()
    x = torch.randn(2, 8)
    files = compile_program(torch.export.export(model, (x,)), as_eager=False, metadata={})
    write_package(sys.argv[1], {"forward": files})
    with torch.no_grad():
        assert torch.equal(load_program(sys.argv[1], "forward")(x), model(x))
"""


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("g++") is None, reason="needs g++ on Linux")
def test_compile_program__compiler_that_links_its_cpp_library_statically(tmp_path):
    """A second C++ library in the process breaks the loader: the package takes the one that torch has."""
    compiler = tmp_path / "g++"
    compiler.write_text(
        f'#!/bin/sh\ncase " $* " in *" -shared "*) set -- "$@" -static-libstdc++;; esac\nexec {shutil.which("g++")} "$@"\n'
    )
    compiler.chmod(0o755)
    environment = {**os.environ, "CXX": str(compiler), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "linear.pt2")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
