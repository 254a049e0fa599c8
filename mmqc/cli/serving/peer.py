"""transformers' server, which is nobody's public interface: every name that is used of it is looked up here.

    ChatCompletionHandler, CompletionHandler      templates, tools, streams, answers
    GenerationState, GenerateManager              one thread that generates
    ModelManager                                  says what kind of model it is
    build_server                                  the application

A version that keeps them elsewhere is refused with their names (`mmqc.versions`).
"""

from __future__ import annotations

import importlib
import inspect
import logging
from dataclasses import dataclass
from typing import Any

from mmqc.errors import MmqcError
from mmqc.versions import find

PACKAGE = "transformers.cli.serving"
EXTRA = "pip install 'mmqc[serve]'"
PLACES = {
    "build_server": "server",
    "ChatCompletionHandler": "chat_completion",
    "CompletionHandler": "completion",
    "GenerateManager": "utils",
    "GenerationState": "utils",
    "ModelManager": "model_manager",
    "_StreamError": "utils",
    "get_response_template": "utils",
}


class ServerMissingError(MmqcError, ImportError):
    """What a server needs is not installed: says which package, and how to install it."""


@dataclass(frozen=True)
class Peer:
    """The names of ``PLACES``."""

    build_server: Any
    chat_handler: Any
    completion_handler: Any
    generate_manager: Any
    generation_state: Any
    model_manager: Any
    stream_error: Any
    response_template: Any

    def application(self, **parts: Any) -> Any:
        """``build_server``, with None for handlers that this version asks for and `mmqc serve` has none of."""
        missing = {
            name: None
            for name, parameter in inspect.signature(self.build_server).parameters.items()
            if parameter.default is parameter.empty and name not in parts
        }
        return self.build_server(**parts, **missing)


def peer() -> Peer:
    """transformers' server.

    Raises:
        ServerMissingError: a package is not installed.
        MovedError: transformers keeps one of the names elsewhere.
    """
    for package in ("fastapi", "uvicorn", "openai"):
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise ServerMissingError(f"mmqc serve needs {package}: {EXTRA}") from error
    found = [find(f"{PACKAGE}.{module}:{name}", needed="mmqc serve") for name, module in PLACES.items()]
    logging.getLogger(PACKAGE).setLevel(logging.ERROR)  # a line for every request, beside ours
    return Peer(*found)
