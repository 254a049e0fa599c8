"""Guards of layers that the compiled loop leaves out: whatever changes in a layer is seen by the next call all the same."""

import copy
import types
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo
from quantized_vlm import quantized_vlm
from tolerance import assert_close
from torch import Tensor, nn

import mmqc
from mmqc.compiler.layer_guards import ENOUGH, LayerGuards

IDS = torch.tensor([[11, 12, 13, 14, 15, 16]])


def scores(model: Any) -> Tensor:
    """Of the token after a prompt, by a compiled prefill."""
    how = {"do_sample": False, "cache_implementation": "static", "output_scores": True, "return_dict_in_generate": True}
    return model.generate(input_ids=IDS, max_new_tokens=1, custom_generate=mmqc.compiled_loop, **how).scores[0]


def scale(layers: Any) -> None:
    layers[0].self_attn.scaling *= 3


def data(layers: Any) -> None:
    layers[1].input_layernorm.weight.data = torch.tensor([1.5])  # the same object, of another shape


def module(layers: Any) -> None:
    layers[0].mlp = layers[1].mlp


def method(layers: Any) -> None:
    layers[1].post_attention_layernorm.forward = torch.neg


def kind(layers: Any) -> None:
    class Doubled(type(layers[0].mlp)):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    layers[0].mlp.__class__ = Doubled


CHANGES: list[Callable[[Any], None]] = [scale, data, module, method, kind]


@pytest.mark.slow
@torch._dynamo.config.patch(recompile_limit=2 * len(CHANGES))  # type: ignore[attr-defined]
def test_layer_guards__a_change_is_seen(without_inductor: None) -> None:
    model: Any = quantized_vlm(depth=1)[0]
    before = scores(model)
    guards = model._mmqc_loop.guards
    number = guards.number
    assert guards.values
    assert_close(scores(model), before)
    assert guards.number == number, "nothing has changed"
    guards.enough = len(CHANGES) + 2
    for change in CHANGES:
        change(model.model.language_model.layers)
        after = scores(model)
        assert guards.number > number, change
        assert not torch.equal(after, before), change
        with torch.no_grad():
            assert_close(after, model(input_ids=IDS).logits[:, -1])
        before, number = after, guards.number


