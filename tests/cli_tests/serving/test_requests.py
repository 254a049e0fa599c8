"""Bodies, field by field."""

import base64
from io import BytesIO

import pytest
from PIL import Image

from mmqc.cli.serving.limits import Limits, RequestError
from mmqc.cli.serving.requests import Reads, checked

READS = Reads(images=True, tools=True, vocabulary=100)
ASK = {"messages": [{"role": "user", "content": "how many?"}]}


def picture(side=4):
    buffer = BytesIO()
    Image.new("RGB", (side, side)).save(buffer, "PNG")
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url, "detail": "auto"}}


def check(body, reads=READS, needed="messages", **limits):
    return checked(body, needed, Limits(**limits), reads)


def test_checked__keeps_what_is_used_and_drops_what_has_no_effect():
    fields = {"model": "m", "temperature": 0.5, "top_p": 0.9, "seed": -3, "stream": True, "max_completion_tokens": 7, "stop": "."}
    nothing = {"user": "me", "n": 1, "logprobs": False, "response_format": {"type": "text"}, "stream_options": {}, "tools": None}
    got = check({**ASK, **fields, **nothing, "logit_bias": {"5": 2}})
    text = {"role": "user", "content": [{"type": "text", "text": "how many?"}]}
    want = {**fields, "max_tokens": 7, "stop": ["."], "logit_bias": {"5": 2.0}, "messages": [text]}
    del want["max_completion_tokens"]
    assert got == want


def test_checked__opens_images():
    content = [picture(), {"type": "text", "text": "?"}, picture(8)]
    parts = check({"messages": [{"role": "user", "content": content}]})["messages"][0]["content"]
    assert [part["type"] for part in parts] == ["image_url", "text", "image_url"]
    assert [parts[i]["image_url"]["url"].size for i in (0, 2)] == [(4, 4), (8, 8)]


def test_checked__calls_of_tools_and_developers():
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    talk = [
        {"role": "developer", "content": "be short"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "7"},
    ]
    got = check({"messages": talk, "tools": [{"type": "function"}]})["messages"]
    assert [m["role"] for m in got] == ["system", "assistant", "tool"]
    assert (got[1]["tool_calls"], got[1]["content"], got[2]["tool_call_id"]) == (calls, [], "1")


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ([], None, "JSON list"),
        ({}, "messages", "takes messages"),
        ({"prompt": "a", **ASK}, "messages", "no prompt"),
        ({"messages": []}, "messages", "at least one"),
        ({"messages": ["hi"]}, "messages[0].role", "role"),
        ({"messages": [{"role": "king", "content": ""}]}, "messages[0].role", "system, developer"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "no content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "a text, or a list"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "a text"),
        ({"messages": [{"role": "user", "content": [{"type": "video_url"}]}]}, "messages[0].content[0].type", "text or image_url"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].image_url", "data:image"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"detail": "low"}}]}]},
            "messages[0].content[0]",
            "'auto'",
        ),
        ({**ASK, "n": 2}, "n", "only 1"),
        ({**ASK, "logprobs": True}, "logprobs", "only False"),
        ({**ASK, "response_format": {"type": "json_object"}}, "response_format", "only"),
        ({**ASK, "generation_config": "{}"}, "generation_config", "not supported"),
        ({**ASK, "temperature": 3}, "temperature", "from 0 to 2"),
        ({**ASK, "temperature": "hot"}, "temperature", "from 0 to 2"),
        ({**ASK, "temperature": 1e-9}, "temperature", "0.0001"),
        ({**ASK, "top_p": 0}, "top_p", "no token"),
        ({**ASK, "max_tokens": 0}, "max_tokens", "from 1 to 4096"),
        ({**ASK, "max_tokens": 5000}, "max_tokens", "from 1 to 4096"),
        ({**ASK, "max_tokens": True}, "max_tokens", "whole number"),
        ({**ASK, "seed": 2**63}, "seed", "64 bits"),
        ({**ASK, "stream": "yes"}, "stream", "true or false"),
        ({**ASK, "stop": [""]}, "stop", "up to 4"),
        ({**ASK, "stop": list("abcde")}, "stop", "up to 4"),
        ({**ASK, "logit_bias": {"100": 1}}, "logit_bias", "below 100"),
        ({**ASK, "logit_bias": {"a": 1}}, "logit_bias", "token ids"),
        ({**ASK, "tools": "f"}, "tools", "list of objects"),
    ],
)
def test_checked__names_the_field_that_is_wrong(body, param, words):
    with pytest.raises(RequestError, match=words) as info:
        check(body)
    assert (info.value.param, info.value.status) == (param, 400)


def test_checked__what_this_model_cannot_do():
    with pytest.raises(RequestError, match="text alone"):
        check({"messages": [{"role": "user", "content": [picture()]}]}, Reads(False, True, 100))
    with pytest.raises(RequestError, match="no place for tools"):
        check({**ASK, "tools": [{}]}, Reads(True, False, 100))


def test_checked__images_by_number_and_by_pixels_of_all():
    two = {"messages": [{"role": "user", "content": [picture(8), picture(8)]}]}
    assert check(two, images=2, pixels=128)
    with pytest.raises(RequestError, match="more than 1 images"):
        check(two, images=1)
    with pytest.raises(RequestError, match="8 x 8 pixels; 63 are left") as info:
        check(two, pixels=127)
    assert info.value.param == "messages[0].content[1].image_url"


def test_checked__a_completion():
    assert check({"prompt": "once"}, needed="prompt") == {"prompt": "once"}
    for wrong in (["once"], ""):
        with pytest.raises(RequestError, match="prompt: a text"):
            check({"prompt": wrong}, needed="prompt")
