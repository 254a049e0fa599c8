"""The model itself is looked at after the rewrites, and put back if they were wrong."""

import copy

import pytest
import torch
from small_vlm import Small, quantize
from torch import Tensor

import mmqc
from mmqc import recipes
from mmqc.passes import fuse_rotation
from mmqc.quantization.equivalence import RewriteError, check, outputs


def test_equivalence__is_in_the_report() -> None:
    report = quantize(Small(), recipes.rotate())
    assert 0 < report.rewrite_error < 1e-5
    assert f"by {report.rewrite_error:.1e}, relative" in report.summary()
    assert report.to_dict()["rewrite_error"] == report.rewrite_error
    assert quantize(Small(), recipes.rtn(8, 8)).rewrite_error == 0


def test_equivalence__a_wrong_rewrite_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    right = fuse_rotation.Rotation.__call__
    wrong = lambda self, v: right(self, v) if v.shape[0] % 3 else v  # noqa: E731
    monkeypatch.setattr(fuse_rotation.Rotation, "__call__", wrong)
    model = Small()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RewriteError, match="the exact rewrites changed the model's output by"):
        quantize(model, recipes.rotate())
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("after", "dtype", "fails"),
    [
        (torch.ones(3) * 1.0001, torch.float32, False),
        (torch.ones(3) * 1.1, torch.float32, True),
        (torch.ones(3) * 1.1, torch.bfloat16, False),
        (torch.ones(3) * 3, torch.bfloat16, True),
        (torch.tensor([1.0, float("nan"), 1.0]), torch.float32, True),
        (torch.ones(4), torch.float32, True),
    ],
)
def test_check__bars(after: Tensor, dtype: torch.dtype, fails: bool) -> None:
    before = torch.ones(3, dtype=dtype)
    if fails:
        with pytest.raises(mmqc.RewriteError):
            check([before], [after.to(dtype)])
    else:
        assert check([before], [after.to(dtype)]) >= 0


def test_check__infinite_places_may_stay_infinite() -> None:
    masked = torch.tensor([1.0, float("-inf")])
    assert check([masked], [masked.clone()]) == 0


def test_outputs__logits_alone_where_there_are_logits() -> None:
    class Shows(torch.nn.Module):
        def forward(self, x: Tensor, logits: bool) -> dict[str, Tensor]:
            return {"hidden": x, **({"logits": 2 * x} if logits else {}), "ids": x.long()}

    x = torch.ones(2, 3)
    assert [t.tolist() for t in outputs(Shows(), {"x": x, "logits": True})] == [(2 * x).tolist()]
    assert [t.tolist() for t in outputs(Shows(), {"x": x, "logits": False})] == [x.tolist()]
