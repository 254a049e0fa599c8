"""A model of nobody's: a tiny LLaVA with a processor of transformers', as directories, and questions with images."""

import json
from pathlib import Path

import tokenizers
import transformers
from PIL import Image
from tiny_families import FAMILIES, IMAGE

TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {% for c in m.content %}"
    "{% if c.type == 'image' %}<image> {% else %}{{ c.text }} {% endif %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)


def processor() -> transformers.LlavaProcessor:
    """Images of 32 x 32 in patches of 8, words "w3", "w4", ... for their ids."""
    words = {f"w{i}": i for i in range(IMAGE)} | {"<image>": IMAGE, "user": IMAGE + 1, "assistant": IMAGE + 2}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="w0", pad_token="w0", additional_special_tokens=["<image>"]
    )
    images = transformers.CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    return transformers.LlavaProcessor(
        images,
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )


def write_model(folder: Path, *, with_processor: bool = True) -> Path:
    """Saves the model."""
    model, _ = FAMILIES["llava"]()
    model.save_pretrained(folder)
    if with_processor:
        processor().save_pretrained(folder)
    return folder


def write_data(folder: Path, lines: int = 3) -> Path:
    """Saves questions about images of one colour each."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for i in range(lines):
        Image.new("RGB", (40, 32 + 8 * i), (80 * i, 20, 200)).save(folder / f"{i}.png")
        rows.append({"question": f"w{10 + i} w{20 + i} w30", "images": [f"{i}.png"], "answer": f"w{40 + i}"})
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder
