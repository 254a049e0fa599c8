"""Edits of a model come undone, and do not keep what nobody needs any more."""

import gc
import weakref
from contextlib import suppress

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

import mmqc
from mmqc.nn.linear import QuantLinear
from mmqc.quantization.convert import Journal


def edited(journal: Journal) -> weakref.ref[nn.Parameter]:
    """Replace a weight twice; the first replacement."""
    journal.parameter("0.weight", torch.ones(2, 3))
    first = weakref.ref(journal.model.get_parameter("0.weight"))
    journal.parameter("0.weight", torch.full((2, 3), 2.0))
    return first


def test_journal__a_weight_that_was_replaced_twice_is_in_memory_once_and_comes_back() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    weight, before = model[0].weight, model[0].weight.detach().clone()
    with suppress(RuntimeError), Journal(model) as journal:
        first = edited(journal)
        gc.collect()
        assert first() is None
        assert torch.equal(model[0].weight, torch.full((2, 3), 2.0))
        raise RuntimeError("undo")
    assert model[0].weight is weight
    assert torch.equal(model[0].weight, before)


def test_journal__what_stays_is_the_last_edit() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    with Journal(model) as journal:
        edited(journal)
        journal.parameter("0.scale", torch.ones(1))
        journal.parameter("0.scale", torch.zeros(1))
    assert torch.equal(model[0].weight, torch.full((2, 3), 2.0))
    assert model[0].scale.item() == 0


def test_journal__undoing_removes_what_was_not_there() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    with suppress(RuntimeError), Journal(model) as journal:
        journal.parameter("0.scale", torch.ones(1))
        journal.parameter("0.scale", torch.zeros(1))
        raise RuntimeError("undo")
    assert getattr(model[0], "scale", None) is None


def test_journal__takes_back_edits_of_other_kinds_in_their_turn() -> None:
    model, seen = nn.Sequential(nn.Linear(3, 2)), []
    with suppress(RuntimeError), Journal(model) as journal:
        journal.attribute(model[0], "in_features", 4)
        journal.note(lambda: seen.append(model[0].in_features))
        journal.attribute(model[0], "in_features", 5)
        raise RuntimeError("undo")
    assert seen == [4]
    assert model[0].in_features == 3


def test_journal__takes_nothing_back_where_nothing_failed() -> None:
    seen: list[int] = []
    with Journal(nn.Sequential()) as journal:
        journal.note(lambda: seen.append(1))
    assert seen == []


def scaled(model: nn.Module, kind: str) -> list[object]:
    """Hang hooks on the first linear that change values; the handles."""
    linear = model[0]  # type: ignore[index]
    if kind == "forward":
        return [
            linear.register_forward_hook(lambda m, a, o: o * 3),
            linear.register_forward_hook(lambda m, a, o: o + 1, prepend=True),
        ]
    if kind == "pre":
        return [linear.register_forward_pre_hook(lambda m, a, k: ((a[0] * 3,), k), with_kwargs=True)]
    return [linear.register_full_backward_hook(lambda m, gi, go: (gi[0] * 5,))]


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("kind", ["forward", "pre", "backward"])
def test_swap__hooks_of_a_quantized_linear_go_on(kind: str, calibrated: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh())
    handles = scaled(model, kind)
    x = torch.randn(4, 32, requires_grad=True)
    expected, slope = model(x), torch.autograd.grad(model(x).sum(), x)[0]
    data = [{"input": x.detach()}] if calibrated else None
    mmqc.quantize_(model, mmqc.recipes.rtn(8).replace(keep=()), data, progress=False)
    assert isinstance(model[0], QuantLinear)
    assert (model(x) - expected).norm() / expected.norm() < 0.02
    after = torch.autograd.grad(model(x).sum(), x)[0]
    assert (after - slope).norm() / slope.norm() < 0.05
    for handle in handles:
        handle.remove()  # type: ignore[attr-defined]
    hooks = (model[0]._forward_hooks, model[0]._forward_pre_hooks, model[0]._backward_hooks)
    assert not any(hooks)


def test_swap__global_hook_may_ask_for_a_class() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh())
    handle = register_module_forward_hook(lambda m, x, y: 2 * y if isinstance(m, nn.Linear) else y)
    try:
        with pytest.warns(UserWarning, match=r"there is a global forward hook .* linears are mmqc\.nn\.linear\.QuantLinear"):
            mmqc.quantize_(model, mmqc.recipes.rtn(8).replace(keep=()), progress=False)
    finally:
        handle.remove()


def test_swap__hook_that_is_always_called_is_called_when_the_forward_fails() -> None:
    model, seen = nn.Sequential(nn.Linear(8, 8)), []
    model[0].register_forward_hook(lambda m, a, k, o: seen.append(k), with_kwargs=True, always_call=True)
    mmqc.quantize_(model, mmqc.recipes.rtn(8).replace(keep=()), progress=False)
    with pytest.raises(ValueError, match="width 3"):
        model(torch.ones(1, 3))
    assert seen == [{}]


def test_swap__attributes_that_users_set_stay() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    model[0].layer_idx, model[0].owner = 3, "vision"
    mmqc.quantize_(model, mmqc.recipes.rtn(8).replace(keep=()), progress=False)
    assert (model[0].layer_idx, model[0].owner) == (3, "vision")


def test_swap__a_patched_forward_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    inner = model[0].forward
    model[0].forward = lambda x: inner(x) * 2  # type: ignore[method-assign]
    x = torch.randn(3, 8)
    expected = model(x)
    for data in (None, [{"input": x}]):
        copy = nn.Sequential(*model)
        report = mmqc.quantize_(copy, mmqc.recipes.rtn(8).replace(keep=()), data, progress=False)
        assert [layer.fqn for layer in report.layers] == ["1"]
        assert [r.fqn for r in report.refused] == ["0"]
        assert "its forward was replaced" in report.refused[0].reason
        assert (copy(x) - expected).norm() / expected.norm() < 0.02


def test_swap__accelerates_placement_goes_over() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    add_hook_to_module(model[0], AlignDevicesHook(execution_device="cpu", io_same_device=True))
    expected = model(x := torch.randn(3, 8))
    mmqc.quantize_(model, mmqc.recipes.rtn(8).replace(keep=()), progress=False)
    assert isinstance(model[0], QuantLinear)
    assert isinstance(model[0]._hf_hook, AlignDevicesHook)
    assert (model(x) - expected).norm() / expected.norm() < 0.02


def test_swap__a_failure_leaves_hooks_where_they_were() -> None:
    def calls(m: nn.Module, a: object, o: Tensor) -> Tensor:
        return o * 3

    model = nn.Sequential(nn.Linear(8, 8))
    model[0].register_forward_hook(calls)
    before = model[0]
    with suppress(RuntimeError), Journal(model) as journal:
        journal.swap({"0": nn.Linear(8, 8)})
        assert list(model[0]._forward_hooks.values()) == [calls]
        raise RuntimeError("undo")
    assert model[0] is before
    assert list(before._forward_hooks.values()) == [calls]


class Layers(nn.Module):
    """A LayerNorm whose mean a rewrite folds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(20, 16), nn.LayerNorm(16), nn.Linear(16, 20)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(self.norm(x + self.down(torch.relu(self.up(self.norm(x))))))


def test_write_exact__norms_and_linears_that_replace_others_keep_requires_grad() -> None:
    for frozen in (False, True):
        model = Layers().requires_grad_(not frozen)
        mmqc.quantize_(model, mmqc.recipes.rotate(), [{"ids": torch.arange(12).view(2, 6)}], progress=False)
        old = {n for n, _ in Layers().named_parameters()}
        assert {p.requires_grad for n, p in model.named_parameters() if n in old} == {not frozen}
