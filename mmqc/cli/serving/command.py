"""The work of `mmqc serve`: check, load, warm up, answer."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

import mmqc
from mmqc.cli.serving.limits import Limits
from mmqc.cli.serving.peer import peer
from mmqc.cli.serving.server import LOOPBACK, Served, ServeError, application, listen, run
from mmqc.kv.cache import SPEC

KV_BITS = (8, 4)  # without calibration data
SIDES = (56, 112)  # of images to warm up with: multiples of every patch size and merge that is known here


@dataclass(frozen=True)
class Options:
    """Of the command; ``mmqc serve --help`` says what each is for."""

    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = None
    name: str | None = None
    warm: bool = False
    kv_bits: int | None = None
    compiled: bool = True
    device: str | None = None
    limits: Limits = field(default_factory=Limits)


def check(options: Options) -> None:
    """Raise for what needs no model to be wrong.

    Raises:
        ServeError: an address that others reach, without a token; or bits that need calibration data.
        ServerMissingError: packages are missing.
    """
    local = options.host in {name.strip("[]") for name in LOOPBACK}
    if not local and not options.token:
        raise ServeError(
            f"--host {options.host} lets other machines ask: set a token in MMQC_TOKEN (or --token), or leave the default 127.0.0.1"
        )
    if options.token is not None and (not options.token.isascii() or not options.token.strip()):
        raise ServeError("the token has to be ASCII, and not empty: e.g. what `openssl rand -hex 24` prints")
    if options.kv_bits is not None and options.kv_bits not in KV_BITS:
        raise ServeError(
            f"--kv-bits {options.kv_bits}: 8 or 4; 2 and 1 are calibrated, so choose them when you quantize: "
            "mmqc quantize MODEL --recipe calibquant --set bits=2 --calibration DATA"
        )
    if options.warm and not options.compiled:
        raise ServeError("--warm compiles ahead, --no-compile compiles nothing: pass one of them")
    peer()


def serve(model: str, options: Options, console: Console) -> None:
    """Answer until it is stopped.

    Raises:
        ServeError: see ``check``; a port that is in use, a model without processor, or one whose cache has its bits already.
    """
    check(options)
    listening = listen(options.host, options.port)
    with listening:
        served = load(model, options)
        hosts = LOOPBACK if options.token is None else frozenset()
        app = application(served, options.limits, options.token, hosts)
        if options.warm:
            warm(app, served, console)
        _log_to_stderr()
        host, port = listening.getsockname()[:2]
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
        how = "mmqc.compiled_loop" if options.compiled else "transformers' own loop"
        wait = "" if options.warm or not options.compiled else "; the first requests compile, --warm does it ahead"
        console.print(
            f"{served.name} at {address}, decoded by {how}{wait}; Ctrl-C stops", markup=False, highlight=False, soft_wrap=True
        )
        run(app, listening)


def load(model: str, options: Options) -> Served:
    """The model on its device, its processor, its name.

    Raises:
        ServeError: see ``serve``.
    """
    import torch

    loaded, processor = _sample(model) if model in mmqc.samples.NAMES else _directory(model)
    loaded.to(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if options.kv_bits is not None:
        if hasattr(loaded, SPEC):
            raise ServeError(f"{model} was quantized with a KV cache of {getattr(loaded, SPEC).bits} bits: leave --kv-bits out")
        mmqc.quantize_(loaded, mmqc.recipes.calibquant(options.kv_bits))
    name = options.name or (model if model in mmqc.samples.NAMES else Path(model).resolve().name)
    return Served(name, loaded.eval(), processor, options.compiled)


def _sample(name: str) -> tuple[Any, Any]:
    from mmqc.samples.chat import ChatProcessor

    sample = mmqc.samples.load(name)
    return sample.model, ChatProcessor(sample.processor)


def _directory(model: str) -> tuple[Any, Any]:
    from transformers import AutoProcessor

    from mmqc.cli.jobs import load_model

    try:
        processor = AutoProcessor.from_pretrained(model)  # a tokenizer, where there is nothing else
    except (OSError, ValueError, KeyError, ImportError) as error:
        why = str(error).strip().splitlines()[0]
        raise ServeError(
            f"{model} has no processor that transformers can load ({why}); copy those of the original model there"
        ) from error
    templates = [getattr(each, "chat_template", None) for each in (processor, getattr(processor, "tokenizer", None))]
    if not any(templates):
        raise ServeError(f"the processor of {model} has no chat template; save one with it (processor.chat_template = ...)")
    return load_model(model), processor


def warm(app: Any, served: Served, console: Console) -> None:
    """Compile a call of each kind, in the thread that will answer."""
    from mmqc.compiler.warm import warm as ahead

    prompts = [{name: value.to(served.model.device) for name, value in prompt.items()} for prompt in _prompts(served)]
    for call in app.generation.submit(ahead, served.model, prompts, batches=(1,)).result():
        text = f"{call.kind:28s} {call.first_seconds:7.2f} s the first time, {call.again_seconds:7.2f} s the second"
        console.print(text, markup=False, highlight=False)


def _prompts(served: Served) -> Iterator[dict[str, Any]]:
    from PIL import Image

    for count in range(3 if served.reads().images else 1):
        images = [{"type": "image", "url": Image.new("RGB", (side, side), "gray")} for side in SIDES[:count]]
        content = [*images, {"type": "text", "text": "What is this?"}]
        if not count and not hasattr(served.processor, "tokenizer"):
            content = "What is this?"
        prompt = served.processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        yield {name: value for name, value in prompt.items() if hasattr(value, "to")}


def _log_to_stderr() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    log = logging.getLogger("mmqc.serve")
    log.addHandler(handler)
    log.propagate = False
