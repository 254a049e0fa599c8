"""The inputs of every step are those that transformers prepares, and who is left alone."""

from __future__ import annotations

import contextlib
import random
import threading
from typing import Any

import pytest
import torch
from models import tiny_qwen2_vl
from prompts import drawn
from tiny_families import FAMILIES
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation import utils as generation

from mmqc.compiler.step_inputs import PREPARE, UPDATE, Rules, how_it_goes_on, inputs_go_on
from mmqc.compiler.step_mask import masks_go_on
from mmqc.versions import cache_of

NEW = 7
MORE: dict[str, Any] = {
    "max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "cache_implementation": "static", "disable_compile": True,
}  # fmt: skip


def copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: copied(v) for name, v in value.items()}
    return value.clone() if isinstance(value, Tensor) else value


def generated(model: Any, inputs: dict[str, Any], goes_on: bool) -> tuple[Tensor, list[dict[str, Any]], set[Rules]]:
    """Tokens, what ``forward`` was called with, and the rules that were found."""
    seen: list[dict[str, Any]] = []
    known: set[Rules] = set()
    loop: Any = generation.GenerationMixin

    def custom(model: Any, input_ids: Tensor, **kwargs: Any) -> Any:
        steps = inputs_go_on(model, known, input_ids.shape[1] + NEW) if goes_on else contextlib.nullcontext()
        with masks_go_on(cache_of(kwargs), input_ids.shape[1]), steps:
            return loop._sample(model, input_ids, **kwargs)

    hook = model.register_forward_pre_hook(lambda m, args, kw: seen.append(copied(kw)), with_kwargs=True)
    try:
        return model.generate(**inputs, **MORE, custom_generate=custom), seen, known
    finally:
        hook.remove()


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b) and (a.stride() == b.stride() or len(a) > 1)
    return type(a) is type(b) and (not isinstance(a, int | float | str) or a == b)


def compare(model: Any, inputs: dict[str, Any]) -> set[Rules]:
    """Fails where a token or an input differs; gives the rules that were used."""
    expected, plain, _ = generated(model, inputs, goes_on=False)
    got, ours, rules = generated(model, inputs, goes_on=True)
    assert torch.equal(got, expected)
    assert len(ours) == len(plain) == NEW
    assert all(same(a, b) for a, b in zip(ours, plain, strict=True))
    assert PREPARE not in vars(model)
    assert UPDATE not in vars(model)
    return rules


@pytest.mark.parametrize("prompts", [1, 3])
def test_step_inputs__are_those_of_transformers(prompts: int) -> None:
    model, _ = tiny_qwen2_vl(depth=1)
    for seed in range(3):
        batch = drawn(random.Random(seed), prompts)
        batch["mm_token_type_ids"] = (batch["input_ids"] == model.config.image_token_id).long()
        batch["attention_mask"] = (batch["input_ids"] != 0).long()
        kinds = ("mm_token_type_ids",)  # of all tokens; of the new one alone in newer versions
        assert compare(model, batch) in ({Rules(("position_ids",), kinds)}, {Rules(("position_ids",), (), kinds)})


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_step_inputs__of_any_family(family: str) -> None:
    model, batch = FAMILIES[family]()
    if not getattr(model, "can_generate", lambda: False)():
        pytest.skip("does not generate")
    assert all(rules.rising for rules in compare(model, batch))


def test_step_inputs__are_compared_once_for_a_model() -> None:
    last, known = {"input_ids": torch.ones(1, 1), "position_ids": torch.tensor([[3]])}, set()
    made = {**last, "position_ids": torch.tensor([[4]])}
    assert how_it_goes_on(last, made, known) == Rules(("position_ids",), ())
    assert len(known) == 1
    assert how_it_goes_on(made, last, known) is not None  # known: the values are not looked at


def test_step_inputs__a_new_tokens_kind_stays_zero() -> None:
    last, known = {"position_ids": torch.tensor([[3]]), "kinds": torch.zeros(1, 1, dtype=torch.long)}, set()
    made = {"position_ids": torch.tensor([[4]]), "kinds": torch.zeros(1, 1, dtype=torch.long)}
    assert how_it_goes_on(last, made, known) == Rules(("position_ids",), (), ("kinds",))
    assert how_it_goes_on(made, last, known) is not None, "known"
    other = made | {"kinds": torch.ones(1, 1, dtype=torch.long)}
    assert how_it_goes_on(last, other, rising := set()) == Rules(("position_ids", "kinds"), ())
    assert how_it_goes_on(last, made, known | rising) == Rules(("position_ids",), (), ("kinds",)), "of two ways, that of the values"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (torch.tensor([[3]]), torch.tensor([[5]])),
        (torch.tensor([[3]]), torch.tensor([[3]])),
        (torch.tensor([[3, 0]]), torch.tensor([[3, 0, 1]])),
        (torch.tensor([[3, 0]]), torch.tensor([[0, 3, 0]])),
        (torch.tensor([[3.0]]), torch.tensor([[4.0]])),
        (torch.tensor([[True]]), torch.tensor([[True]])),
        (None, torch.tensor([[4]])),
        (True, False),
        (1, True),
        ([1], [1]),
    ],
)
def test_step_inputs__that_move_in_another_way_are_prepared(before: Any, after: Any) -> None:
    known: set[Rules] = set()
    assert how_it_goes_on({"x": before}, {"x": after}, known) is None
    assert how_it_goes_on({"x": before}, {"x": before, "y": after}, known) is None
    assert not known


def test_step_inputs__leave_models_with_an_update_of_their_own_alone() -> None:
    class Own(LlamaForCausalLM):
        def _update_model_kwargs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
            return super()._update_model_kwargs_for_generation(*args, **kwargs)

    model = Own(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)).eval()
    with inputs_go_on(model, set(), 8):
        assert UPDATE not in vars(model)
    assert compare(model, {"input_ids": torch.tensor([[3, 4, 5]])}) == set()


def test_step_inputs__of_another_thread_are_its_own() -> None:
    model, batch = tiny_qwen2_vl(depth=1)
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    expected = generated(model, batch, goes_on=False)[0]
    got: list[Tensor] = []
    with inputs_go_on(model, set(), 99):
        other = threading.Thread(target=lambda: got.append(model.generate(**batch, **MORE)))
        other.start()
        other.join()
    assert torch.equal(got[0], expected)
