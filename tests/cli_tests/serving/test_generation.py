"""What is added to transformers' manager, piece by piece; with a server around it in test_server.py."""

import asyncio
import json
from types import SimpleNamespace

import pytest
import torch

from mmqc.cli.serving.gate import Call
from mmqc.cli.serving.generation import Said, Watch, room
from mmqc.cli.serving.limits import Limits, RequestError


@pytest.mark.parametrize(
    ("prompt", "asked", "context", "new"),
    [(10, None, None, 1024), (10, 7, None, 7), (10, None, 30, 20), (10, 20, 30, 20), (10, 4096, None, 4096)],
)
def test_room__of_an_answer(prompt, asked, context, new):
    assert room(prompt, asked, 1024, Limits(new_tokens=4096), context) == new


def test_room__is_never_more_than_the_limit_that_nobody_asked_to_pass():
    assert room(10, None, 1024, Limits(new_tokens=64), 10_000) == 64


@pytest.mark.parametrize(("prompt", "asked", "param"), [(30, None, "messages"), (40, 1, "messages"), (10, 21, "max_tokens")])
def test_room__refuses_what_does_not_fit(prompt, asked, param):
    with pytest.raises(RequestError, match="30") as info:
        room(prompt, asked, 1024, Limits(), 30)
    assert info.value.param == param


def test_watch__counts_and_stops_when_the_client_has_left():
    call = Call()
    watch, ids = Watch(call), torch.zeros(2, 5, dtype=torch.long)
    assert watch(ids, None).tolist() == [False, False]
    call.left.set()
    assert watch(ids, None).tolist() == [True, True]
    assert call.new == 2


def test_said__an_error_is_fit_to_stand_between_quotation_marks():
    queue = asyncio.Queue()

    class Error(SimpleNamespace):
        def __init__(self, msg):
            super().__init__(msg=msg)

    said, text = Said(queue, Error), 'a "b"\nc\\d'
    queue.put_nowait(Error(text))
    queue.put_nowait("as it is")
    assert json.loads(f'"{asyncio.run(said.get()).msg}"') == text
    assert said.get_nowait() == "as it is"
