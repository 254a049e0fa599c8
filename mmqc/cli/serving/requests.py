"""What a body asks for, checked field by field before anything is done: nothing is left out in silence.

    used      messages or prompt, max_tokens (max_completion_tokens), temperature, top_p, seed, stop, logit_bias, tools, stream
    no effect model, user, metadata, store, ...: what says who asks, not what
    refused   everything else, unless it has the value that changes nothing (n: 1, logprobs: false)

A refusal names the field, as OpenAI's clients expect it (`RequestError.param`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mmqc.cli.serving.images import open_image
from mmqc.cli.serving.limits import Limits, RequestError

NUMBERS = {"temperature": (0.0, 2.0), "top_p": (0.0, 1.0)}
USED = {"model", "messages", "prompt", "max_tokens", "seed", "stop", "logit_bias", "tools", "stream", *NUMBERS}
NO_EFFECT = {
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "safety_identifier",
    "service_tier",
    "store",
    "stream_options",
    "user",
}
UNCHANGED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False, 0),
    "frequency_penalty": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto",),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
}
ROLES = ("system", "developer", "user", "assistant", "tool")
STOPS = 4
TEMPERATURE_FLOOR = 1e-4  # below, logits would overflow; 0 is greedy


@dataclass(frozen=True)
class Reads:
    """What the served model takes: whether images, whether its chat template writes tools, and how many tokens it knows."""

    images: bool
    tools: bool
    vocabulary: int


def checked(body: Any, needed: str, limits: Limits, reads: Reads) -> dict[str, Any]:
    """The fields that are used; images of its messages opened.

    Args:
        body: what JSON gave.
        needed: "messages" of a chat, "prompt" of a completion.
        limits: see there.
        reads: of the model.

    Raises:
        RequestError: names the field, and what it may be.
    """
    if not isinstance(body, dict):
        raise RequestError(f"the body is a JSON {type(body).__name__}, not an object")
    asked = {name: value for name, value in body.items() if value is not None and name not in NO_EFFECT}
    if "max_completion_tokens" in asked:
        asked.setdefault("max_tokens", asked.pop("max_completion_tokens"))
    for name in [name for name, value in asked.items() if value in UNCHANGED.get(name, ())]:
        del asked[name]
    for name in sorted(set(asked) - USED):
        allowed = f"only {UNCHANGED[name][0]!r} is" if name in UNCHANGED else "it is not"
        raise RequestError(f"{name} = {_short(asked[name])}: {allowed} supported here", name)
    other = {"messages": "prompt", "prompt": "messages"}[needed]
    if needed not in asked or other in asked:
        raise RequestError(f"this address takes {needed}, and no {other}", needed)
    _numbers(asked, limits)
    _choices(asked, reads)
    if needed == "messages":
        asked["messages"] = _messages(asked["messages"], limits, reads.images)
    elif not isinstance(asked["prompt"], str) or not asked["prompt"]:
        raise RequestError("prompt: a text", "prompt")
    return asked


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _numbers(asked: dict[str, Any], limits: Limits) -> None:
    for name, (low, high) in NUMBERS.items():
        if name in asked and not (_is_number(asked[name]) and low <= asked[name] <= high):
            raise RequestError(f"{name} = {_short(asked[name])}: a number from {low:g} to {high:g}", name)
    if 0 < asked.get("temperature", 1) < TEMPERATURE_FLOOR:
        raise RequestError(f"temperature = {asked['temperature']}: 0, or {TEMPERATURE_FLOOR} and more", "temperature")
    if asked.get("top_p") == 0:
        raise RequestError("top_p = 0 leaves no token; temperature = 0 is greedy", "top_p")
    tokens = asked.get("max_tokens", 1)
    if not _is_whole(tokens) or not 1 <= tokens <= limits.new_tokens:
        raise RequestError(f"max_tokens = {_short(tokens)}: a whole number from 1 to {limits.new_tokens}", "max_tokens")
    if "seed" in asked and not (_is_whole(asked["seed"]) and -(2**63) <= asked["seed"] < 2**63):
        raise RequestError(f"seed = {_short(asked['seed'])}: a whole number of 64 bits", "seed")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _choices(asked: dict[str, Any], reads: Reads) -> None:
    if not isinstance(asked.get("stream", False), bool):
        raise RequestError(f"stream = {_short(asked['stream'])}: true or false", "stream")
    stop = asked.pop("stop", [])
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(s, str) and s for s in stop) or len(stop) > STOPS:
        raise RequestError(f"stop: a text, or up to {STOPS}", "stop")
    bias = asked.pop("logit_bias", {})
    known = isinstance(bias, dict) and all(k.isdecimal() and int(k) < reads.vocabulary and _is_number(v) for k, v in bias.items())
    if not known:
        raise RequestError(f"logit_bias: an object of numbers by token ids below {reads.vocabulary}", "logit_bias")
    tools = asked.pop("tools", [])
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RequestError("tools: a list of objects", "tools")
    if tools and not reads.tools:
        raise RequestError("the chat template of this model has no place for tools", "tools")
    bias = {k: float(v) for k, v in bias.items()}
    asked.update({name: value for name, value in (("stop", stop), ("logit_bias", bias), ("tools", tools)) if value})


def _messages(messages: Any, limits: Limits, sees: bool) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages: a list of at least one message", "messages")
    left, images = limits.pixels, 0
    found = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise RequestError(f"{where}: an object whose role is one of {', '.join(ROLES)}", f"{where}.role")
        content, parts = message.get("content"), []
        if content is None and not message.get("tool_calls"):
            raise RequestError(f"{where} has no content", f"{where}.content")
        if not isinstance(content, str | list | None):
            raise RequestError(f"{where}.content: a text, or a list of parts", f"{where}.content")
        for j, part in enumerate([{"type": "text", "text": content}] if isinstance(content, str) else content or []):
            parts.append(_part(part, f"{where}.content[{j}]", left, sees))
            if parts[-1]["type"] == "image_url":
                image, images = parts[-1]["image_url"]["url"], images + 1
                left -= image.width * image.height
                if images > limits.images:
                    raise RequestError(f"more than {limits.images} images", f"{where}.content[{j}]")
        role = "system" if message["role"] == "developer" else message["role"]
        more = {name: message[name] for name in ("tool_calls", "tool_call_id") if message.get(name)}
        found.append({"role": role, "content": parts, **more})
    return found


def _part(part: Any, where: str, pixels: int, sees: bool) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise RequestError(f"{where}.text: a text", f"{where}.text")
        return {"type": "text", "text": part["text"]}
    if kind != "image_url":
        raise RequestError(f"{where}.type = {_short(kind)}: text or image_url", f"{where}.type")
    if not sees:
        raise RequestError("this model reads text alone", where)
    url = part.get("image_url")
    if isinstance(url, dict):
        if url.get("detail") not in (None, "auto"):
            raise RequestError(f"{where}.image_url.detail = {_short(url['detail'])}: only 'auto' is supported here", where)
        url = url.get("url")
    # The opened image goes where transformers expects its address: its loader takes either.
    return {"type": "image_url", "image_url": {"url": open_image(url, f"{where}.image_url", pixels)}}
