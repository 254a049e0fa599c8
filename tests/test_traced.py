"""A thread's eager calls are eager while another thread compiles."""

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mmqc
from mmqc.graph.tracing import as_traced, run_eagerly
from mmqc.traced import is_traced


class Asking(nn.Module):
    """Adds one in a trace."""

    def forward(self, x: Tensor) -> Tensor:
        """Of any shape."""
        return x + 1 if is_traced() else x


def test_is_traced__in_a_trace_of_this_thread_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    x, model = torch.zeros(2), Asking()
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)  # as another thread's compilation leaves it
    assert torch.equal(model(x), x)
    monkeypatch.undo()
    assert torch.equal(torch.compile(model, backend="eager")(x), x + 1)
    assert torch.equal(torch.export.export(model, (x,)).module()(x), x + 1)
    with as_traced():
        assert torch.equal(model(x), x + 1)
        assert torch.compiler.is_compiling()
        with as_traced(False):
            assert torch.equal(model(x), x)
        seen: list[Tensor] = []
        other = threading.Thread(target=lambda: seen.append(model(x)))
        other.start()
        other.join()
        assert torch.equal(seen[0], x)
    assert torch.equal(model(x), x)
    assert not torch.compiler.is_compiling()


class Hooked(nn.Module):
    """Its hook is eager, and asks."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[bool] = []
        self.register_forward_pre_hook(self.ask)

    def ask(self, module: nn.Module, args: Any) -> None:
        """Forward pre-hook."""
        self.answers.append(is_traced())

    def forward(self, x: Tensor) -> Tensor:
        """Of any shape."""
        return x + 1


def test_is_traced__is_not_compiled_where_eager_code_in_front_of_a_graph_asks() -> None:
    run_eagerly((Hooked.ask,))
    model = Hooked()
    torch.compile(model, backend="eager")(torch.zeros(2))
    assert model.answers == [False]


@pytest.fixture(scope="module")
def packed() -> Any:
    """A sample with a quantized cache, and a prompt."""
    sample = mmqc.samples.load("digits-vqa")
    mmqc.quantize_(sample.model, mmqc.recipes.mquant(4) | mmqc.recipes.calibquant(bits=2), sample.calibration(8), progress=False)
    return sample.model, sample.prompts(1)[0]


def test_cache__is_the_same_while_another_thread_compiles(packed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an eager cache keeps in order to be cut shorter does not depend on what other threads do."""
    model, prompt = copy.deepcopy(packed[0]), packed[1]
    how = {"prompt_lookup_num_tokens": 3, "do_sample": False, "min_new_tokens": 100, "max_new_tokens": 100}
    expected = model.generate(**prompt, **how)
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    assert torch.equal(model.generate(**prompt, **how), expected)
