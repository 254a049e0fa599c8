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
    """Images of 32 x 32 in patches of 8, words "w3", "w4", ... for their ids, and an end, which trl and lm-eval expect."""
    words = {f"w{i}": i for i in range(IMAGE)} | {"<image>": IMAGE, "user": IMAGE + 1, "assistant": IMAGE + 2, "</s>": IMAGE + 3}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="w0", pad_token="w0", eos_token="</s>", additional_special_tokens=["<image>"]
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


TASK = """
task: own
dataset_path: imagefolder
dataset_kwargs: {data_dir: benchmark}
test_split: train
output_type: generate_until
doc_to_image: [image]
doc_to_text: "<image> {{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {max_gen_toks: 4, do_sample: false, until: []}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


def write_task(folder: Path) -> Path:
    """Saves the questions as a task of lm-evaluation-harness, task.yaml, which reads ``benchmark`` in the directory it runs in."""
    data = write_data(folder / "benchmark") / "data.jsonl"
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    rows = [{"file_name": row["images"][0], "question": row["question"], "answer": row["answer"]} for row in rows]
    data.rename(data.with_name("metadata.jsonl")).write_text("\n".join(map(json.dumps, rows)))
    (folder / "task.yaml").write_text(TASK)
    return folder / "task.yaml"
