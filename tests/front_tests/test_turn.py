"""A turn ends with the frame that took it, whether or not it was given back."""

import sys
import threading
from typing import Any

import pytest
import torch
from models import tiny_qwen2_vl

from mmqc.front.turn import Turn, caller

SOON = 20.0  # seconds; what waits for ever is stopped by it


def in_thread(work: Any) -> Any:
    """What ``work`` returns or raises in another thread; a failure if it does not end."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(SOON)
    assert found, "it waits for ever"
    return found[0]


def forgets(turn: Turn) -> None:
    """A call that ends without a word."""
    turn.take(sys._getframe())


def test_turn__is_one_thread_s_until_it_is_given_back() -> None:
    turn = Turn()
    assert turn.take(sys._getframe())
    assert turn.take(sys._getframe(), wait=False)
    assert turn.is_mine()
    turn.give()
    assert not in_thread(lambda: turn.take(sys._getframe(), wait=False))
    assert not in_thread(lambda: turn.take(sys._getframe(), wait=0.1))
    assert not in_thread(turn.is_mine)
    turn.give()
    assert in_thread(lambda: turn.take(sys._getframe(), wait=False))


def test_turn__a_waiting_thread_gets_it() -> None:
    turn, order = Turn(), []
    turn.take(sys._getframe())

    def wait() -> None:
        turn.take(sys._getframe())
        order.append("second")
        turn.give()

    thread = threading.Thread(target=wait)
    thread.start()
    order.append("first")
    turn.give()
    thread.join(SOON)
    assert order == ["first", "second"]


@pytest.mark.parametrize("where", ["the same thread", "another that has ended", "another that goes on"])
def test_turn__ends_with_its_frame(where: str) -> None:
    turn, ended, over = Turn(), threading.Event(), threading.Event()

    def call() -> None:
        forgets(turn)
        ended.set()
        over.wait(SOON if where.endswith("goes on") else 0)

    if where == "the same thread":
        forgets(turn)
    else:
        threading.Thread(target=call, daemon=True).start()
        assert ended.wait(SOON)
    assert not turn.is_mine()
    assert turn.take(sys._getframe())
    turn.give()
    assert turn.owner == 0
    over.set()


def test_caller__is_behind_the_files_that_are_left_out() -> None:
    def asks() -> Any:
        return caller("/no such file"), caller("/test_turn.py")

    here, behind = asks()
    assert here is sys._getframe()
    assert "test_turn.py" not in behind.f_code.co_filename


@pytest.mark.usefixtures("without_inductor")
def test_front__a_call_that_fails_while_another_thread_compiles_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch.compiler.is_compiling()`` is true in all threads then, and torch calls no hook of a call that fails."""
    model, batch = tiny_qwen2_vl(depth=1, layers=1)
    model.compile(backend="mmqc")
    with torch.no_grad():
        expected = model(**batch, use_cache=False).logits
        broken = {**batch, "image_grid_thw": torch.tensor([[1, 4, 6]])}
        attention = model.config.vision_config._attn_implementation

        def fails() -> None:
            monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
            try:
                model._call_impl(**broken, use_cache=False)
            finally:
                monkeypatch.undo()

        assert isinstance(in_thread(fails), Exception)
        got = in_thread(lambda: torch.no_grad()(model)(**batch, use_cache=False).logits)
    torch.testing.assert_close(got, expected)
    assert model.config.vision_config._attn_implementation == attention
