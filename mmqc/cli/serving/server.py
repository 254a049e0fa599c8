"""One model of mmqc's behind transformers' server: what it is called, what it reads, how it is asked.

    app = application(Served("my-vlm", model, processor), Limits(), token=None)      # ASGI
    run(app, listen("127.0.0.1", 8000))

Handlers, streams and answers are transformers'; what is checked before and how a token is made are not.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from dataclasses import dataclass
from typing import Any

from mmqc.cli.serving.gate import CALL, Gate
from mmqc.cli.serving.generation import manager, static
from mmqc.cli.serving.limits import Limits, RequestError
from mmqc.cli.serving.peer import Peer, peer
from mmqc.cli.serving.requests import Reads, checked
from mmqc.errors import MmqcError
from mmqc.nn.modality import visual_token_ids

LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]"})
MISTAKES = (ValueError, TypeError, KeyError, IndexError, AttributeError)  # of templates and processors, given what they cannot use


class ServeError(MmqcError, ValueError):
    """A model that cannot be served, or an address that cannot be listened at: says why and what to do."""


@dataclass(frozen=True)
class Served:
    """A model, the processor that reads for it, and the name that clients ask for.

    Attributes:
        compiled: whether ``mmqc.compiled_loop`` decodes.
    """

    name: str
    model: Any
    processor: Any
    compiled: bool = True

    def reads(self) -> Reads:
        """What it takes; the config says what images become in a prompt, the processor whether it can read them."""
        processor = self.processor
        sees = bool(visual_token_ids(self.model)) and hasattr(processor, "tokenizer")
        vocabulary = self.model.config.get_text_config(decoder=True).vocab_size
        return Reads(sees, "tools" in str(getattr(processor, "chat_template", None)), vocabulary)


def application(served: Served, limits: Limits, token: str | None, hosts: frozenset[str] = frozenset()) -> Any:
    """The ASGI application; ``application.generation`` is its manager, for warming up in the thread that answers.

    Raises:
        ServerMissingError: fastapi, uvicorn or openai are not installed, or transformers has another server.
    """
    found = peer()
    _answers_as_it_writes(found, served)
    models = _one_model(found, served)
    state = found.generation_state(compile=served.compiled and static(served.model) is not None)
    generation = manager(found, limits, served.compiled)
    state.get_manager = lambda *_args, **_kwargs: generation
    handlers = {
        "chat_handler": _handler(found.chat_handler, "messages", limits, served)(models, state),
        "completion_handler": _handler(found.completion_handler, "prompt", limits, served)(models, state),
    }
    inner = found.application(model_manager=models, generation_state=state, **handlers)
    _answers_errors(inner)
    gate = Gate(inner, limits, token, hosts)
    gate.generation = generation
    return gate


def _answers_as_it_writes(found: Peer, served: Served) -> None:
    """Give the tokenizer a template of its answers where transformers would take one that does not go with its prompts.

    transformers knows how a family's answers are built (thoughts, calls of tools) by the family's name alone, and looks for the
    place in the prompt where that family's own chat template opens an answer.  Where that is never written, all of the prompt
    would count as answer.
    """
    processor = served.processor
    tokenizer = getattr(processor, "tokenizer", processor)
    anchors = (found.response_template(processor, served.model) or {}).get("start_anchor") or []
    templates = str([getattr(each, "chat_template", None) for each in (processor, tokenizer)])
    if not anchors or any(a.strip() in templates for a in ([anchors] if isinstance(anchors, str) else anchors)):
        return
    ends = served.model.generation_config.eos_token_id
    ends = tokenizer.convert_ids_to_tokens([ends] if isinstance(ends, int) else list(ends or [tokenizer.eos_token_id]))
    text = {"close": ends, "content": "text"}
    everything = r"(?s).+"  # of the prompt: the answer begins behind it
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor_pattern": everything,
        "fields": {"content": text},
    }


def _one_model(found: Peer, served: Served) -> Any:
    """transformers' ``ModelManager`` with one model, which is there and stays."""

    class OneModel(found.model_manager):
        def __init__(self) -> None:
            self.force_model = served.name
            self.since = int(time.time())

        @staticmethod
        def process_model_name(model_id: str) -> str:
            return model_id

        def load_model_and_processor(self, *_args: Any, **_kwargs: Any) -> tuple[Any, Any]:
            return served.model, served.processor

        def get_gen_models(self, *_args: Any, **_kwargs: Any) -> list[dict[str, Any]]:
            return [{"id": served.name, "object": "model", "created": self.since, "owned_by": "mmqc"}]

        list_models = get_gen_models  # its name from transformers 5.23 on

        def shutdown(self) -> None:
            """Nothing is loaded here that would have to go."""

    return OneModel()


def _handler(base: Any, needed: str, limits: Limits, served: Served) -> Any:
    """One of transformers' handlers, whose bodies are checked first."""
    reads = served.reads()

    class Handler(base):
        async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
            call = CALL.get()
            asked = await asyncio.to_thread(checked, body, needed, limits, reads)
            call.asked, call.seed = asked.get("max_tokens"), asked.pop("seed", None)
            parts = [part for message in asked.get("messages", ()) for part in message["content"]]
            call.images = sum(part["type"] == "image_url" for part in parts)
            try:
                return await super().handle_request(asked, request_id)
            except RequestError:
                raise
            except MISTAKES as error:
                raise RequestError(f"the model's processor refuses this ({type(error).__name__}: {error})", needed) from error

        def _build_generation_config(self, body: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            config = super()._build_generation_config(body, *args, **kwargs)
            if body.get("temperature") == 0:
                config.do_sample, config.temperature, config.top_p, config.top_k = False, 1.0, 1.0, 50
            elif "temperature" in body or "top_p" in body:
                config.do_sample = True
            return config

    return Handler


def _answers_errors(app: Any) -> None:
    """Errors in the words of OpenAI's interface, whoever raised them."""
    from fastapi import HTTPException  # pyright: ignore[reportMissingImports]
    from fastapi.exceptions import RequestValidationError  # pyright: ignore[reportMissingImports]
    from fastapi.responses import JSONResponse  # pyright: ignore[reportMissingImports]

    def answer(error: RequestError) -> Any:
        CALL.get().reason = str(error)
        return JSONResponse(error.body(), error.status)

    async def refused(_request: Any, error: RequestError) -> Any:
        return answer(error)

    async def http(_request: Any, error: HTTPException) -> Any:
        status = 400 if error.status_code == 422 else error.status_code
        return answer(RequestError(str(error.detail), status=status))

    async def invalid(_request: Any, error: RequestValidationError) -> Any:
        return answer(RequestError(f"the body is no JSON object ({error.errors()[0]['msg']})"))

    app.add_exception_handler(RequestError, refused)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(RequestValidationError, invalid)


def listen(host: str, port: int) -> socket.socket:
    """A socket that waits for connections; before the model is loaded, so that a port in use costs no time.

    Raises:
        ServeError: it cannot be had.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise ServeError(f"{host}:{port} cannot be listened at ({error}); pass another --host or --port") from error
    # Connections inherit it. Without, an answer's body waits 40 ms for the client to acknowledge its head.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def run(app: Any, listening: socket.socket) -> None:
    """Answer until Ctrl-C or SIGTERM; answers that are under way have five seconds."""
    import uvicorn  # pyright: ignore[reportMissingImports]

    logging.getLogger("mmqc.serve").setLevel(logging.INFO)
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=5, lifespan="off")
    with contextlib.suppress(KeyboardInterrupt):  # some versions raise it again behind an orderly end
        uvicorn.Server(config).run(sockets=[listening])
