"""Who may ask, how much, what the log says, and that an answer ends when its client leaves: without a server."""

import asyncio
import json
import logging
import re

import pytest

from mmqc.cli.serving.gate import CALL, Gate
from mmqc.cli.serving.limits import Limits, RequestError

CHAT = "/v1/chat/completions"


class Connection:
    """One request of ASGI, and what came back."""

    def __init__(self, method="POST", path=CHAT, body=b"{}", headers=(), leaves=False):
        headers = [(name.encode(), value.encode()) for name, value in headers]
        self.scope = {"type": "http", "method": method, "path": path, "headers": headers, "client": ("10.0.0.9", 5)}
        self.parts = [
            {"type": "http.request", "body": body[i : i + 4], "more_body": i + 4 < len(body)} for i in range(0, len(body), 4)
        ]
        self.leaves, self.sent, self.stays = leaves, [], asyncio.Event()

    async def receive(self):
        if self.parts:
            return self.parts.pop(0)
        if not self.leaves:
            await self.stays.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        self.sent.append(message)

    @property
    def status(self):
        return self.sent[0]["status"]

    @property
    def error(self):
        return json.loads(self.sent[1]["body"])["error"]["message"]


async def echo(scope, receive, send):
    body = (await receive())["body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


def ask(connection, app=echo, limits=None, token=None, hosts=frozenset()):
    asyncio.run(Gate(app, limits or Limits(), token, hosts)(connection.scope, connection.receive, connection.send))
    return connection


def test_gate__hands_on_the_whole_body():
    got = ask(Connection(body=b"0123456789"))
    assert (got.status, got.sent[1]["body"]) == (200, b"0123456789")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", CHAT, 405), ("POST", "/reset", 404), ("POST", "/load_model", 404), ("GET", "/docs", 404), ("GET", "/health", 200)],
)
def test_gate__opens_four_addresses(method, path, status):
    assert ask(Connection(method, path)).status == status


@pytest.mark.parametrize(
    ("header", "status"),
    [("Bearer right", 200), ("bearer right", 200), ("Bearer wrong", 401), ("right", 401), (None, 401), ("Bearer é", 401)],
)
def test_gate__asks_for_the_token(header, status):
    headers = [] if header is None else [("authorization", header)]
    got = ask(Connection(headers=headers), token="right")
    assert got.status == status
    assert ask(Connection("GET", "/health"), token="right").status == 200


@pytest.mark.parametrize(
    ("host", "status"), [("localhost:8000", 200), ("[::1]:8000", 200), ("evil.example:8000", 403), ("", 403), ("a\nb", 403)]
)
def test_gate__is_called_by_its_names(host, status):
    assert ask(Connection(headers=[("host", host)]), hosts=frozenset({"localhost", "[::1]"})).status == status


def test_gate__bodies_have_a_length():
    limits = Limits(body=8)
    assert ask(Connection(body=b"x" * 8), limits=limits).status == 200
    told = ask(Connection(headers=[("content-length", "9")]), limits=limits)
    untold = ask(Connection(body=b"x" * 9), limits=limits)
    for got in (told, untold):
        assert (got.status, got.error) == (413, "the request has more than 8 bytes")


def test_gate__bodies_come_in_time():
    slow = Connection()
    slow.parts[-1]["more_body"] = True
    assert ask(slow, limits=Limits(seconds=0.05)).status == 408


def test_gate__no_more_than_so_many_at_a_time():
    async def several():
        go = asyncio.Event()

        async def waits(scope, receive, send):
            await go.wait()
            await echo(scope, receive, send)

        gate, connections = Gate(waits, Limits(waiting=2), None), [Connection() for _ in range(3)]
        tasks = [asyncio.create_task(gate(c.scope, c.receive, c.send)) for c in connections]
        await asyncio.sleep(0.05)
        go.set()
        await asyncio.gather(*tasks)
        again = Connection()
        await gate(again.scope, again.receive, again.send)
        return [c.status for c in (*connections, again)]

    assert asyncio.run(several()) == [200, 200, 429, 200]


def test_gate__notices_who_leaves(caplog):
    async def answers(scope, receive, send):
        call = CALL.get()
        assert not call.left.is_set()
        await receive()
        assert (await receive())["type"] == "http.disconnect"
        assert call.left.is_set()

    with caplog.at_level(logging.INFO, "mmqc.serve"):
        ask(Connection(leaves=True), answers)
    assert "499" in caplog.text
    assert "the client left" in caplog.text


def test_gate__a_closed_connection_behind_an_answer_is_not_leaving(caplog):
    with caplog.at_level(logging.INFO, "mmqc.serve"):
        ask(Connection(leaves=False))
    assert "left" not in caplog.text


def test_gate__an_error_is_an_answer_and_a_line(caplog):
    async def fails(scope, receive, send):
        raise RuntimeError('no "luck"')

    async def refuses(scope, receive, send):
        raise RequestError("not this", "n")

    with caplog.at_level(logging.INFO, "mmqc.serve"):
        broken, refused = ask(Connection(), fails), ask(Connection(), refuses)
    assert (broken.status, broken.error) == (500, 'the server failed (RuntimeError: no "luck")')
    assert (refused.status, refused.error) == (400, "not this")
    assert [f"10.0.0.9 POST {CHAT} {status}" in line for status, line in zip((500, 400), caplog.messages, strict=True)] == [
        True
    ] * 2
    assert all("\n" not in line for line in caplog.messages)


def test_gate__a_line_says_what_was_done(caplog):
    async def answers(scope, receive, send):
        call = CALL.get()
        call.prompt, call.images, call.new = 70, 2, 12
        call.begin()
        await echo(scope, receive, send)

    with caplog.at_level(logging.INFO, "mmqc.serve"):
        ask(Connection(), answers)
        ask(Connection("GET", "/health\n"))
    assert re.search(r": 70 tokens and 2 images, waited \d\.\d\d s, 12 new, ", caplog.messages[0])
    assert caplog.messages[0].endswith("tokens/s")
    assert "GET /health? 404" in caplog.messages[1]
