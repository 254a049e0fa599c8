"""mmqc in lmms-eval: a model of its own, and the questions of our samples as tasks, which need no network.

    lmms-eval --model mmqc --model_args pretrained=DIR,compiled=True --tasks mmmu_val
    python -m mmqc.cli.lmms_tasks docs-vqa out/tasks
    lmms-eval --model mmqc --model_args pretrained=DIR --tasks docs_vqa --include_path out/tasks

lmms-eval is an extra (``pip install 'mmqc[lmms]'``) and finds ``manifest`` by the entry point ``lmms_eval.models``; prompts, tasks
and metrics are its own.  lm-evaluation-harness: harness.py.
"""

from __future__ import annotations

from typing import Any


def manifest() -> Any:
    """What lmms-eval registers: the name "mmqc", and where the class is."""
    from lmms_eval.models.registry_v2 import ModelManifest  # pyright: ignore[reportMissingImports]

    return ModelManifest("mmqc", chat_class_path="mmqc.cli.lmms_model.LmmsModel")
