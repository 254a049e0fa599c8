"""The first call of an op on CUDA imports the kernels, whatever was imported before it."""

import subprocess
import sys

import pytest
import torch

import mmqc.ops  # noqa: F401
from mmqc import kernels
from mmqc.ops import define

ON_CUDA = "torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)"
FIRST = f"""if True:
    import sys
    import torch
    from mmqc.ops.hadamard_matrix import hadamard_factors
    def kernels():
        return [name for name in sys.modules if name.startswith("mmqc.kernels")]
    assert not kernels(), kernels()
    torch.cuda.is_available = lambda: %s
    x, factors = torch.randn(3, 64), [f.float() for f in hadamard_factors(64)]
    op = torch.ops.mmqc.hadamard.default
    assert not kernels(), kernels()
    torch.testing.assert_close(op.redispatch({ON_CUDA}, x, factors), op(x, factors))
    print("mmqc.kernels.rows_on_cuda" in kernels(), "mmqc.kernels.kv_on_cuda" in kernels())
"""


@pytest.mark.parametrize("cuda", [True, False])
def test_define__the_first_call_on_cuda_loads_the_kernels(cuda):
    """On a CPU: the function that torch has for CUDA is called, and the kernels run in Triton's interpreter."""
    pytest.importorskip("triton")
    done = subprocess.run([sys.executable, "-c", FIRST % cuda], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(cuda)] * 2


def test_define__every_op_has_something_to_call_there():
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("mmqc::")]
    assert len(names) > 30
    missing = [name for name in names if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")]
    assert missing == []


def test_define__an_implementation_takes_the_reference_s_place(monkeypatch):
    monkeypatch.setattr(define, "_told", {})
    monkeypatch.setattr(kernels, "install", lambda: False)
    there = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    op, x = torch.ops.mmqc.hadamard.default, torch.zeros(1, 4)
    factors = [torch.ones(4, 4)]
    assert torch.equal(op.redispatch(there, x, factors), x)

    def hadamard(x, factors):
        return x + len(factors)

    define.use_on_cuda(hadamard)
    assert torch.equal(op.redispatch(there, x, factors), x + 1)
    assert torch.equal(op(x, factors), x)
