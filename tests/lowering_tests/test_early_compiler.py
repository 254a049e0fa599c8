"""What the compiler is asked once is asked in a thread, and waited for; what fails there is not missed."""

from __future__ import annotations

import threading

import pytest

from mmqc.lowering import early_compiler


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What was asked for, and by which thread."""
    seen: list[tuple[str, str]] = []

    class Cache:
        @staticmethod
        def load_async(source: str) -> None:
            seen.append(("header", threading.current_thread().name))

    monkeypatch.setattr(early_compiler, "_started", [])
    monkeypatch.setattr(early_compiler, "CppPythonBindingsCodeCache", Cache)
    monkeypatch.setattr(early_compiler, "get_compile_threads", lambda: 2)
    monkeypatch.setattr(early_compiler, "find_instruction_sets", lambda: seen.append(("sets", threading.current_thread().name)))
    return seen


def test_early_compiler__begins_once_and_is_waited_for(asked: list[tuple[str, str]]) -> None:
    for _ in range(3):
        early_compiler.start()
    early_compiler.wait()
    early_compiler._started[0].join()
    here = threading.current_thread().name
    assert sorted(asked) == sorted([("sets", "mmqc-compiler"), ("header", "mmqc-compiler"), ("sets", here)])
    assert asked[0] == ("sets", "mmqc-compiler")


def test_early_compiler__nobody_waits_for_the_header(asked: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(early_compiler.CppPythonBindingsCodeCache, "load_async", staticmethod(lambda source: go_on.wait(10)))
    assert early_compiler.is_idle()
    early_compiler.start()
    early_compiler.wait()
    assert not early_compiler.is_idle()
    go_on.set()
    early_compiler._started[0].join()
    assert early_compiler.is_idle()
    assert len(asked) == 2


def test_early_compiler__one_thread_does_it_where_it_is_needed(
    asked: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early_compiler, "get_compile_threads", lambda: 1)
    early_compiler.start()
    early_compiler.wait()
    assert asked == [("sets", threading.current_thread().name)]


def test_early_compiler__an_error_is_no_ones(asked: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(source: str) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(early_compiler.CppPythonBindingsCodeCache, "load_async", staticmethod(fails))
    early_compiler.start()
    early_compiler.wait()
    assert asked[-1] == ("sets", threading.current_thread().name)
