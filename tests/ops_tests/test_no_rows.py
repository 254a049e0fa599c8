"""Every op on a batch without rows: in eager mode, in a trace, and compiled."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

import mmqc.ops  # noqa: F401  (defines torch.ops.mmqc)
from mmqc.ops.hadamard_matrix import hadamard_factors
from mmqc.ops.pack import pack

N, K, G = 24, 32, 16
ops: Any = torch.ops.mmqc


def x() -> Tensor:
    return torch.randn(0, K)


def codes(n: int = N) -> Tensor:
    return torch.randint(-8, 8, (n, K), dtype=torch.int8)


def x_q() -> Tensor:
    return torch.zeros(0, K, dtype=torch.int8)


def float4() -> tuple[Tensor, Tensor, Tensor]:
    return torch.zeros(N, K // 2, dtype=torch.uint8), torch.full((N, K // 16), 56, dtype=torch.uint8), ONE


def factors() -> list[Tensor]:
    return [f.float() for f in hadamard_factors(K)]


ONE, MASK, SCALE = torch.ones(1), torch.zeros(0, dtype=torch.bool), torch.rand(N)
PARTS = [[20, 12], [4, 8]]
F32 = torch.float32
CALLS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "basis_quantize_per_token": lambda: (x(), torch.eye(K), *PARTS),
    "causal_mask": lambda: (torch.zeros(2, 0, dtype=torch.long), None, torch.randn(2, 0, 4)),
    "decode_attention": lambda: (torch.randn(0, 2, 3, 4), *torch.randn(2, 0, 2, 5, 4), None, 0.5),
    "gather_rows": lambda: (x()[None], torch.zeros(1, 0, dtype=torch.long)),
    "gather_tokens": lambda: (x()[None], torch.zeros(1, 0, dtype=torch.long), 1),
    "grouped_matmul": lambda: (
        x(),
        torch.stack([codes(), codes()]),
        torch.rand(2, N),
        torch.zeros(3, dtype=torch.int32),
        None,
        None,
        8,
        0,
        F32,
    ),
    "hadamard": lambda: (x(), factors()),
    "hadamard_quantize": lambda: (x(), x(), factors(), torch.ones(2), MASK, 8),
    "hadamard_quantize_kept": lambda: (x(), x(), factors(), torch.arange(2), torch.ones(2), MASK, 8),
    "hadamard_quantize_per_token": lambda: (x(), None, factors(), 8),
    "materialize": lambda: (x(),),
    "mixed_matmul": lambda: (
        x_q(),
        torch.rand(0, 2),
        torch.rand(0, 2),
        [codes()[:, :20].contiguous(), codes()[:, 20:].contiguous()],
        torch.rand(N, 2),
        torch.zeros(N, 2, dtype=torch.int32),
        None,
        PARTS[0],
        [8, 8],
        F32,
    ),
    "float4_matmul": lambda: (x(), *float4(), SCALE, "nvfp4"),
    "modality_order": lambda: (MASK[None], False),
    "norm_quantize": lambda: (x(), x(), torch.rand(K), None, 1e-6, False, False, ONE, None, 8),
    "norm_quantize_per_token": lambda: (x(), None, torch.rand(K), None, 1e-6, False, None, *PARTS),
    "quantize": lambda: (x(), torch.ones(2), MASK, 8),
    "quantize_per_token": lambda: (x(), None, *PARTS),
    "rotate": lambda: (x(), factors(), torch.ones(K), False),
    "scaled_matmul": lambda: (x_q(), codes(), torch.ones(2), SCALE, SCALE, MASK, 8, F32),
    "scaled_matmul, 4 bits": lambda: (x_q(), pack(codes(), 4), ONE, SCALE, None, None, 4, F32),
    "scaled_matmul, groups": lambda: (x_q(), codes(), ONE, torch.rand(N, 2), None, None, 8, F32, None, G),
    "scaled_matmul_epilogue": lambda: (x_q(), [codes()], ONE, [SCALE], [SCALE], None, 8, F32, "gelu", ONE, None, 8),
    "scaled_matmuls": lambda: (x_q(), [codes(), codes()], ONE, [SCALE, SCALE], [None, SCALE], None, 8, F32),
    "straight_through": lambda: (x(), torch.randn(0, N), [codes()], [SCALE], [K], [8], 0, None),
    "tag_modality": lambda: (x(), MASK),
    "token_matmul": lambda: (x(), codes(), SCALE, SCALE, 8, 0),
    "weight_only_matmul": lambda: (x(), codes(), SCALE, SCALE, 8, 0),
    "weight_only_matmul, 2 bits": lambda: (x(), pack(codes().clamp(-2, 1), 2), torch.rand(N, 2), None, 2, G),
    "weight_only_matmuls": lambda: (x(), [codes(), codes()], [SCALE, SCALE], [None, None], 8, 0),
}


def op(name: str) -> Any:
    """The op of a row of the table."""
    return getattr(ops, name.split(",")[0])


def forms(results: Any) -> list[tuple[list[int], torch.dtype]]:
    """Shapes and dtypes of what an op returns."""
    return [(list(t.shape), t.dtype) for t in pytree.tree_leaves(results)]


def test_table__names_every_op_with_rows() -> None:
    defined = {n.removeprefix("mmqc::") for n in torch._C._dispatch_get_all_op_names() if n.startswith("mmqc::")}
    caches = {n for n in defined if n.startswith("kv_")}  # of tokens, which a cache with none does not call
    weights = {"gptq_block", "power_clip", "learned_round", "learned_round_gradients"}
    sums = {"all_reduce", "all_reduce_norm_quantize"}  # over a process group, of a step's tokens
    assert {name.split(",")[0] for name in CALLS} == defined - caches - weights - sums


@pytest.mark.parametrize("name", CALLS)
def test_no_rows__eager_and_traced(name: str) -> None:
    args = CALLS[name]()
    expected = forms(op(name)(*args))
    assert all(0 in shape for shape, _ in expected)
    with FakeTensorMode() as mode:
        fakes = pytree.tree_map_only(Tensor, mode.from_tensor, args)
        assert forms(op(name)(*fakes)) == expected


@pytest.mark.parametrize("name", CALLS)
def test_no_rows__compiled(name: str) -> None:
    args = CALLS[name]()
    torch._dynamo.reset()
    compiled = torch.compile(lambda *given: op(name)(*given), backend="mmqc", fullgraph=True)
    with torch.no_grad():
        assert forms(compiled(*args)) == forms(op(name)(*args))
