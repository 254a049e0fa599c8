"""What a launcher asks about the device: is this the interpreter, which architecture, how many multiprocessors."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

try:
    from triton import knobs
except ImportError:  # builds of torch for the CPU come without; what plans a launch is asked there too, and launches nothing
    knobs = None

# Decided when the kernels are decorated, so once, at import; inline assembly does not exist in the interpreter.
INTERPRETED = knobs is not None and bool(knobs.runtime.interpret)

# Hopper's kernels with warps for copies, products and epilogues (pingpong_matmul.py, packed_matmul.py, hadamard_wgmma.py)
WARPGROUP_ROWS = 512  # more have been measured, and are faster by these kernels
SHARED_BYTES = 231_424  # that a program may have, without its barriers
CONSUMER_REGISTERS = 240  # a thread: two consumers of 128 threads and 24 for the copies are what there is


@functools.cache
def capability(device: torch.device) -> int:
    """90 for Hopper, 80 for Ampere; 0 where there is no CUDA device (the interpreter) or it is not NVIDIA's."""
    if device.type != "cuda" or torch.version.hip:
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors; 4 in the interpreter, so that persistent loops take several turns."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Bytes of shared memory that a program may have, at most.

    227 KiB on Hopper, for which the interpreter stands, 163 on an A100, 99 on other Amperes and on Ada.
    """
    if device.type != "cuda":
        return 232_448
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)


@functools.cache
def gpu_name(device: torch.device) -> str:
    """A file name for the device, ``nvidia_h100_80gb_hbm3``; ``interpreter`` on the CPU."""
    return torch.cuda.get_device_name(device).lower().replace(" ", "_") if device.type == "cuda" else "interpreter"


def has_inline_ptx(device: torch.device) -> bool:
    """Whether the bit tricks in PTX may be used (bf16x2 arithmetic needs sm_80)."""
    return not INTERPRETED and capability(device) >= 80


def has_tensor_descriptors(device: torch.device) -> bool:
    """Whether tile loads through TMA exist; the interpreter emulates them."""
    return INTERPRETED or capability(device) >= 90


def has_warpgroup_products(device: torch.device) -> bool:
    """Whether the device has wgmma; the interpreter, which runs the warps of a program one after the other, has not."""
    return capability(device) == 90 and not INTERPRETED


def why_not_here(*tensors: Tensor | None) -> str | None:
    """None, or why these tensors cannot be given to a kernel."""
    given = [t for t in tensors if t is not None]
    devices = {t.device for t in given}
    if len(devices) != 1:
        return f"the operands are on {len(devices)} devices: {sorted(map(str, devices))}"
    kind = devices.pop().type
    if kind != "cuda" and not (kind == "cpu" and INTERPRETED):
        return f"Triton kernels run on CUDA tensors, not {kind} (on the CPU only in Triton's interpreter, TRITON_INTERPRET=1)"
    return None


def fp8_reason(device: torch.device) -> str | None:
    """None, or why Triton has no float8_e4m3fn here."""
    if device.type == "cuda" and capability(device) < 89:
        return f"float8_e4m3fn needs compute capability 8.9, not {capability(device) / 10}"
    return None


def ceil_div(a: int, b: int) -> int:
    """A / b, rounded up."""
    return -(-a // b)


def power_of_two(n: int, least: int = 1) -> int:
    """The smallest one that holds n and ``least``."""
    return max(least, 1 << (n - 1).bit_length())
