r"""Calibration and evaluation data: a folder with ``data.jsonl`` and images, through the model's own processor.

One JSON object a line; paths are relative to the folder:

    {"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "What is this?"}]},
                  {"role": "assistant", "content": "A cat."}]}
    {"question": "What is this?", "images": ["a.png"], "answer": "A cat."}

The second form is short for one user message, images first.  The last assistant message is the answer: calibration reads it
with the prompt, evaluation asks for it.  A line's "kind", where it has one, is what evaluation tells results apart by.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmqc.errors import MmqcError

if TYPE_CHECKING:
    from torch import Tensor


class DataError(MmqcError, ValueError):
    """A file that cannot be used: names it, of data.jsonl the line too, and what is wrong."""


@dataclass(frozen=True)
class Example:
    """A prompt as chat messages, images opened, the answer to it (empty if the data has none), and what kind it is of."""

    messages: tuple[Mapping[str, Any], ...]
    answer: str = ""
    kind: str = ""

    @property
    def images(self) -> list[Any]:
        """The images in order."""
        return [p["image"] for m in self.messages for p in m["content"] if p["type"] == "image"]

    @property
    def text(self) -> str:
        """The last user message's text."""
        last = self.messages[-1]["content"]
        return " ".join(p["text"] for p in last if p["type"] == "text")


def read_examples(path: str | Path, limit: int | None = None) -> list[Example]:
    """The examples of a folder (its data.jsonl) or of a jsonl file.

    Raises:
        DataError: no such file, an empty one, or a bad line.
    """
    path = Path(path)
    file = path / "data.jsonl" if path.is_dir() else path
    if not file.is_file():
        raise DataError(f"{file} does not exist; calibration and evaluation data are a folder with data.jsonl, or a jsonl file")
    lines = [(n, line) for n, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1) if line.strip()]
    if not lines:
        raise DataError(f"{file} is empty")
    return [_example(line, file, n) for n, line in lines[:limit]]


def _example(line: str, file: Path, number: int) -> Example:
    try:
        row = json.loads(line)
        messages = row.get("messages") or _short(row)
        parsed = [{"role": m["role"], "content": list(_parts(m["content"], file.parent))} for m in messages]
    except DataError as e:
        raise DataError(f"{file}:{number}: {e}") from e
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as e:
        raise DataError(
            f'{file}:{number}: {type(e).__name__} {e}; a line is {{"messages": [{{"role": ..., "content": ...}}, ...]}} or '
            f'{{"question": ..., "images": [...], "answer": ...}}'
        ) from e
    answer = str(row.get("answer", ""))
    if parsed and parsed[-1]["role"] == "assistant":
        answer = "".join(p["text"] for p in parsed.pop()["content"] if p["type"] == "text")
    if not parsed or parsed[-1]["role"] != "user":
        raise DataError(f"{file}:{number}: no user message that the answer could follow")
    return Example(tuple(parsed), answer, str(row.get("kind", "")))


def _short(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    images = [{"type": "image", "image": path} for path in row.get("images", ())]
    return [{"role": "user", "content": [*images, {"type": "text", "text": row["question"]}]}]


def _parts(content: Any, folder: Path) -> Iterator[dict[str, Any]]:
    for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
        if part["type"] == "text":
            yield {"type": "text", "text": str(part["text"])}
        elif part["type"] == "image":
            yield {"type": "image", "image": _image(folder, part)}
        else:
            raise DataError(f"content of type {part['type']!r}; text and image are known")


def _image(folder: Path, part: Mapping[str, Any]) -> Any:
    return open_image(folder / str(part.get("image") or part.get("path") or part.get("url")))


def open_image(path: Path) -> Any:
    """An image file, in RGB.

    Raises:
        DataError: there is none, or PIL cannot read it.
    """
    from PIL import Image, UnidentifiedImageError

    if not path.is_file():
        raise DataError(f"the image {path} does not exist")
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as e:  # what PIL says to files that are damaged
        why = "no image that PIL can read" if isinstance(e, UnidentifiedImageError) else f"damaged ({e})"
        raise DataError(f"{path} is {why}") from e


def encode(processor: Any, example: Example, *, answer: bool) -> dict[str, Tensor]:
    """One batch for ``model.forward`` (``answer=True``: prompt and answer) or ``model.generate``.

    Args:
        processor: one of transformers' with a chat template; a tokenizer; or a sample's own.
        example: see above.
        answer: whether the answer is part of the batch.

    Raises:
        DataError: the processor has no chat template.
    """
    if hasattr(processor, "patches"):  # a sample's processor: plain text with <image> where an image goes
        text = "".join(_plain(part) for m in example.messages for part in m["content"])
        return processor(text + "\n", example.images, answer=example.answer if answer else None)
    messages: list[Mapping[str, Any]] = [dict(m) for m in example.messages]  # templates change what they are given
    if answer and example.answer:
        messages.append({"role": "assistant", "content": [{"type": "text", "text": example.answer}]})
    if getattr(processor, "chat_template", None) is None and not hasattr(processor, "image_processor"):
        raise DataError("the model's processor has no chat template; save one with it (processor.chat_template = ...)")
    batch = processor.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=not answer or not example.answer
    )
    import torch  # takes seconds; reading and checking examples does without

    return {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}


def _plain(part: Mapping[str, Any]) -> str:
    from mmqc.samples.processor import PLACEHOLDER

    return part["text"] if part["type"] == "text" else PLACEHOLDER


def batches(processor: Any, examples: Sequence[Example]) -> Iterator[dict[str, Tensor]]:
    """Calibration batches of one example each, answers included, made one at a time."""
    for example in examples:
        yield encode(processor, example, answer=True)
