"""lm-evaluation-harness on a model that mmqc saved: its ``hf-multimodal`` model, with mmqc's quantizer registered.

The harness is an extra (``pip install 'mmqc[eval]'``); tasks, prompts and metrics are its own.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mmqc.checkpoint import hf_hook


def harness(
    directory: str | Path,
    tasks: Sequence[str],
    *,
    limit: int | None = None,
    batch_size: int = 1,
    device: str | None = None,
    chat_template: bool = False,
    **model_args: Any,
) -> dict[str, float]:
    """Runs tasks and returns their metrics, e.g. {"mmmu_val/acc": 0.41, "mmmu_val/acc_stderr": 0.02}.

    Args:
        directory: a model with its processor.
        tasks: names of the harness, or paths of YAML files that define one.
        limit: questions of each task.
        batch_size: of the harness.
        device: of the model; default: cuda, if there is one.
        chat_template: whether prompts are put into the model's chat template, as for most published scores of chat models.
        model_args: more arguments of ``hf-multimodal``, e.g. ``max_images=2``.

    Raises:
        ImportError: the harness is not installed.
        ValueError: it does not know a task; said before the model is loaded.
    """
    try:
        lm_eval: Any = importlib.import_module("lm_eval")
        manager: Any = importlib.import_module("lm_eval.tasks").TaskManager(metadata={"pretrained": str(directory), **model_args})
    except ImportError as e:
        raise ImportError("evaluation on benchmarks needs lm-evaluation-harness: pip install 'mmqc[eval]'") from e
    for task in tasks:
        require(task, manager.all_tasks)
    hf_hook.install()
    found = lm_eval.simple_evaluate(
        model="hf-multimodal",
        model_args={"pretrained": str(directory), **model_args},
        tasks=list(tasks),
        task_manager=manager,
        limit=limit,
        batch_size=batch_size,
        device=device or ("cuda" if torch.cuda.is_available() else "cpu"),  # the harness takes "cuda" for granted
        apply_chat_template=chat_template,
    )
    return flat(found["results"])


def require(task: str, known: Sequence[str]) -> None:
    """Raises a ValueError unless ``task`` is one of ``known`` or a file."""
    if task in known or Path(task).is_file():
        return
    near = difflib.get_close_matches(task, known)
    hint = f"did you mean {', '.join(near)}?" if near else "`lm-eval ls tasks` lists them"
    raise ValueError(f"lm-evaluation-harness has no task {task!r}, nor is that a YAML file: {hint}")


def flat(results: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """The harness's results as "task/metric"; its filter names ("acc,none") are left out."""
    return {
        f"{task}/{metric.split(',')[0]}": float(value)
        for task, metrics in results.items()
        for metric, value in metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
