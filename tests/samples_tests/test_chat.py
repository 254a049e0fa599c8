"""A sample's processor as a server sees it: the same tokens as the processor itself, both ways."""

import numpy as np
import pytest
import torch

from mmqc.samples.chat import ChatProcessor, fast_tokenizer
from mmqc.samples.processor import CHARACTERS, SPECIAL, CharTokenizer, DigitsProcessor


def test_fast_tokenizer__has_the_ids_of_the_plain_one():
    plain, fast = CharTokenizer(), fast_tokenizer()
    assert fast(CHARACTERS)["input_ids"] == plain.encode(CHARACTERS)
    assert fast.decode(plain.encode(CHARACTERS)) == CHARACTERS
    assert (fast.eos_token_id, fast.pad_token_id) == (plain.eos_token_id, plain.pad_token_id)
    ends = [*plain.encode("7 8"), plain.eos_token_id]
    assert (fast.decode(ends), fast.decode(ends, skip_special_tokens=True)) == ("7 8" + SPECIAL[1], "7 8")


def test_chat_processor__one_prompt_of_all_parts():
    pages = [np.full((8, 16, 3), i, np.uint8) for i in (7, 9)]
    parts = [
        {"type": "text", "text": "image 1: "},
        {"type": "image", "image": _picture(pages[0])},
        {"type": "text", "text": "\nimage 2: "},
    ]
    parts += [{"type": "image", "url": _picture(pages[1])}, {"type": "text", "text": "\nread image 2."}]
    got = ChatProcessor(DigitsProcessor()).apply_chat_template([{"role": "user", "content": parts}], tokenize=True)
    want = DigitsProcessor()("image 1: <image>\nimage 2: <image>\nread image 2.\n", pages)
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_chat_processor__plain_content_and_what_it_cannot_read():
    processor = ChatProcessor(DigitsProcessor())
    ids = processor.apply_chat_template([{"role": "user", "content": "read image 1."}])["input_ids"]
    assert processor.decode(ids[0]) == "read image 1.\n"
    with pytest.raises(ValueError, match="printable ASCII"):
        processor.apply_chat_template([{"role": "user", "content": "é"}])
    with pytest.raises(ValueError, match="multiples of 8"):
        processor.apply_chat_template(
            [{"role": "user", "content": [{"type": "image", "image": _picture(np.zeros((9, 8, 3), np.uint8))}]}]
        )


def _picture(page):
    from PIL import Image

    return Image.fromarray(page)
