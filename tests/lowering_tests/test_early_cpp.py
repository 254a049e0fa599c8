import re
from types import SimpleNamespace

import pytest
from torch._inductor.codegen.cpp_wrapper_gpu import DeferredTritonCallWrapper
from torch._inductor.codegen.cuda.device_op_overrides import CUDADeviceOpOverrides
from torch._inductor.utils import IndentedBuffer

from mmqc.lowering.early_cpp import HAS_OWN, launching_early

ours = pytest.mark.skipif(HAS_OWN, reason="this torch launches early itself")


def launch(**options) -> str:
    """What Inductor writes for a launch."""
    meta = {"constants": {}, "signature": {"x": "*fp32"}, **options}
    params = {"def_args": ["x"], "call_args": ["x"], "triton_meta": meta, "num_warps": 4, "shared_mem": 64}
    wrapper = SimpleNamespace(device="cuda", generate_args_decl=lambda *a, **k: "&x")
    prefix = IndentedBuffer()
    DeferredTritonCallWrapper("call", "kernel", {}, [float]).generate_launch_kernel(prefix, wrapper, "kernels_.kernel", params)
    return prefix.getvalue()


def taken(driver: str, name: str) -> str:
    """What a function of the C++ helpers takes, in one line."""
    (found,) = re.findall(rf"static inline void {name}\((.*?)\)", driver, re.DOTALL)
    return " ".join(found.split())


@ours
@pytest.mark.parametrize("options", [{}, {"launch_pdl": False}])
def test_launching_early__other_launches_stay(options: dict) -> None:
    plain = launch(**options)
    assert "launchKernel(kernels_.kernel, " in plain
    with launching_early():
        assert launch(**options) == plain


@ours
def test_launching_early__what_asks_for_it() -> None:
    plain = launch(launch_pdl=True)
    with launching_early():
        assert launch(launch_pdl=True) == plain.replace("launchKernel(", "launchKernelEarly(") != plain
    assert launch(launch_pdl=True) == plain


@ours
def test_launching_early__the_helper_takes_what_inductors_takes() -> None:
    with launching_early():
        driver = CUDADeviceOpOverrides().kernel_driver()
    assert taken(driver, "launchKernelEarly") == taken(driver, "launchKernel")
    assert "launchKernelEarly" not in CUDADeviceOpOverrides().kernel_driver()


@pytest.mark.skipif(not HAS_OWN, reason="this torch has launches without options")
def test_launching_early__leaves_a_torch_that_has_it_alone() -> None:
    plain = CUDADeviceOpOverrides().kernel_driver()
    with launching_early():
        assert CUDADeviceOpOverrides().kernel_driver() == plain
    assert "launchPdl" in plain
