"""Models of one class in threads of their own: a function that is a global of a Python module is every one's."""

import gc
import threading
import weakref

import places_tower
import pytest
import torch
from float64 import relative_error
from places_tower import Places
from tiny_families import FAMILIES
from torch import Tensor, fx, nn

import mmqc.backend
from mmqc.backend import collect_records
from mmqc.front.front import PLACES, Front, attached

SAME = 1e-5  # float32; the same sums in another order
NAMES = "input_ids", "pixel_values", "image_grid_thw"

pytestmark = pytest.mark.usefixtures("without_inductor")


def prompt_of(*sizes: int) -> tuple[Tensor, ...]:
    """For ``Places``, with images of so many rows of four patches."""
    grid = torch.tensor([[1, rows, 4] for rows in sizes])
    return torch.arange(5)[None], torch.randn(int(grid.prod(-1).sum()), 4), grid


Answer = list[tuple[Tensor, int]]


def asked(compiled: nn.Module, prompt: tuple[Tensor, ...], got: Answer) -> threading.Thread:
    """A thread that calls a model, and adds the answer and how many graphs were compiled for it."""

    @torch.no_grad()
    def call() -> None:
        with collect_records() as records:
            got.append((compiled(*prompt), len(records)))

    thread = threading.Thread(target=call)
    thread.start()
    return thread


@torch.no_grad()
def test_front__two_models_that_look_up_one_function_take_turns() -> None:
    """``places`` is a global of the models' file: while one model's reader is there, another model of the class waits."""
    torch._dynamo.reset()
    models = [Places().eval() for _ in range(2)]
    compiled = [torch.compile(model, backend="mmqc") for model in models]
    for sizes in ((4, 6), (6, 8)):
        for model, fast in zip(models, compiled, strict=True):
            prompt = prompt_of(*sizes)
            assert relative_error(fast(*prompt), model(*prompt)) < SAME
    prompt, got, here = prompt_of(8, 4), Answer(), places_tower.places
    front = attached(models[0])
    assert front is not None
    front.begin(models[0], (), dict(zip(NAMES, prompt_of(6, 4), strict=True)))
    assert places_tower.places is not here
    other = asked(compiled[1], prompt, got)
    other.join(0.3)
    assert not got, "it has not waited"
    front.end(models[0], (), None)
    other.join(20)
    assert relative_error(got[0][0], models[1](*prompt)) < SAME
    assert got[0][1] == 0, "nothing new to compile"
    assert places_tower.places is here


@torch.no_grad()
def test_front__a_compiled_model_that_is_let_go_is_gone() -> None:
    """Readers of some of its functions were in a Python module, which stays; others in its own."""
    torch._dynamo.reset()

    def compiled_once() -> list[weakref.ref[nn.Module]]:
        model, batch = FAMILIES["qwen2_vl"]()
        torch.compile(model, backend="mmqc")(**batch)
        assert attached(model) is not None
        return [weakref.ref(part) for part in model.modules()]

    gone = compiled_once()
    gc.collect()
    assert not any(part() is not None for part in gone)


@torch.no_grad()
def test_front__has_its_turn_while_the_first_call_is_traced_and_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other thread takes out what is being traced."""
    model, mine = Places().eval(), list[bool]()

    def lower(gm: fx.GraphModule, *rest: object) -> object:
        front = attached(model)
        assert front is not None
        mine.extend(turn.is_mine() for turn in (front.turn, PLACES))
        return gm.forward

    monkeypatch.setattr(mmqc.backend, "_lower", lower)
    torch.compile(model, backend="mmqc")(*prompt_of(4, 6))
    assert mine == [True, True]


@torch.no_grad()
def test_front__does_not_take_out_what_another_model_has_put_in_its_place() -> None:
    """As where a call failed without its hooks, and the other model's came before its next one."""
    models = [Places().eval() for _ in range(2)]
    prompt, here = prompt_of(4, 6), places_tower.places
    inputs = dict(zip(NAMES, prompt, strict=True))
    fronts = [Front.attach(model) for model in models]

    def fails() -> None:
        fronts[0].begin(models[0], (), inputs)

    fails()
    fronts[1].begin(models[1], (), inputs)
    reader = places_tower.places
    fronts[0].clear()
    assert places_tower.places is reader is not here
    fronts[1].end(models[1], (), None)
    assert places_tower.places is here


@torch.no_grad()
def test_front__a_first_call_waits_for_another_models_to_end() -> None:
    """Traced with the other one's reader in the place it would have guards on what is gone when they are made."""
    torch._dynamo.reset()
    models, prompt, got = [Places().eval() for _ in range(2)], prompt_of(4, 6), Answer()
    front = Front.attach(models[0])
    front.begin(models[0], (), dict(zip(NAMES, prompt, strict=True)))
    other = asked(torch.compile(models[1], backend="mmqc"), prompt, got)
    other.join(0.5)
    assert not got, "it has not waited"
    front.end(models[0], (), None)
    other.join(20)
    assert relative_error(got[0][0], models[1](*prompt)) < SAME
    assert got[0][1] == 1
