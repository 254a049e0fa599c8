"""AOTInductor packages on a GPU: the shipped sample's forward, floating-point and quantized."""

import gc
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch

import mmqc
from mmqc import recipes
from mmqc.aot.sensitivity import ROUNDED, moved, relative_error, within
from mmqc.config import QuantConfig
from mmqc.lowering import package
from mmqc.lowering.early_cpp import HAS_OWN

pytestmark = [pytest.mark.gpu, pytest.mark.slow]  # two minutes each

PLAIN = {"float": None, "rtn": recipes.rtn(8), "awq": recipes.awq(4)}
ROUNDS = {  # activations: sums in another order flip a code now and then
    "mquant W8A8": recipes.mquant(8),
    "mquant W4A8": recipes.mquant(4),
    "integer scales": recipes.integer_scale(),
    "resq": recipes.resq(),
}


@pytest.mark.parametrize("name", [*PLAIN, *ROUNDS])
def test_export__the_whole_forward(name: str, tmp_path: Path) -> None:
    sample = mmqc.samples.load("digits-vqa")
    model, config = sample.model.cuda(), {**PLAIN, **ROUNDS}[name]
    batches = [{key: tensor.cuda() for key, tensor in batch.items()} for batch in sample.calibration(6)]
    if isinstance(config, QuantConfig):
        mmqc.quantize_(model, config, calibration=batches, progress=False)
    path = mmqc.export(model, batches[0], tmp_path / "model.pt2", programs=["model"])
    run = torch._inductor.aoti_load_package(str(path))
    for batch in batches:
        with torch.no_grad():
            error = relative_error(run(**batch), model(**batch).logits)
        assert error < (1e-4 if name in PLAIN else within(moved(lambda **b: model(**b).logits, batch, model)))


def test_export__launches_what_a_compiled_graph_does(tmp_path: Path) -> None:
    """Attention within images, that of a step, gate and up in one launch, patches as a product; export compares with the model."""
    sample = mmqc.samples.load("digits-vqa")
    model = sample.model.cuda().bfloat16()
    batches = [{k: v.cuda().bfloat16() if v.is_floating_point() else v.cuda() for k, v in b.items()} for b in sample.calibration(4)]
    mmqc.quantize_(model, recipes.rtn(4, 8), calibration=batches, progress=False)
    path = mmqc.export(model, batches[0], tmp_path / "model.pt2", programs=["vision", "prefill", "decode"])
    with ZipFile(path) as file:
        code = {p: b"".join(file.read(n) for n in file.namelist() if f"/{p}/" in n) for p in ("vision", "prefill", "decode")}
    assert b"decode_attention_kernel" in code["decode"]
    if torch.cuda.get_device_capability()[0] >= 9 and not HAS_OWN:
        assert b"launchKernelEarly(kernels_" in code["decode"]
        assert b"launchKernelEarly(kernels_" not in code["prefill"]
    assert b"norm_quantize_kernel" in code["prefill"]
    assert b"convolution" not in code["vision"]
    assert b"packed_attention_kernel" in code["vision"]
    assert all(b"scaled_matmul_kernel" in c for c in code.values())


def test_export__leaves_the_device_as_it_was(tmp_path: Path) -> None:
    """But for what a kernel keeps to work in: neither the weights that it was compared with, nor copies of the model's."""
    sample = mmqc.samples.load("digits-vqa")
    model, (batch,) = sample.model.cuda(), [{key: tensor.cuda() for key, tensor in b.items()} for b in sample.calibration(1)]
    mmqc.quantize_(model, recipes.rtn(4, 8), calibration=[batch], progress=False)
    with torch.no_grad():
        model(**batch)
    gc.collect()
    before, codes = torch.cuda.memory_allocated(), sum(b.nbytes for b in model.buffers())
    mmqc.export(model, batch, tmp_path / "model.pt2", programs=["decode"], weights=tmp_path / "model.safetensors")
    assert torch.cuda.memory_allocated() - before < codes / 10


def test_package__of_more_rows_than_it_was_exported_with(tmp_path: Path) -> None:
    """Of 257 rows this product's sums are split over programs, which have memory for parts of so many."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5120, 1280), torch.nn.Linear(1280, 64)).cuda().eval()  # the last one is the head
    inputs = [torch.randn(rows, 5120, device="cuda") for rows in (96, 7, 257, 3600, 25_600)]
    mmqc.quantize_(model, recipes.rtn(4, 8), calibration=[{"input": inputs[0]}], progress=False)
    program = torch.export.export(model, (), {"input": inputs[0]}, dynamic_shapes={"input": {0: torch.export.Dim.DYNAMIC}})
    files = package.compile_program(program, as_eager=False, metadata={})
    package.write_package(tmp_path / "linears.pt2", {"linears": files})
    run = package.load_program(tmp_path / "linears.pt2", "linears")
    for x in inputs:
        with torch.no_grad():
            assert relative_error(run(input=x), model(x)) < ROUNDED, len(x)
