"""The largest instruction set is tested by Inductor's own means; what it answers is what Inductor would find."""

import platform
from typing import Any

import pytest
from torch._inductor import config, cpu_vec_isa

from mmqc.lowering.instruction_set import find_instruction_sets

pytestmark = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="Inductor looks for itself")


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Nothing is known yet; the sets whose test program was asked for."""
    asked: list[str] = []

    def passes(self: Any) -> bool:  # as Inductor's, which remembers its answers
        if config.cpp.vec_isa_ok is None:
            asked.append(str(self))
        return True

    for isa in cpu_vec_isa.supported_vec_isa_list:
        monkeypatch.setattr(type(isa), "__bool__", passes)
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", cpu_vec_isa.valid_vec_isa_list.__wrapped__)
    find_instruction_sets.cache_clear()
    return asked


def test_find_instruction_sets__one_program(forgotten: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    listed: Any = cpu_vec_isa.valid_vec_isa_list
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", lambda: found.extend(listed()))
    find_instruction_sets()
    processor = cpu_vec_isa.x86_isa_checker()
    able = [str(isa) for isa in cpu_vec_isa.supported_vec_isa_list if all(flag in processor for flag in str(isa).split())]
    assert [str(isa) for isa in found] == able
    assert {*forgotten} == {*able[:1]}


def test_find_instruction_sets__leaves_a_choice_of_the_users(forgotten: list[str]) -> None:
    with config.patch({"cpp.vec_isa_ok": False}):
        find_instruction_sets()
    assert not forgotten
