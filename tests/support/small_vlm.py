"""The hand-written two-tower model as ``quantize_`` wants it, and what a failed call must leave as it was."""

from types import SimpleNamespace
from typing import Any

import torch
from blocks import IMAGE, MODELS
from torch import Tensor, nn

import mmqc
from mmqc.config import QuantConfig
from mmqc.quantization.request import Request


class Small(nn.Module):
    """The hand-written two-tower model with a transformers model's way to be called."""

    def __init__(self) -> None:
        super().__init__()
        self.model, _ = MODELS["vlm"]()
        self.config = SimpleNamespace(image_token_id=IMAGE)
        self.fail_on: int | None = None

    def forward(self, input_ids: Tensor, pixel_values: Tensor, use_cache: bool = True) -> Tensor:
        if self.fail_on is not None and bool((input_ids == self.fail_on).any()):
            raise RuntimeError("this batch is broken")
        return self.model(input_ids, pixel_values)


def batches(n: int = 3) -> list[dict[str, Tensor]]:
    _, batch = MODELS["vlm"]()
    g = torch.Generator().manual_seed(5)
    more = [{**batch, "pixel_values": torch.randn(2, 3, 16, 16, generator=g)} for _ in range(n - 1)]
    return [batch, *more]


def quantize(model: nn.Module, config: QuantConfig, calibration: Any = None, **more: Any) -> mmqc.QuantReport:
    return mmqc.quantize_(model, config, batches() if calibration is None else calibration, progress=False, **more)


def request(model: nn.Module, config: Any, calibration: Any = None, **more: Any) -> Request:
    """What ``quantize_`` makes of these arguments."""
    names = ("filter_fn", "progress", "resume_dir", "inputs", "device", "spool", "generate_tokens", "modality_weights")
    given = dict(zip(names, (None, False, None, "float", None, None, 0, None), strict=True)) | more
    return Request.read(model, config, calibration, **given)


@torch.no_grad()
def logits(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    out = model(**batch)
    return out if isinstance(out, Tensor) else out.logits


def traces(model: nn.Module) -> dict[str, Any]:
    """All that a failed call must leave as it was."""
    return {
        "tensors": {k: v.clone() for k, v in model.state_dict().items()},
        "identity": {k: id(p) for k, p in model.named_parameters(remove_duplicate=False)},
        "modules": {k: (type(m), id(m), m.training) for k, m in model.named_modules()},
        "hooks": {k: (len(m._forward_pre_hooks), len(m._forward_hooks)) for k, m in model.named_modules()},
        "config": dict(vars(model.config)),
    }


def check_unchanged(model: nn.Module, before: dict[str, Any]) -> None:
    after = traces(model)
    assert all(torch.equal(after["tensors"][k].nan_to_num(), v.nan_to_num()) for k, v in before["tensors"].items())
    for part in ("identity", "modules", "hooks", "config"):
        assert after[part] == before[part], part
