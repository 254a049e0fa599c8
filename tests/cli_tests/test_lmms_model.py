"""The model and the tasks for lmms-eval, with a stand-in for its modules."""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from mmqc import samples
from mmqc.cli import lmms_tasks
from mmqc.cli.chat_data import DataError, encode
from mmqc.samples.scoring import score


class Base:
    """lmms-eval's own class, as far as ours asks it."""

    rank = 0

    def __init__(self) -> None:
        self.task_dict: dict[str, Any] = {}
        self.cache_hook = SimpleNamespace(add_partial=lambda *_args: None)


@dataclasses.dataclass
class Words:
    """Keyword arguments."""

    text: str = ""
    token_counts: Any = None
    output_tokens: int = 0


@pytest.fixture(scope="module")
def lmms_model() -> Any:
    """Our module, with the stand-in."""
    known = {"lmms_eval": {}, "lmms_eval.api": {}, "lmms_eval.models": {}}
    known |= {"lmms_eval.api.model": {"lmms": Base}, "lmms_eval.api.instance": {"GenerationResult": Words, "TokenCounts": Words}}
    manifest = lambda name, chat_class_path: (name, chat_class_path)  # noqa: E731
    known |= {"lmms_eval.models.registry_v2": {"ModelManifest": manifest}}
    with pytest.MonkeyPatch.context() as patch:
        for name, content in known.items():
            module = ModuleType(name)
            vars(module).update(content)
            patch.setitem(sys.modules, name, module)
        patch.delitem(sys.modules, "mmqc.cli.lmms_model", raising=False)
        from mmqc.cli import lmms, lmms_model

        assert lmms.manifest() == ("mmqc", f"{lmms_model.__name__}.LmmsModel")
        yield lmms_model
        patch.delitem(sys.modules, "mmqc.cli.lmms_model", raising=False)


@pytest.fixture(scope="module")
def asked() -> list[Any]:
    return samples.load("digits-vqa").questions(3)


def doc_of(question: Any) -> dict[str, Any]:
    """As the task's data has it."""
    return vars(question) | {"images": [Image.fromarray(page) for page in question.images]}


def test_model__answers_as_the_sample_does(lmms_model, asked):
    model = lmms_model.LmmsModel("digits-vqa", device="cpu")
    model.task_dict = {"digits_vqa": {"test": [doc_of(q) for q in asked]}}
    given = {"max_new_tokens": 40, "temperature": 0, "do_sample": False, "until": ["\n\n"]}
    requests = [SimpleNamespace(args=("", lmms_tasks.messages, dict(given), i, "digits_vqa", "test")) for i in range(len(asked))]
    found = model.generate_until(requests)
    expected = score(model.model, model.processor, asked)
    results = [lmms_tasks.results(doc_of(q), [answer.text]) for q, answer in zip(asked, found, strict=True)]
    assert [result["accuracy"] for result in results] == [(s.kind, s.accuracy) for s in expected]
    assert all(answer.token_counts.output_tokens >= len(answer.text) > 0 for answer in found)
    cut = model.answer(lmms_tasks.messages, doc_of(asked[0]), given | {"until": found[0].text[1:]})
    assert cut.text == found[0].text[:1]


def test_model__refuses_by_name(lmms_model, tmp_path):
    for given, words in (({"batch_size": 2}, "one prompt at a time"), ({"dtype": "half"}, "there is no dtype")):
        with pytest.raises(DataError, match=words):
            lmms_model.LmmsModel("digits-vqa", **given)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DataError, match="no processor"):
        lmms_model.LmmsModel(str(tmp_path))
    with pytest.raises(DataError, match="asks with a video"):
        lmms_model.example([{"role": "user", "content": [{"type": "video", "url": "x"}]}])
    for method in (lmms_model.LmmsModel.loglikelihood, lmms_model.LmmsModel.generate_until_multi_round):
        with pytest.raises(NotImplementedError, match="mmqc in lmms-eval"):
            method(None, [])


def test_messages__are_the_samples_prompt(lmms_model, asked):
    processor = samples.load("digits-vqa").processor
    for q in asked:
        ours = encode(processor, lmms_model.example(lmms_tasks.messages(doc_of(q))), answer=False)
        for name, value in processor(q.prompt, q.images).items():
            assert torch.equal(ours[name], value), name


def test_mean_of_kinds__weighs_kinds_alike():
    assert lmms_tasks.mean_of_kinds([("a", 1.0), ("a", 0.0), ("a", 0.5), ("b", 1.0)]) == 0.75


def test_write_task__says_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"mmqc\[lmms\]"):
        lmms_tasks.write_task("digits-vqa", tmp_path)
    assert not any(tmp_path.iterdir())


def test_write_task__can_be_loaded_from_disk(tmp_path, asked):
    datasets = pytest.importorskip("datasets")
    folder = lmms_tasks.write_task("digits-vqa", tmp_path, 3)
    rows = datasets.load_from_disk(str(folder / "data"))["test"]
    assert [row["answer"] for row in rows] == [q.answer for q in asked]
    assert "load_from_disk: true" in (folder / "digits_vqa.yaml").read_text()
    with pytest.raises(FileExistsError):
        lmms_tasks.write_task("digits-vqa", tmp_path, 3)
