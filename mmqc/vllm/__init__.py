"""mmqc in vLLM: its own checkpoints, as ``save_pretrained`` writes them, served with mmqc's linears and kernels.

    vllm serve DIR                          linears alone are mmqc's
    vllm serve DIR --load-format mmqc       norms too, and every tensor is compared with its hash as it comes

vLLM finds ``register`` by the entry point ``vllm.general_plugins`` and calls it in each of its processes.  Nothing of vLLM's is
imported before that, and nothing of mmqc's that is slow to import before a checkpoint of mmqc's is loaded.
"""

from __future__ import annotations

_registered: list[str] = []


def register() -> None:
    """Makes vLLM know mmqc's checkpoints; a second call does nothing.

    Raises:
        ImportError: there is no vLLM.
    """
    if _registered:
        return
    from mmqc.checkpoint.hf_named import name_methods
    from mmqc.checkpoint.method_name import METHOD  # of quantization, and the load format
    from mmqc.vllm import config, encoder_attention, linear_kernel, loader

    name_methods()
    config.register(METHOD)
    loader.register(METHOD)
    linear_kernel.register()
    encoder_attention.register()
    _registered.append(METHOD)
