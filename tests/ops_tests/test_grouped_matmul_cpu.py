"""grouped_matmul compiled for the CPU: a loop over few rows, the op for many, loops alone in a package without Python."""

import pytest
import torch
from stacked_weights import COUNTS, offsets, with_zeros
from tolerance import assert_close

import mmqc.ops  # noqa: F401  (defines the op that the lowering is for)
from mmqc.backend import backend, collect_records

CASES = [
    (4, 0, True, False),
    (8, 0, True, False),
    (4, 16, False, False),
    (3, 8, False, False),
    (8, 5, False, False),
    (4, 16, True, False),
    (8, 5, True, False),
    (4, 0, False, True),
    (4, 16, False, True),
    (2, 8, False, True),
    (8, 5, False, True),
    (4, 16, False, "between"),
    (3, 0, False, "between"),
]  # bits, group, integer inputs, zero points


class Several(torch.nn.Module):
    """One product of each kind."""

    def __init__(self) -> None:
        super().__init__()
        for i, (bits, group, _, zeros) in enumerate(CASES):
            w, scale, bias, _, zero = with_zeros(7, 35, bits, group, zeros == "between")
            for name, part in {"w": w, "scale": scale, "bias": bias, **({"zero": zero} if zeros else {})}.items():
                self.register_buffer(f"{name}{i}", part)

    def forward(self, x: torch.Tensor, x_q: torch.Tensor, rows: torch.Tensor, bounds: torch.Tensor) -> list[torch.Tensor]:
        ys = []
        for i, (bits, group, integer, _) in enumerate(CASES):
            w, scale, bias, zero = (getattr(self, f"{name}{i}", None) for name in ("w", "scale", "bias", "zero"))
            inputs, row_scale = (x_q, rows) if integer else (x, None)
            ys.append(torch.ops.mmqc.grouped_matmul(inputs, w, scale, bounds, bias, row_scale, bits, group, torch.float32, zero))
        return ys


def operands(counts: list[int], rows: int = 9) -> tuple[torch.Tensor, ...]:
    codes = torch.randint(-128, 128, (rows, 35), dtype=torch.int8)
    return torch.randn(rows, 35), codes, torch.rand(rows), offsets(counts)


def test_grouped_matmul__of_few_rows_reads_the_stored_weight() -> None:
    torch._dynamo.reset()
    model = Several()
    with collect_records() as records:
        compiled = torch.compile(model, backend=backend)
        for counts in COUNTS.values():
            args = operands(counts)
            for y, wanted in zip(compiled(*args), model(*args), strict=True):
                assert_close(y, wanted)
    (record,) = records
    assert record.kernels
    assert not [k for k in record.kernels if k.startswith("extern")]
    torch._dynamo.reset()


@pytest.mark.slow
def test_grouped_matmul__in_a_package_needs_no_op(tmp_path) -> None:
    model, args = Several(), operands(COUNTS["none_for_some_rows"], 40)
    with torch.no_grad():
        program = torch.export.export(model, args)
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
        loaded = torch._inductor.aoti_load_package(path)
        for y, wanted in zip(loaded(*args), model(*args), strict=True):
            assert_close(y, wanted)
