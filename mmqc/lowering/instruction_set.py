"""Which vector instructions generated code may use, asked of the compiler once instead of three times.

Inductor compiles and loads a test program for every instruction set that the processor has, two seconds each, before the first
kernel of a process, and for what each may have besides (bfloat16, VNNI) another.  The sets are ordered: a compiler and a torch
that take the largest take the others.
"""

from __future__ import annotations

import functools
import platform
from unittest import mock

from torch._inductor import config, cpu_vec_isa


@functools.cache
def find_instruction_sets() -> None:
    """Fill Inductor's list; where the largest set fails its test, or on other processors, Inductor looks for itself."""
    if platform.machine() not in ("x86_64", "AMD64") or config.cpp.vec_isa_ok is not None:
        return
    processor = cpu_vec_isa.x86_isa_checker()
    known = [isa for isa in cpu_vec_isa.supported_vec_isa_list if all(flag in processor for flag in str(isa).split())]
    if known and known[0]:
        passes = mock.patch.object(cpu_vec_isa.VecISA, "check_build", return_value=True)
        with config.patch({"cpp.vec_isa_ok": True}), passes:
            cpu_vec_isa.valid_vec_isa_list()
