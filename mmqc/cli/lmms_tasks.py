"""A sample's questions as a task of lmms-eval, with its data: `python -m mmqc.cli.lmms_tasks docs-vqa out/tasks [--count 90]`.

Writes FOLDER/docs_vqa with docs_vqa.yaml, utils.py, and the pages and answers as a dataset on disk.  The metric is the sample's own
accuracy, the mean over its kinds of questions.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmqc.samples import NAMES, load, scoring
from mmqc.samples.chat import message_of

TASK = """task: {name}
dataset_path: {data}
dataset_kwargs:
  load_from_disk: true
test_split: test
output_type: generate_until
doc_to_visual: !function utils.images
doc_to_text: !function utils.question
doc_to_target: answer
doc_to_messages: !function utils.messages
generation_kwargs:
  max_new_tokens: {tokens}
  temperature: 0
  do_sample: false
process_results: !function utils.results
metric_list:
  - metric: accuracy
    aggregation: !function utils.mean_of_kinds
    higher_is_better: true
metadata:
  - version: 1.0
"""
UTILS = "from mmqc.cli.lmms_tasks import images, mean_of_kinds, messages, question, results  # noqa: F401\n"


def write_task(sample: str, folder: Path, count: int | None = None) -> Path:
    """Write the task and its data; returns the task's folder.

    Args:
        sample: a sample's name.
        folder: for ``--include_path``.
        count: how many questions; None: all.

    Raises:
        ImportError: datasets is not installed.
        FileExistsError: there is such a task.
    """
    try:
        from datasets import Dataset, DatasetDict, Features, Image, Sequence, Value  # pyright: ignore
    except ImportError as error:
        raise ImportError("a task's data is written by datasets: pip install 'mmqc[lmms]'") from error
    from PIL import Image as Pillow

    asked = load(sample).questions(count)
    name = sample.replace("-", "_")
    to = folder.absolute() / name
    to.mkdir(parents=True)
    text = Value("string")
    features = Features({"images": Sequence(Image()), "prompt": text, "question": text, "answer": text, "kind": text})
    rows = [
        dict(images=[Pillow.fromarray(i) for i in q.images], prompt=q.prompt, question=q.question, answer=q.answer, kind=q.kind)
        for q in asked
    ]
    DatasetDict({"test": Dataset.from_list(rows, features=features)}).save_to_disk(str(to / "data"))
    tokens = max(len(q.answer) for q in asked) + 1
    (to / f"{name}.yaml").write_text(TASK.format(name=name, data=to / "data", tokens=tokens), encoding="utf-8")
    (to / "utils.py").write_text(UTILS, encoding="utf-8")
    return to


# --- what the task's file names ---------------------------------------------------------------------------------------


def images(doc: Mapping[str, Any]) -> list[Any]:
    """The pages."""
    return [image.convert("RGB") for image in doc["images"]]


def question(doc: Mapping[str, Any], _specific: Any = None) -> str:
    """The question, for models that take the pages apart from it."""
    return doc["question"]


def messages(doc: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One message, with the pages where the sample's prompt has them."""
    return message_of(doc["prompt"], [{"type": "image", "url": page} for page in images(doc)])


def results(doc: Mapping[str, Any], answers: Sequence[str]) -> dict[str, Any]:
    """A question's accuracy, with its kind."""
    return {"accuracy": (doc["kind"], scoring.accuracy(doc["kind"], answers[0], doc["answer"]))}


def mean_of_kinds(found: Sequence[tuple[str, float]]) -> float:
    """Every kind weighs the same."""
    kinds: dict[str, list[float]] = {}
    for kind, value in found:
        kinds.setdefault(kind, []).append(value)
    return sum(sum(values) / len(values) for values in kinds.values()) / len(kinds)


def main() -> None:
    """Write one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sample", choices=NAMES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int)
    args = parser.parse_args()
    print(write_task(args.sample, args.folder, args.count))


if __name__ == "__main__":
    main()
