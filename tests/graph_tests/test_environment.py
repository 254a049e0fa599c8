"""A variable is set in the block alone; what others set meanwhile stays."""

from __future__ import annotations

import os

import pytest

from mmqc.graph.environment import environment


def _set_and_fail() -> None:
    with environment({"MMQC_MINE": "new"}):
        assert os.environ["MMQC_MINE"] == "new"
        os.environ["MMQC_OTHER"] = "set by somebody else"
        raise ZeroDivisionError


@pytest.mark.parametrize("before", [None, "old"])
def test_environment__is_as_before_behind_the_block(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MMQC_OTHER", raising=False)
    if before is None:
        monkeypatch.delenv("MMQC_MINE", raising=False)
    else:
        monkeypatch.setenv("MMQC_MINE", before)
    try:
        with pytest.raises(ZeroDivisionError):
            _set_and_fail()
        assert os.environ.get("MMQC_MINE") == before
        assert os.environ["MMQC_OTHER"] == "set by somebody else"
    finally:
        os.environ.pop("MMQC_OTHER", None)
