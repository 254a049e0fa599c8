"""Kernels inside generated code, compiled and ahead of time: any number of rows in one artefact, and no Python op in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mmqc.backend import backend, collect_records
from mmqc.kernels.shared.device_facts import has_warpgroup_products
from mmqc.ops.hadamard_matrix import hadamard_factors
from mmqc.ops.pack import pack

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
ROWS = (1, 5, 16, 17, 70, 300, 2050, 5000)


class Block(nn.Module):
    """Quantize, two linears that share an input, a gate, a transform, another quantization, a linear."""

    def __init__(self, k: int, n: int, bits: int, activations: bool) -> None:
        super().__init__()
        self.bits, self.activations, self.k, self.n = bits, activations, k, n
        for name, rows, columns in (("gate", n, k), ("up", n, k), ("down", k, n)):
            codes = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (rows, columns), dtype=torch.int8)
            self.register_buffer(name, codes if bits == 8 else pack(codes, bits))
            groups = (rows,) if activations else (rows, columns // 32)
            self.register_buffer(f"{name}_scale", torch.rand(groups) * 0.01 + 0.001)
        self.register_buffer("bias", torch.randn(k).bfloat16())
        self.register_buffer("scales", torch.tensor([0.02, 0.03]))
        for i, factor in enumerate(hadamard_factors(n)):
            self.register_buffer(f"factor_{i}", factor.float())
        self.factors = len(hadamard_factors(n))

    def forward(self, x: Tensor, visual: Tensor) -> Tensor:
        ops = torch.ops.mmqc
        names = ("gate", "up")
        w, s = [getattr(self, n) for n in names], [getattr(self, f"{n}_scale") for n in names]
        if self.activations:
            x_q = ops.quantize(x, self.scales, visual, 8)
            gate, up = ops.scaled_matmuls(x_q, w, self.scales, s, [None, None], visual, self.bits, x.dtype)
        else:
            gate, up = ops.weight_only_matmuls(x, w, s, [None, None], self.bits, 32)
        factors = [getattr(self, f"factor_{i}") for i in range(self.factors)]
        if not self.activations:
            h = ops.hadamard(nn.functional.silu(gate) * up, factors)
            return ops.weight_only_matmul(h, self.down, self.down_scale, self.bias, self.bits, 32)
        h = ops.hadamard_quantize(gate, up, factors, self.scales, visual, 8)
        return ops.scaled_matmul(h, self.down, self.scales, self.down_scale, self.bias, visual, self.bits, x.dtype)


def case(bits: int, activations: bool) -> tuple[Block, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(bits)
    block = Block(256, 1024, bits, activations).cuda()
    batches = [(torch.randn(1, m, 256, device="cuda").bfloat16(), torch.rand(1, m, device="cuda") < 0.5) for m in ROWS]
    return block, batches


def assert_like_eager(call: Any, block: nn.Module, batches: list[tuple[Tensor, Tensor]], most: float = 0.01) -> None:
    for x, visual in batches:
        expected = block(x, visual)
        got = call(x, visual)
        error = (got.float() - expected.float()).norm() / expected.float().norm()
        assert error < most, (x.shape, float(error))


class Mlp(nn.Module):
    """Linear, activation, gate or none, linear: as the modules write it, for fuse_epilogues to find.

    With a transform the second linear has three channels that are kept, as suppress_magnitude has it.
    """

    def __init__(self, k: int, n: int, bits: int, gate: bool, transform: bool) -> None:
        super().__init__()
        self.gate, self.bits, self.block = gate, bits, Block(k, n, bits, True)
        self.transform = transform
        self.register_buffer("low", torch.randn(k, 3).bfloat16())

    def forward(self, x: Tensor, visual: Tensor) -> Tensor:
        ops, b = torch.ops.mmqc, self.block
        x_q = ops.quantize(x, b.scales, visual, 8)

        def multiply(x_q: Tensor, w: Tensor, s: Tensor, bias: Tensor | None) -> Tensor:
            return ops.scaled_matmul(x_q, w, b.scales, s, bias, visual, self.bits, x.dtype)

        h = multiply(x_q, b.gate, b.gate_scale, None)
        h = nn.functional.silu(h) * multiply(x_q, b.up, b.up_scale, None) if self.gate else nn.functional.gelu(h)
        h = ops.hadamard(h, [getattr(b, f"factor_{i}") for i in range(b.factors)]) if self.transform else h
        y = multiply(ops.quantize(h, b.scales, visual, 8), b.down, b.down_scale, b.bias)
        return y + nn.functional.linear(h[..., :3], self.low) if self.transform else y


@pytest.mark.parametrize("transform", [False, True])
@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("bits", [8, 4])
def test_launches__epilogues_for_any_number_of_rows(bits: int, gate: bool, transform: bool) -> None:
    _, batches = case(bits, True)
    block = Mlp(256, 1024, bits, gate, transform).cuda()
    torch._dynamo.reset()
    with collect_records() as records:
        # compiled, an activation and a sum are rounded fewer times: some codes are others
        assert_like_eager(torch.compile(block, backend=backend, dynamic=True), block, batches, 0.02)
    assert records[-1].ops["scaled_matmul_epilogue"] == 1 + transform
    kernels = records[-1].kernels
    assert "mmqc gated_matmul_kernel" in kernels or not gate
    assert not any("mmqc." in k or "gelu" in k or "silu" in k or "mm" in k.split()[1:2] for k in kernels), kernels


KINDS = [(8, True), (4, True), (4, False), (3, False), (2, False)]


@pytest.mark.parametrize(("bits", "activations"), KINDS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_launches__compiled_for_any_number_of_rows(bits: int, activations: bool, dynamic: bool) -> None:
    block, batches = case(bits, activations)
    torch._dynamo.reset()
    with collect_records() as records:
        compiled = torch.compile(block, backend=backend, dynamic=dynamic)
        assert_like_eager(compiled, block, batches if dynamic else batches[:1] + batches[-2:-1])
    kernels = {k for record in records for k in record.kernels}
    assert any(k.startswith("mmqc ") for k in kernels), kernels
    # On Hopper the op itself takes many rows, of a number that is known, to a kernel that no generated code holds.
    called = {k for k in kernels if "mmqc." in k}
    known = activations and not dynamic and has_warpgroup_products(torch.device("cuda"))
    assert all("scaled_matmul" in k for k in called) if known else not called, kernels
    if dynamic:
        assert len(records) <= 2  # a single row is a size of its own to Dynamo


@pytest.mark.parametrize(("bits", "activations"), KINDS[:3])
def test_launches__in_a_package(tmp_path: Path, bits: int, activations: bool) -> None:
    from mmqc.lowering.inductor import trusted_transforms
    from mmqc.lowering.package import compile_program, load_program, write_package

    block, batches = case(bits, activations)
    rows = torch.export.Dim("rows", min=1, max=8192)
    program = torch.export.export(block, batches[3], dynamic_shapes=({1: rows}, {1: rows}))
    path = tmp_path / "block.pt2"
    with trusted_transforms(frozenset({1024})):
        write_package(path, {"block": compile_program(program, as_eager=False, metadata={})})
    assert_like_eager(load_program(path, "block"), block, batches)


@pytest.mark.parametrize("bits", [8, 4])
def test_launches__tiles_of_two_widths(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns beside a power of two, and weights that are unpacked once."""
    from mmqc.kernels.matmul import scaled_matmul
    from mmqc.kernels.matmul.configs import MatmulConfig
    from mmqc.kernels.matmul.product import EAGER

    real = scaled_matmul.plan
    forced = {
        torch.int8: MatmulConfig(128, 128, 128, 4, 3, variant="nested", per_sm=2, tail=32),
        torch.uint8: MatmulConfig(128, 128, 64, 8, 3, variant="unpack"),
    }

    def plan(x: Any, linears: Any, caller: Any = EAGER, *, config: Any = None) -> Any:
        given = forced[linears[0].w.dtype] if caller.graph and x.shape[0] > 64 else config
        return real(x, linears, caller, config=given)

    monkeypatch.setattr(scaled_matmul, "plan", plan)
    torch._dynamo.reset()
    block, batches = case(bits, True)
    for batch in batches[-2:]:
        assert_like_eager(torch.compile(block, backend=backend), block, [batch])
