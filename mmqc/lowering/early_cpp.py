"""Launches in C++ of kernels that start before the one in front has ended (early_kernels.py): Inductor has them from torch 2.15 on.

    launchKernel(kernels_.triton_poi_fused_add, grid_0, ...)    ->    launchKernelEarly(kernels_.triton_poi_fused_add, grid_0, ...)

Which ones they are, their options say.  A kernel that waits for the one in front and is launched as ever waits for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch._inductor.codegen.cpp_wrapper_gpu import DeferredTritonCallWrapper
from torch._inductor.codegen.cuda.device_op_overrides import CUDADeviceOpOverrides

HAS_OWN = hasattr(CUDADeviceOpOverrides, "cpp_kernel_launch_supports_pdl")  # and asks the same options
_THEIRS, _OURS = "launchKernel(", "launchKernelEarly("
_LAUNCH = """
    [[maybe_unused]] static inline void launchKernelEarly(
            CUfunction func,
            uint32_t gridX,
            uint32_t gridY,
            uint32_t gridZ,
            uint32_t numWarps,
            uint32_t sharedMemBytes,
            void* args[],
            cudaStream_t stream) {
        CUlaunchAttribute early = {};
        early.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        early.value.programmaticStreamSerializationAllowed = 1;
        CUlaunchConfig config = {};
        config.gridDimX = gridX;
        config.gridDimY = gridY;
        config.gridDimZ = gridZ;
        config.blockDimX = 32 * numWarps;
        config.blockDimY = 1;
        config.blockDimZ = 1;
        config.sharedMemBytes = sharedMemBytes;
        config.hStream = stream;
        config.attrs = &early;
        config.numAttrs = 1;
        CUDA_DRIVER_CHECK(cuLaunchKernelEx(&config, func, args, nullptr));
    }
"""
_driver = CUDADeviceOpOverrides.kernel_driver
_generate = DeferredTritonCallWrapper.generate_launch_kernel


@contextmanager
def launching_early() -> Iterator[None]:
    """C++ wrappers that are generated meanwhile launch early what asks for it."""
    if HAS_OWN:
        yield
        return
    with (
        mock.patch.object(CUDADeviceOpOverrides, "kernel_driver", lambda self: _driver(self) + _LAUNCH),
        mock.patch.object(DeferredTritonCallWrapper, "generate_launch_kernel", _generate_early),
    ):
        yield


def _generate_early(self: Any, prefix: Any, wrapper: Any, kernel_var_name: Any, params: Any) -> None:
    if not params["triton_meta"].get("launch_pdl"):
        return _generate(self, prefix, wrapper, kernel_var_name, params)
    write = prefix.writeline

    def writeline(line: Any) -> Any:
        return write(_OURS + line.removeprefix(_THEIRS) if isinstance(line, str) and line.startswith(_THEIRS) else line)

    with mock.patch.object(prefix, "writeline", writeline):
        return _generate(self, prefix, wrapper, kernel_var_name, params)
