"""AOTInductor packages on a GPU: the shipped sample's forward, floating-point and quantized."""

from pathlib import Path

import pytest
import torch

import mmqc
from mmqc import recipes
from mmqc.aot.sensitivity import moved, relative_error, within
from mmqc.config import QuantConfig

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
