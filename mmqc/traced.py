"""Whether a call is traced, asked where an eager call does more: counts, keeps a history, looks at values.

``torch.compiler.is_compiling()`` is true of every thread while one of them compiles: from torch 2.12 on, its flag is up that long.
"""

from __future__ import annotations

import threading

import torch


class _Answer(threading.local):
    """Whether the calling thread's eager calls are to be taken for a trace (``mmqc.graph.tracing.as_traced``)."""

    traced = False


ANSWER = _Answer()


def is_traced() -> bool:
    """Whether Dynamo or ``torch.export`` traces this call."""
    return torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting() or ANSWER.traced
