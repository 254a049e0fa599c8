"""What stands in front of the server: who may ask, how much, and one line in the log for each who did.

ASGI without a framework: a body is read here, whole and within its limits, before anything else sees the request; from then on
the connection is watched, so that an answer which nobody waits for any more ends (`Call.left`).
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from mmqc.cli.serving.limits import Limits, RequestError

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

OPEN = {"/health": ("GET",)}  # without a token
ADDRESSES = {**OPEN, "/v1/models": ("GET",), "/v1/chat/completions": ("POST",), "/v1/completions": ("POST",)}
log = logging.getLogger("mmqc.serve")


@dataclass
class Call:
    """What is known of one request, for the log and for the thread that answers it.

    Attributes:
        left: set when the client has gone.
        asked: the token limit that the client gave.
        seed: likewise.
        prompt: its tokens; None where nothing was generated.
        new: tokens of the answer so far.
        reason: why it was refused.
    """

    start: float = field(default_factory=time.perf_counter)
    left: threading.Event = field(default_factory=threading.Event)
    asked: int | None = None
    seed: int | None = None
    prompt: int | None = None
    images: int = 0
    new: int = 0
    began: float | None = None
    reason: str = ""

    def begin(self) -> None:
        """Its turn has come."""
        self.began = time.perf_counter()

    def line(self, client: str, method: str, path: str, status: int) -> str:
        """E.g. `127.0.0.1 POST /v1/completions 200, 1.52 s: 70 tokens and 1 image, waited 0.20 s, 12 new, 9.1 tokens/s`."""
        now = time.perf_counter()
        text = f"{client} {method} {path} {status}, {now - self.start:.2f} s"
        if self.prompt is not None:
            images = f" and {self.images} image{'s' * (self.images > 1)}" if self.images else ""
            began = self.began or now
            rate = f", {self.new / (now - began):.1f} tokens/s" if self.new and now > began else ""
            text += f": {self.prompt} tokens{images}, waited {began - self.start:.2f} s, {self.new} new{rate}"
        return text + ("; the client left" if self.left.is_set() else "") + (f"; {self.reason}" if self.reason else "")


CALL: ContextVar[Call] = ContextVar("the request")


class Gate:
    """The application behind it sees only requests that are within ``limits`` and, where there is a token, carry it.

    Args:
        app: the ASGI application.
        limits: see there.
        token: what ``Authorization: Bearer`` has to say; None asks for nothing.
        hosts: names that the server may be called by; empty takes any.  Without a token, a page in somebody's browser could
            otherwise reach the server through a name of its own that leads here.
    """

    def __init__(self, app: Any, limits: Limits, token: str | None, hosts: frozenset[str] = frozenset()) -> None:
        self.app, self.limits, self.token, self.hosts = app, limits, token, hosts
        self.generation: Any = None
        self.inside = 0

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """One connection, of ASGI."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        call, status = Call(), 499  # of a client that left before the first byte
        CALL.set(call)

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self.inside += 1
        try:
            body = await self._admitted(scope, receive)
            await self._answered(call, scope, body, receive, noting)
        except RequestError as error:
            call.reason = str(error)
            await _answer(noting, error)
        except Exception as error:
            call.reason = f"{type(error).__name__}: {error}"
            if status == 499:
                await _answer(noting, RequestError(f"the server failed ({call.reason})", status=500))
        finally:
            self.inside -= 1
            client = (scope.get("client") or ("?",))[0]
            log.info("%s", call.line(client, scope["method"], _printable(scope["path"]), status))

    async def _admitted(self, scope: Message, receive: Receive) -> bytes:
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if self.hosts and _name(headers.get("host", "")) not in self.hosts:
            raise RequestError(f"this server is not called {_printable(headers.get('host', ''))!r}", status=403)
        allowed = ADDRESSES.get(scope["path"])
        if allowed is None:
            raise RequestError(f"no such address; there are {', '.join(ADDRESSES)}", status=404)
        if scope["method"] not in allowed:
            raise RequestError(f"{scope['path']} takes {', '.join(allowed)}", status=405)
        if self.token is not None and scope["path"] not in OPEN:
            given = headers.get("authorization", "").partition(" ")
            if given[0].lower() != "bearer" or not hmac.compare_digest(given[2].encode(), self.token.encode()):
                raise RequestError("a token is needed: Authorization: Bearer <token>", status=401)
        if self.inside > self.limits.waiting and scope["path"] not in OPEN:
            raise RequestError(f"{self.limits.waiting} requests are in the house; ask again later", status=429)
        if int(headers.get("content-length", "0") or 0) > self.limits.body:
            raise self._too_long()
        return await self._body(receive)

    async def _body(self, receive: Receive) -> bytes:
        parts: list[bytes] = []
        size, more = 0, True
        while more:
            try:
                message = await asyncio.wait_for(receive(), self.limits.seconds)
            except TimeoutError:
                raise RequestError(f"nothing came for {self.limits.seconds:g} s", status=408) from None
            if message["type"] == "http.disconnect":
                raise RequestError("the client left", status=400)
            parts.append(message.get("body", b""))
            size, more = size + len(parts[-1]), message.get("more_body", False)
            if size > self.limits.body:
                raise self._too_long()
        return b"".join(parts)

    def _too_long(self) -> RequestError:
        return RequestError(f"the request has more than {self.limits.body} bytes", status=413)

    async def _answered(self, call: Call, scope: Message, body: bytes, receive: Receive, send: Send) -> None:
        """Run the application on a body that is here, and watch whether the client stays."""
        gone, given, finished = asyncio.Event(), False, False

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            if not finished:  # servers say so of every connection in the end
                call.left.set()
            gone.set()

        async def replay() -> Message:
            nonlocal given
            if not given:
                given = True
                return {"type": "http.request", "body": body, "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def ending(message: Message) -> None:
            nonlocal finished
            finished = finished or (message["type"] == "http.response.body" and not message.get("more_body", False))
            await send(message)

        watcher = asyncio.create_task(watch())
        try:
            await self.app(scope, replay, ending)
        finally:
            watcher.cancel()


async def _answer(send: Send, error: RequestError) -> None:
    body = json.dumps(error.body()).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if error.status in (408, 413):  # what is still to come of the body is not read
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _name(host: str) -> str:
    """Without the port: "[::1]:8000" is "[::1]"."""
    return host[: host.find("]") + 1] if host.startswith("[") else host.partition(":")[0].lower()


def _printable(text: str) -> str:
    """On one line of a log, whatever a stranger wrote."""
    return "".join(c if c.isprintable() else "?" for c in text)[:80]
