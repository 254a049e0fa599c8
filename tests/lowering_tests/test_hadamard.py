"""hadamard and rotate through Inductor: equal to eager, by small matmuls."""

import torch
from compiled_ops import check_compiled

from mmqc.ops.rotate import random_hadamard

ops = torch.ops.mmqc


def test_lower_hadamard__rotate_and_tag_modality() -> None:
    factors, signs = random_hadamard(240, 1)
    low, flat = [f.float() for f in factors], [f.float() for f in random_hadamard(64, 1)[0]]
    visual = torch.ones(4, 7, dtype=torch.bool)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tagged = ops.tag_modality(x, visual)
        turned = ops.rotate(tagged, low, signs, False)
        return (
            ops.hadamard(tagged, low),
            turned,
            ops.rotate(turned, low, signs, True),
            ops.hadamard(x[..., :64], flat),
            ops.hadamard(x.bfloat16(), low),
            ops.hadamard(x.double(), factors),
        )

    _, record = check_compiled(function, torch.randn(4, 7, 240))
    assert "extern mm" in record.kernels
