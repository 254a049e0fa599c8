"""A call leaves behind what it was for and nothing else: buffers, random numbers, modes, gradients' flags, hooks."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_vlm import Small, batches
from torch import Tensor, nn

import mmqc
from mmqc import recipes
from mmqc.config import QuantConfig
from mmqc.quantization import finish, stand_ins, units
from mmqc.quantization.untouched import untouched


class Counting(Small):
    """Counts its calls in a buffer in place, in one that it makes anew, keeps statistics, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("total", torch.zeros(1))
        self.register_buffer("unknown", torch.full((1,), torch.nan), persistent=False)
        self.statistics = nn.BatchNorm1d(3)
        self.statistics.requires_grad_(False)

    def forward(self, input_ids: Tensor, pixel_values: Tensor, use_cache: bool = True) -> Tensor:
        self.get_buffer("calls").add_(1)
        self.total = self.total + 1
        torch.rand(1)
        self.statistics.train()(pixel_values.flatten(2).transpose(1, 2).flatten(0, 1))
        return super().forward(input_ids, pixel_values, use_cache)


def leftovers(model: nn.Module) -> dict[str, Any]:
    """What a call could leave behind, apart from weights."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks")
    return {
        "buffers": {n: (id(b), b.tolist()) for n, b in model.named_buffers() if "nan" not in str(b)},
        "random": (torch.get_rng_state().tolist(), random.getstate()),
        "modes": {n: m.training for n, m in model.named_modules()},
        "gradients": {n: p.requires_grad for n, p in model.named_parameters(remove_duplicate=False)},
        "hooks": {n: [list(getattr(m, kind)) for kind in hooks] for n, m in model.named_modules()},
        "attributes": {n: sorted(vars(m)) for n, m in model.named_modules()},
    }


def counting() -> Counting:
    model = Counting().train()
    model.model.vision.eval()
    for name, p in model.named_parameters():
        p.requires_grad_("text" in name)
    model.model.text.blocks[0].register_forward_hook(lambda *args: None)
    return model


RECIPES = {"rtn": recipes.rtn(8, 8), "mquant": recipes.mquant(8, msq=False), "rotate": recipes.rotate()}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_untouched__what_forwards_change_is_put_back(recipe: QuantConfig) -> None:
    model = counting()
    before = leftovers(model)
    mmqc.quantize_(model, recipe, batches(), progress=False)
    after = leftovers(model)
    own = before["buffers"].keys()
    assert {n: b for n, b in after["buffers"].items() if n in own} == before["buffers"]
    assert after["random"] == before["random"]
    assert after["gradients"].items() <= {**dict.fromkeys(after["gradients"], False), **before["gradients"]}.items()
    assert {n for n, mode in after["modes"].items() if n in before["modes"] and mode != before["modes"][n]} <= {
        n for n, m in model.named_modules() if type(m).__module__.startswith("mmqc.")
    }


FAILING: dict[str, tuple[Any, str]] = {
    "recording": (stand_ins, "record_model"),
    "calibration": (units, "survey"),
    "reporting": (finish, "_attach"),
}


@pytest.mark.parametrize("where", FAILING)
@pytest.mark.parametrize("recipe", [recipes.rtn(8, 8), recipes.mquant(8, msq=False)], ids=["rtn", "mquant"])
def test_untouched__by_a_call_that_fails(recipe: QuantConfig, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            real(*args)
            raise KeyboardInterrupt

        return call

    model = counting()
    place, name = FAILING[where]
    monkeypatch.setattr(place, name, fails(getattr(place, name)))
    before, weights = leftovers(model), {n: (id(p), p.detach().clone()) for n, p in model.named_parameters()}
    with pytest.raises(KeyboardInterrupt):
        mmqc.quantize_(model, recipe, batches(), progress=False)
    assert leftovers(model) == before
    assert {n: id(p) for n, p in model.named_parameters()} == {n: i for n, (i, _) in weights.items()}
    assert all(torch.equal(p, weights[n][1]) for n, p in model.named_parameters())


def test_untouched__a_buffer_that_was_rewritten_stays_so() -> None:
    model = nn.BatchNorm1d(2)
    with untouched(model, {(id(model), "running_mean")}):
        model.running_mean = torch.ones(2)
        model.running_var = torch.full((2,), 3.0)
    assert model.running_mean.tolist() == [1, 1]
    assert model.running_var is not None
    assert model.running_var.tolist() == [1, 1]
