r"""A sample's processor behind the interface of transformers' own, for what speaks chat messages: `mmqc serve`.

    [{"role": "user", "content": [{"type": "image", "image": page}, {"type": "text", "text": "read image 1."}]}]
        ->  "<image>read image 1.\\n" and the page, through `DigitsProcessor`

All parts of all messages follow each other, as the sample's questions have them; a newline ends the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from mmqc.samples.processor import CHARACTERS, END, PAD, PLACEHOLDER, SPECIAL, DigitsProcessor


def fast_tokenizer() -> Any:
    """`CharTokenizer` as a `PreTrainedTokenizerFast`: the same ids, and a Rust tokenizer that can decode a stream."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL[PAD]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=SPECIAL[PAD], eos_token=SPECIAL[END])


def message_of(prompt: str, parts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A sample's prompt as one message, each page's part where the prompt has the page."""
    first, *pieces = ({"type": "text", "text": text} for text in prompt.removesuffix("\n").split(PLACEHOLDER))
    pairs = zip(parts, pieces, strict=True)
    return [{"role": "user", "content": [part for part in (first, *chain.from_iterable(pairs)) if part.get("text") != ""]}]


def as_messages(prompt: str, images: Sequence[Any]) -> list[dict[str, Any]]:
    """A question of a sample as a client of OpenAI's sends it: one message, its pages (uint8 [H, W, 3]) as data URLs."""
    import base64
    from io import BytesIO

    from PIL import Image

    parts = []
    for page in images:
        buffer = BytesIO()
        Image.fromarray(page).save(buffer, "PNG")
        url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
        parts.append({"type": "image_url", "image_url": {"url": url}})
    return message_of(prompt, parts)


class ChatProcessor:
    """What a server asks of a processor: `apply_chat_template`, `tokenizer`, `decode`."""

    chat_template = None

    def __init__(self, processor: DigitsProcessor) -> None:
        self.processor = processor
        self.tokenizer = fast_tokenizer()

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **_: Any) -> Any:
        """One prompt as a `BatchEncoding` of tensors; ``content`` is a text, or parts of type text and image.

        Raises:
            ValueError: a character outside printable ASCII, or an image whose sides are no multiples of 8 pixels.
        """
        from transformers import BatchEncoding
        from transformers.image_utils import load_image

        text, images = "", []
        for message in messages:
            content = message["content"]
            for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
                if part["type"] == "image":
                    images.append(load_image(part.get("image", part.get("url"))))
                    text += PLACEHOLDER
                else:
                    text += part["text"]
        return BatchEncoding(self.processor(text + "\n", images))

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        """Text of one row of token ids."""
        return self.processor.decode(ids, skip_special_tokens)
