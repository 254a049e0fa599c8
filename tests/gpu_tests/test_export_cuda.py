"""AOTInductor packages on a GPU: the shipped sample's forward, floating-point and with weights in 8 bits."""

from pathlib import Path

import pytest
import torch

import mmqc
from mmqc import recipes
from mmqc.aot.exportable import relative_error
from mmqc.config import QuantConfig

pytestmark = [pytest.mark.gpu, pytest.mark.slow]  # two minutes each


@pytest.mark.parametrize("config", [None, recipes.rtn(8)], ids=["float", "rtn"])
def test_export__the_whole_forward(config: QuantConfig | None, tmp_path: Path) -> None:
    sample = mmqc.samples.load("digits-vqa")
    model = sample.model.cuda()
    batches = [{name: tensor.cuda() for name, tensor in batch.items()} for batch in sample.calibration(4)]
    if config is not None:
        mmqc.quantize_(model, config, calibration=batches, progress=False)
    path = mmqc.export(model, batches[0], tmp_path / "model.pt2", programs=["model"])
    run = torch._inductor.aoti_load_package(str(path))
    for batch in batches:
        with torch.no_grad():
            assert relative_error(run(**batch), model(**batch).logits) < 1e-4
