"""data.jsonl: both forms of a line, the processor's own template, and errors that name the line."""

import json

import pytest
import torch
from PIL import Image

from mmqc.cli.chat_data import DataError, Example, batches, encode, read_examples
from mmqc.samples.processor import IMAGE, DigitsProcessor

SHORT = {"question": "read image 1.", "images": ["a.png"], "answer": "12"}
CHAT = {
    "messages": [
        {"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "read image 1."}]},
        {"role": "assistant", "content": "12"},
    ]
}


def folder(path, *rows):
    Image.new("RGB", (16, 8), (10, 20, 30)).save(path / "a.png")
    (path / "data.jsonl").write_text("\n".join(json.dumps(row) if isinstance(row, dict) else row for row in rows))
    return path


def test_read__both_forms_are_the_same_example(tmp_path):
    short, chat = read_examples(folder(tmp_path, SHORT, "", CHAT))
    assert short.answer == chat.answer == "12"
    assert [(m["role"], [p["type"] for p in m["content"]]) for m in short.messages] == [("user", ["image", "text"])]
    assert chat.text == short.text == "read image 1."
    assert [image.size for image in chat.images] == [(16, 8)]
    assert len(read_examples(tmp_path, limit=1)) == 1
    assert len(read_examples(tmp_path / "data.jsonl")) == 2


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("{", r"data\.jsonl:1: JSONDecodeError.*question"),
        ({"answer": "1"}, r"data\.jsonl:1: KeyError 'question'"),
        ({"question": "?", "images": ["b.png"]}, r"data\.jsonl:1: the image .*b\.png does not exist"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "type 'audio'; text and image"),
        ({"messages": [{"role": "assistant", "content": "hello"}]}, "no user message"),
    ],
)
def test_read__names_the_line_and_what_is_wrong(tmp_path, row, words):
    with pytest.raises(DataError, match=words):
        read_examples(folder(tmp_path, row))


def test_read__names_the_line_of_an_image_that_is_none_or_damaged(tmp_path):
    folder(tmp_path, SHORT, {**SHORT, "images": ["b.png"]})
    (tmp_path / "b.png").write_bytes(b"not an image")
    with pytest.raises(DataError, match=r"data\.jsonl:2: .*b\.png is no image that PIL can read"):
        read_examples(tmp_path)
    for kind in ("png", "jpeg"):
        Image.effect_noise((64, 64), 50).save(tmp_path / "whole", format=kind)
        whole = (tmp_path / "whole").read_bytes()
        (tmp_path / "b.png").write_bytes(whole[: len(whole) // 2])
        with pytest.raises(DataError, match=r"data\.jsonl:2: .*b\.png is damaged \(.+\)"):
            read_examples(tmp_path)


def test_read__an_empty_or_missing_file(tmp_path):
    with pytest.raises(DataError, match=r"data\.jsonl does not exist"):
        read_examples(tmp_path)
    (tmp_path / "data.jsonl").write_text("\n")
    with pytest.raises(DataError, match="is empty"):
        read_examples(tmp_path)


def test_encode__a_samples_processor_gets_its_placeholders(tmp_path):
    (example,) = read_examples(folder(tmp_path, SHORT))
    processor = DigitsProcessor()
    batch = encode(processor, example, answer=True)
    want = processor("<image>read image 1.\n", example.images, answer="12")
    assert batch.keys() == want.keys()
    assert all(torch.equal(batch[name], tensor) for name, tensor in want.items())
    assert int((batch["input_ids"] == IMAGE).sum()) == 2
    assert [b["input_ids"].shape for b in batches(processor, [example])] == [batch["input_ids"].shape]


class Template:
    """Records what a chat template is given."""

    chat_template = "{{ messages }}"

    def apply_chat_template(self, messages, **options):
        self.messages, self.options = messages, options
        return {"input_ids": torch.ones(1, 3, dtype=torch.long), "text": "not a tensor"}


def test_encode__the_models_own_template(tmp_path):
    (example,) = read_examples(folder(tmp_path, CHAT))
    processor = Template()
    assert set(encode(processor, example, answer=True)) == {"input_ids"}
    assert [m["role"] for m in processor.messages] == ["user", "assistant"]
    assert processor.options["add_generation_prompt"] is False
    encode(processor, example, answer=False)
    assert [m["role"] for m in processor.messages] == ["user"]
    assert processor.options["add_generation_prompt"] is True
    processor.chat_template = None
    with pytest.raises(DataError, match="no chat template"):
        encode(processor, example, answer=False)


def test_encode__transformers_own_processor():
    tokenizers = pytest.importorskip("tokenizers")
    import transformers

    words = {word: i for i, word in enumerate(["<unk>", "user", "assistant", "<image>", "how", "many", "two"])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", additional_special_tokens=["<image>"]
    )
    template = (
        "{% for m in messages %}{{ m.role }} {% for c in m.content %}"
        "{% if c.type == 'image' %}<image> {% else %}{{ c.text }} {% endif %}{% endfor %}{% endfor %}"
        "{% if add_generation_prompt %}assistant{% endif %}"
    )
    images = transformers.CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    processor = transformers.LlavaProcessor(
        images,
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=template,
    )
    content = [{"type": "image", "image": Image.new("RGB", (56, 56))}, {"type": "text", "text": "how many"}]
    example = Example(({"role": "user", "content": content},), "two")
    prompt, whole = (encode(processor, example, answer=answer) for answer in (False, True))
    assert prompt["input_ids"].tolist() == [[1, 3, 3, 3, 3, 4, 5, 2]]
    assert whole["input_ids"].tolist() == [[1, 3, 3, 3, 3, 4, 5, 2, 6]]
    assert whole["pixel_values"].shape == (1, 3, 28, 28)
