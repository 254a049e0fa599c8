"""A server in a thread, and OpenAI's client for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import openai

from mmqc.cli.serving.limits import Limits
from mmqc.cli.serving.server import Served, application, listen


@contextmanager
def serving(served: Served, limits: Limits | None = None, token: str | None = None) -> Iterator[openai.OpenAI]:
    """A client of a server that runs meanwhile."""
    import uvicorn

    app = application(served, limits or Limits(), token)
    with listen("127.0.0.1", 0) as listening:
        config = uvicorn.Config(app, log_level="error", access_log=False, timeout_graceful_shutdown=1, lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        address = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        try:
            yield openai.OpenAI(base_url=address, api_key=token or "none", max_retries=0, timeout=120)
        finally:
            server.should_exit = True
            thread.join(30)
