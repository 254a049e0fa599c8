"""Warp-specialised products: which tiles fit, how the last round is cut, and that the kernels compile without a GPU.

Who waits for whom is simulated in test_pingpong_ring.py; what they compute is compared in tests/gpu_tests/test_pingpong.py, for
Triton's interpreter runs the warps of a program one after the other, and these wait for one another.
"""

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pingpong = pytest.importorskip("mmqc.kernels.warpgroup.pingpong_matmul")
configs = pytest.importorskip("mmqc.kernels.matmul.configs")
Config = configs.MatmulConfig


@given(st.integers(0, 5000), st.integers(1, 200), st.integers(1, 150), st.sampled_from([1, 2, 4]), st.integers(1, 3))
def test_parts__each_has_a_program_and_saves_time(tiles, steps, programs, most, least):
    count = pingpong.parts(tiles, steps, programs, most, least)
    assert count in (1, 2, 4)
    assert count <= most
    if count > 1:
        each = -(-steps // count)
        assert 0 < tiles % programs * count <= programs
        assert steps - each >= pingpong.LEAST_SAVED
        assert steps - (count - 1) * each >= least  # in the last part too


@given(st.integers(1, 9000), st.integers(1, 9000), st.integers(1, 20000), st.sampled_from([1, 4]))
def test_grid__every_tile_and_part_has_one_program(m, n, k, most):
    tile = Config(128, 128, 128, 4, 8, split_k=most, variant="pingpong")
    programs, whole, rest, count = pingpong.grid(tile, m, n, -(-k // 128), torch.device("cpu"))
    tiles = -(-m // 128) * -(-n // 128)
    rounds = tiles // whole
    assert rounds * whole + rest == tiles
    assert programs <= whole
    found = [p + i * whole for p in range(programs) for i in range(rounds)]
    found += [rounds * whole + p % rest for p in range(programs) if p < rest * count and p // rest == 0]
    assert sorted(found) == list(range(tiles))
    assert rest * count <= programs


def test_slots__as_many_as_fit():
    assert pingpong.slots(Config(128, 128, 128, 4, 8, variant="pingpong"), 2) == 5
    assert pingpong.slots(Config(128, 128, 128, 4, 3, variant="pingpong"), 2) == 3
    assert pingpong.slots(Config(128, 256, 128, 8, 8, variant="pingpong"), 4) == 2
    assert pingpong.slots(Config(128, 256, 128, 8, 8, variant="pingpong"), 4, columns=128) == 3
    with pytest.raises(ValueError, match="no shared memory for two slots"):
        pingpong.slots(Config(256, 256, 128, 4, 8, variant="pingpong"), 2)


def test_why_not__a_cpu_has_no_such_kernels():
    x = torch.zeros(300, 64, dtype=torch.int8)
    assert pingpong.why_not(x, x, x) == "warpgroup products are Hopper's"


OFFLINE = """
import sys, triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from mmqc.kernels.warpgroup.pingpong_tiles import scaled_pingpong_kernel

what, rows, columns, warps, parts, stages = sys.argv[1], *map(int, sys.argv[2:])
codes = "fp8e4nv" if what == "fp8" else "i8"
shape = dict(BLOCK_M=rows, BLOCK_N=columns, BLOCK_K=128, GROUP_M=8, PROGRAMS=132, PARTS=parts, STAGES=stages, WARPS=warps,
             CONSUMERS=8 // warps, REGISTERS=240, HAS_BIAS=True)
kernel = scaled_pingpong_kernel
constants = shape | dict(KIND=1, ACTIVATION=0, NEXT=False, NEXT_KIND=0, ROUND=1, LOW=-128.0, HIGH=127.0,
                         PTX=True, RANK=0)

def described(name, block, dtype):
    layout = gl.NVMMASharedLayout.get_default_for(list(block), dtype)
    return f"tensordesc<{name}[{block[0]}, {block[1]}],{layout!r}>"

byte = gl.int8 if codes == "i8" else gl.float8e4nv
kinds = {"x_desc": described(codes, (rows, 128), byte), "w_desc": described(codes, (columns, 128), byte),
         "y_desc": described("bf16", (rows, columns), gl.bfloat16), "row_ptr": "*u8", "counter_ptr": "*i32",
         "part_ptr": "*i32" if codes == "i8" else "*fp32"}
types = {n: "constexpr" if n in constants else kinds.get(n, "*fp32" if n.endswith("_ptr") else "i32") for n in kernel.arg_names}
wide = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(types)
        if n not in constants and (n.endswith("_ptr") or n in ("M", "N", "K"))}
source = GluonASTSource(kernel, types, constants, wide)
made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
ptx = made.asm["ptx"]
print(ptx.count("wgmma.mma_async"), ptx.count("wgmma.wait_group.sync.aligned 1"), made.metadata.shared)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "rows", "columns", "warps", "parts", "stages"),
    [("int8", 128, 128, 4, 4, 5), ("fp8", 64, 256, 4, 1, 4), ("int8", 128, 256, 8, 2, 3)],
)
def test_pingpong__compiles_without_a_gpu(what, rows, columns, warps, parts, stages):
    """Products queue up (a wait leaves one step of them running), and what the launcher counts fits the shared memory."""
    bare = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", OFFLINE, what, *map(str, (rows, columns, warps, parts, stages))]
    done = subprocess.run(command, env=bare, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    products, queued, shared = map(int, done.stdout.split())
    assert queued == 8 // warps
    assert products % queued == 0
    assert products > 0
    assert shared <= 232_448
    assert shared >= stages * (rows + columns) * 128 + (8 // warps) * rows * columns * 2
