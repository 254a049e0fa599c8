"""What one request may ask for, and how a refused one is told so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mmqc.errors import MmqcError

TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 500: "server_error"}


@dataclass(frozen=True)
class Limits:
    """Of one request.

    Attributes:
        body: bytes of it.
        images: how many it may hold.
        pixels: of all its images together.
        new_tokens: of an answer.
        waiting: requests that may be in the house at a time, answered and waiting ones.
        seconds: in which each part of a body has to come.
    """

    body: int = 32 * 2**20
    images: int = 16
    pixels: int = 32_000_000
    new_tokens: int = 4096
    waiting: int = 64
    seconds: float = 60.0


class RequestError(MmqcError, ValueError):
    """A request that is not answered: what is wrong with it, and where.

    Attributes:
        status: of HTTP.
        param: the field of the body, if it is one's fault.
    """

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.status, self.param = status, param

    def body(self) -> dict[str, Any]:
        """As OpenAI's clients read it."""
        kind = TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": None}}
