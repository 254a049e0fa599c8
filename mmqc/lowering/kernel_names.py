"""What a generated wrapper calls, read from its source."""

from __future__ import annotations

import re

_CALL = re.compile(
    r"^[ \t]+(?:\w+ = )?(?:(?P<extern>extern_kernels\.\w+|torch\.ops\.\w+\.\w+)|(?P<fused>(?:cpp|triton)_\w+)"
    r"|(?P<own>\w+_kernel)_\d+|mmqc_(?P<called>(?:by_rows|variable_length)\.\w+))(?:\.\w+)?\(",
    re.MULTILINE,
)


def kernel_names(source: str) -> list[str]:
    """Names of the kernels that a generated wrapper calls, in order: "triton_…", "extern _int_mm", "mmqc scaled_matmul_kernel"."""
    found = []
    for match in _CALL.finditer(source):
        extern = match["extern"]
        if extern:
            found.append(f"extern {extern.removeprefix('extern_kernels.').removeprefix('torch.ops.')}")
        else:
            found.append(match["fused"] or f"mmqc {match['own'] or match['called']}")
    return found
