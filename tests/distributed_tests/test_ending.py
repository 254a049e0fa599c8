"""What is let go before a process group ends."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

PROGRAM = """
import socket, torch.distributed as dist
from mmqc.distributed.ending import before_the_group_ends

def let_go(): print("let go", dist.is_initialized(), flush=True)

def begin():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)

"""


@pytest.fixture
def lines() -> Callable[[str], list[str]]:
    def run(program: str) -> list[str]:
        done = subprocess.run([sys.executable, "-c", PROGRAM + program], capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    return run


def test_before_the_group_ends__once_and_while_the_group_is_there(lines: Callable[[str], list[str]]) -> None:
    program = """
begin()
before_the_group_ends(let_go)
before_the_group_ends(let_go)
part = dist.new_group([0])
dist.destroy_process_group(part)
print("a part of it ended")
dist.destroy_process_group()
begin()
dist.destroy_process_group(dist.group.WORLD)
print("nothing was left")
begin()
before_the_group_ends(let_go)
dist.destroy_process_group(dist.group.WORLD)
"""
    assert lines(program) == ["a part of it ended", "let go True", "nothing was left", "let go True"]


def test_before_the_group_ends__a_process_that_just_ends(lines: Callable[[str], list[str]]) -> None:
    assert lines("begin()\nbefore_the_group_ends(let_go)\nprint('done')") == ["done", "let go True"]
