"""The bar names the block, the loss, memory, and counts linears; a memory error names the step."""

import re
from typing import Any

import pytest
import torch
from small_vlm import Small, batches, check_unchanged, quantize, traces
from torch import nn

import mmqc
from mmqc import recipes
from mmqc.calibration.measure import Loss
from mmqc.quantization.progress import OutOfMemoryError, Progress, explained, memory


def test_progress__names_block_loss_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    report = mmqc.quantize_(Small(), recipes.rtn(8, 8), batches(), progress=True)
    shown = capsys.readouterr().err
    last = shown.strip().splitlines()[-1]
    assert f"{len(report.layers)}/{len(report.layers)}" in last
    assert re.search(r"loss=\d\.\de-\d\d, memory=[\d.]+ GB", shown)
    assert "model.text.blocks.1" in shown


def test_progress__can_be_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(False) as bar:
        bar.expect(3)
        bar.say("a block")
        bar.done(1, {"x": Loss(signal={"text": 2.0}, noise={"text": 0.5})})
        assert bar.what == "a block"
    assert capsys.readouterr().err == ""
    assert memory(torch.device("cpu")) > 1 << 20


@pytest.mark.parametrize("error", [MemoryError("no room"), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")])
def test_explained__an_error_is_explained_once_however_contexts_nest(error: Exception) -> None:
    with Progress(False) as outer, Progress(False) as inner:
        outer.say("the whole model")
        inner.say("block 3")
        with pytest.raises(OutOfMemoryError, match="at block 3") as raised, explained(outer), explained(inner):
            raise error
    assert raised.value.__cause__ is error
    assert "the whole model" not in str(raised.value)


def test_explained__other_errors_pass() -> None:
    with Progress(False) as bar, pytest.raises(ValueError, match=r"^as it was$"), explained(bar):
        raise ValueError("as it was")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), r"at model.text.blocks.1 .*device=\"cuda\""),
        (MemoryError(), "fewer calibration samples"),
    ],
)
def test_quantize__a_memory_error_says_what_to_change(error: Exception, message: str) -> None:
    model = Small()
    before = traces(model)
    calls = []

    def fail(module: nn.Module, args: Any) -> None:
        calls.append(1)
        if len(calls) > 8:
            raise error

    handle = model.get_submodule("model.text.blocks.1").register_forward_pre_hook(fail)
    with pytest.raises(OutOfMemoryError, match=message):
        quantize(model, recipes.rtn(8, 8))
    handle.remove()
    check_unchanged(model, before)