class Stack(nn.Module):
    """A list of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))


def guard(model: nn.Module, name: str, kind: str = "SEQUENCE_LENGTH") -> Any:
    return SimpleNamespace(name=name, value=eval(name, {"self": model}), has_value=True, guard_type=kind)


def parameter(layers: Any) -> None:
    layers[1].weight = nn.Parameter(layers[1].weight.detach())


def buffer(layers: Any) -> None:
    layers[1].table = torch.zeros(2)


def order(layers: Any) -> None:
    layers[0], layers[1] = layers[1], layers[0]


def moved(layers: Any) -> None:
    layers[1].double()


def hidden(layers: Any) -> None:
    layers[1].forward = torch.neg


LAYER = "self._modules['layers']._modules['1']"


@pytest.mark.parametrize("change", [parameter, buffer, order, moved, hidden])
def test_layer_guards__what_is_looked_at(change: Callable[[Any], None]) -> None:
    model = Stack()
    model.layers[1].register_buffer("table", torch.zeros(2))
    guards = LayerGuards(model)
    asked = ["self", LAYER, f"{LAYER}._parameters['weight']", f"{LAYER}._buffers['table']"]
    assert guards.keep([guard(model, n) for n in asked]) == [True, False, False, False]
    assert guards.same()
    change(model.layers)
    assert not guards.same()


def test_layer_guards__leaves_out_what_it_looks_after_and_nothing_else() -> None:
    model = Stack()
    model.layers[1].table = [1, 2]  # type: ignore[assignment]
    guards = LayerGuards(model)
    left = ["", "._parameters", "._parameters['weight']", ".in_features", ".training"]
    kept = ["self", "self._modules['layers']", "self.training", f"{LAYER}.table", f"{LAYER}.table[0]", f"{LAYER}.forward"]
    asked = [guard(model, name) for name in [*(LAYER + leaf for leaf in left), *kept]]
    assert guards.keep(asked) == [False] * len(left) + [True] * len(kept)
    assert guards.keep([guard(model, "self"), guard(model, f"{LAYER}.table", "TYPE_MATCH")]) == [True, False]
    asked[0].has_value = False
    assert guards.keep(asked)[0], "a guard on what is not there"


class Scaled(nn.Linear):
    """A layer whose class is asked."""

    factor = 2
    unasked = 0

    @property
    def half(self) -> float:
        return self.factor / 2

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x)


BASE = f"type({LAYER}).__mro__[1]"
SPACE = f"dict({BASE}.__dict__)"
NOT_THERE = SimpleNamespace(create_fn=partial(print, key="rotated", invert=True))


def constant(cls: Any) -> None:
    cls.factor = 3


def getter(cls: Any) -> None:
    cls.half = property(lambda self: 5)


def code(cls: Any) -> None:
    cls.half.fget.__code__ = (lambda self: 5).__code__


def call(cls: Any) -> None:
    cls.__call__ = lambda self, x: x


def appears(cls: Any) -> None:
    cls.rotated = None


def of_no_matter(cls: Any) -> None:
    cls.unasked = 1
    cls.new = 1


@pytest.mark.parametrize("change", [constant, getter, code, call, appears, of_no_matter])
def test_layer_guards__what_is_looked_up_in_a_class(change: Callable[[Any], None]) -> None:
    base = type("Scaled", (Scaled,), dict(vars(Scaled)))
    base.half = property(types.FunctionType(Scaled.half.fget.__code__, {}))  # type: ignore[attr-defined]
    model: Any = Stack()
    model.layers[1].__class__ = type("Twice", (base,), {})
    guards = LayerGuards(model)
    asked = ["self", f"{SPACE}['factor']", f"{SPACE}['half'].fget", f"{SPACE}['half'].fget.__code__", f"{BASE}.__call__"]
    absent = guard(model, SPACE, "DICT_CONTAINS")
    absent.orig_guard = NOT_THERE
    unknown = guard(model, SPACE, "DICT_CONTAINS")  # of a name that it does not tell
    assert guards.keep([*(guard(model, n) for n in asked), absent, unknown]) == [True, *[False] * 5, True]
    assert guards.same()
    change(base)
    assert guards.same() == (change is of_no_matter)


def test_layer_guards__a_tuple_of_constants_by_its_parts() -> None:
    model: Any = Stack()
    model.layers[1] = nn.LayerNorm(2)
    guards = LayerGuards(model)
    asked = [guard(model, n) for n in ("self", f"{LAYER}.normalized_shape", f"{LAYER}.normalized_shape[0]")]
    assert guards.keep(asked) == [True, False, False]
    model.layers[1].normalized_shape = (3,)
    assert not guards.same()


def test_layer_guards__in_a_frame_of_another_module_all_are_kept() -> None:
    model = Stack()
    assert LayerGuards(nn.Sequential(model)).keep([guard(model, n) for n in ("self", LAYER)]) == [True, True]


def test_layer_guards__a_model_that_changes_in_every_call_keeps_them() -> None:
    model = Stack()
    guards = LayerGuards(model)
    numbers = []
    for step in range(ENOUGH + 2):
        numbers.append(guards.options.get("layers"))
        guards.keep([guard(model, n) for n in ("self", f"{LAYER}.training")])
        assert guards.same()
        model.layers[1].unasked = step  # type: ignore[assignment]
        assert guards.same() == (step > 0), "an attribute that was added; another value is not what was asked"
        model.layers[1].training = bool(step % 2)
        assert not guards.same()
        guards.renew()
    assert len(set(numbers[:ENOUGH])) == ENOUGH
    assert numbers[ENOUGH:] == [None, None]


def test_layer_guards__options_can_be_copied() -> None:
    guards = LayerGuards(Stack())
    assert copy.deepcopy(guards.options) == guards.options, "transformers copies them, and compares with the last call's"


def test_layer_guards__two_models_share_nothing() -> None:
    assert LayerGuards(Stack()).options["layers"] != LayerGuards(Stack()).options["layers"]
