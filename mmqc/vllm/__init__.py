"""mmqc in vLLM: its own checkpoints, as ``save_pretrained`` writes them, served with mmqc's linears and kernels.

    vllm serve DIR                          linears alone are mmqc's
    vllm serve DIR --load-format mmqc       norms too, and every tensor is compared with its hash as it comes

vLLM finds ``register`` by the entry point ``vllm.general_plugins`` and calls it in each of its processes.  Nothing of vLLM's is
imported before that, and nothing of mmqc's that is slow to import before a checkpoint of mmqc's is loaded.
"""

from __future__ import annotations

import importlib
import logging

PARTS = {  # modules that register something, and what a server does not have without them
    "config": "checkpoints of mmqc's",
    "loader": "--load-format mmqc",
    "linear_kernel": "mmqc's kernels for other checkpoints",
    "encoder_attention": "mmqc's attention within images",
}
_registered: list[str] = []


def register() -> None:
    """Makes vLLM know mmqc's checkpoints and kernels; a second call does nothing.

    A part that this vLLM has no place for is named in a warning: vLLM calls this for every model that it serves.

    Raises:
        ImportError: there is no vLLM.
    """
    if _registered:
        return
    version = importlib.import_module("vllm").__version__
    from mmqc.checkpoint.hf_named import name_methods

    name_methods()
    for part, what in PARTS.items():
        try:
            importlib.import_module(f"mmqc.vllm.{part}").register()
        except (ImportError, AttributeError) as error:
            text = "mmqc: vLLM %s has no place for %s (%s); mmqc knows 0.32 and 0.33"
            logging.getLogger("vllm.mmqc").warning(text, version, what, error)
        _registered.append(part)
