"""The adapter to lm-evaluation-harness, against a stand-in of its entry point."""

import sys
from types import SimpleNamespace

import pytest
import torch
from commands import invoke

from mmqc.cli.harness import harness

RESULTS = {"mmmu_val": {"alias": "mmmu", "acc,none": 0.4, "acc_stderr,none": 0.02}, "chartqa": {"relaxed,strict": 0.8}}


def stand_in(monkeypatch):
    """In the place of lm_eval; gives what it was asked."""
    asked = {}
    fake = SimpleNamespace(simple_evaluate=lambda **options: asked.update(options) or {"results": RESULTS})
    tasks = SimpleNamespace(TaskManager=lambda metadata: SimpleNamespace(all_tasks=["mmmu_val", "chartqa"], metadata=metadata))
    monkeypatch.setitem(sys.modules, "lm_eval", fake)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", tasks)
    return asked


def test_harness__asks_for_hf_multimodal_and_flattens_the_metrics(monkeypatch, tmp_path):
    asked = stand_in(monkeypatch)
    found = harness("dir", ["mmmu_val", "chartqa"], limit=3, max_images=2)
    assert found == {"mmmu_val/acc": 0.4, "mmmu_val/acc_stderr": 0.02, "chartqa/relaxed": 0.8}
    assert asked["model"] == "hf-multimodal"
    assert asked["model_args"] == {"pretrained": "dir", "max_images": 2}
    assert (asked["tasks"], asked["limit"], asked["batch_size"]) == (["mmmu_val", "chartqa"], 3, 1)
    assert not asked["apply_chat_template"]
    assert asked["task_manager"].metadata == asked["model_args"]
    assert asked["device"] == ("cuda" if torch.cuda.is_available() else "cpu")
    harness("dir", ["chartqa"], device="cuda:1")
    assert (asked["device"], asked["model_args"]) == ("cuda:1", {"pretrained": "dir"})
    result = invoke("eval", "dir", "--tasks", "chartqa", "-n", "7", "--chat-template", "--json", str(tmp_path / "e.json"))
    assert result.exit_code == 0, result.output
    assert (asked["tasks"], asked["limit"], asked["apply_chat_template"]) == (["chartqa"], 7, True)
    assert "0.8000" in result.output


def test_harness__that_is_not_there_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ImportError, match=r"mmqc\[eval\]"):
        harness("dir", ["chartqa"])
    result = invoke("eval", "dir", "--tasks", "chartqa")
    assert result.exit_code == 3
    assert "mmqc[eval]" in result.output


def test_harness__does_not_know_a_task_and_says_so_before_it_loads_the_model(monkeypatch, tmp_path):
    asked = stand_in(monkeypatch)
    result = invoke("eval", "dir", "--tasks", "chartqa,chartqq")
    assert result.exit_code == 3
    assert "no task 'chartqq', nor is that a YAML file: did you mean chartqa?" in " ".join(result.output.split())
    assert not asked
    (tmp_path / "own.yaml").touch()
    harness("dir", [str(tmp_path / "own.yaml")])
    assert asked["tasks"] == [str(tmp_path / "own.yaml")]


def test_harness__takes_the_arguments_that_the_real_one_has():
    lm_eval = pytest.importorskip("lm_eval", reason="pip install 'mmqc[eval]'")
    import inspect

    names = inspect.signature(lm_eval.simple_evaluate).parameters
    assert {"model", "model_args", "tasks", "task_manager", "limit", "batch_size", "device", "apply_chat_template"} <= set(names)
