"""Programs whose weights are in one file, read back by torch and safetensors alone."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tolerance import assert_close
from torch import Tensor, nn
from torch.export import ExportedProgram, export

from mmqc.aot.index_find import ExportError
from mmqc.aot.weights import Weights
from mmqc.lowering.package import compile_program, names_of_weights, write_package

PAGE = Path(__file__).resolve().parents[2] / "docs/howto/export.md"
X = torch.randn(3, 16)


class Tied(nn.Module):
    """A head that is the table; ``shift`` is another tensor in every program."""

    def __init__(self, table: nn.Parameter, shift: Tensor) -> None:
        super().__init__()
        self.table, self.head, self.shift = table, nn.Linear(16, 5, bias=False), nn.Buffer(shift)
        self.head.weight = table

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """[B, 16] to [B, 5]."""
        return {"logits": self.head(x @ self.table.mT @ self.table + self.shift)}


def exported(model: nn.Module) -> ExportedProgram:
    return export(model.eval(), (), {"x": X}, dynamic_shapes={"x": {0: torch.export.Dim.DYNAMIC}})


def test_weights__each_once_and_by_the_documented_lines(tmp_path: Path) -> None:
    """In a process that cannot import mmqc."""
    table = nn.Parameter(torch.randn(5, 16))
    models = {"prefill": Tied(table, torch.randn(16)), "decode": Tied(table, torch.randn(16))}
    programs = {name: exported(model) for name, model in models.items()}
    files = {n: compile_program(p, as_eager=False, metadata={}, weights_apart=True) for n, p in programs.items()}
    write_package(tmp_path / "small.pt2", files)
    weights = Weights.of(programs, {name: names_of_weights(tmp_path / "small.pt2", name) for name in programs})
    assert len({t.data_ptr() for t in weights.tensors.values()}) == len(weights.tensors) == 3
    weights.write(tmp_path / "small.safetensors")

    lines = next(
        b for b in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL) if "load_constants" in b
    )
    torch.save(X, tmp_path / "x.pt")
    after = "import torch, sys\nx = torch.load('x.pt')\ntorch.save([programs[n](x=x)['logits'] for n in programs], 'y.pt')\n"
    blocked = "import sys\nsys.modules['mmqc'] = None\n"
    subprocess.run([sys.executable, "-c", blocked + lines + after], cwd=tmp_path, check=True)
    for model, got in zip(models.values(), torch.load(tmp_path / "y.pt"), strict=True):
        assert_close(got, model(X)["logits"].detach())


def test_weights__what_a_file_cannot_keep_is_named() -> None:
    model = Tied(nn.Parameter(torch.randn(16, 5).mT), torch.randn(16))
    program = exported(model)
    with pytest.raises(ExportError, match=r"decode: head.weight has the strides \(1, 5\)"):
        Weights.of({"decode": program}, {"decode": ["head.weight"]})
    with pytest.raises(ExportError, match="decode: folded is made while the program is compiled"):
        Weights.of({"decode": program}, {"decode": ["folded"]})


def test_weights__parts_of_one_memory_are_written_one_by_one(tmp_path: Path) -> None:
    both = torch.randn(2, 3)
    Weights({"a": both[0], "b": both[1], "none": torch.empty(0)}, {"decode:c": "a"}).write(tmp_path / "w.safetensors")
    read = Weights.read(tmp_path / "w.safetensors", torch.device("cpu"))
    assert {n: t.tolist() for n, t in read.tensors.items()} == {"a": both[0].tolist(), "b": both[1].tolist(), "none": []}
    assert read.of_program("decode", ["b", "c"])["c"].tolist() == both[0].tolist()


def test_weights__free_takes_the_memory_of_whoever_has_the_tensors(tmp_path: Path) -> None:
    """Not of a file that is mapped into memory."""
    kept = torch.randn(8, 8)
    Weights({"w": kept[2:]}, {}).free()
    assert kept.untyped_storage().nbytes() == 0
    save_file({"w": X}, tmp_path / "w.safetensors")
    read = Weights.read(tmp_path / "w.safetensors", torch.device("cpu"))
    read.free()
    assert torch.equal(read.tensors["w"], X)
