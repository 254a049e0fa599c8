"""What of mmqc's vLLM uses for models that mmqc did not quantize: nothing, unless the server is told to.

vllm serve DIR --additional-config '{"mmqc": ["linears", "attention"]}'

linears      vllm/linear_kernel.py, for weights in 2, 4 and 8 bits of compressed-tensors, AWQ and GPTQ
attention    vllm/encoder_attention.py, within the images of a batch; a model of mmqc's has it by default, and [] takes it away
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from mmqc.checkpoint.method_name import METHOD
from mmqc.vllm.specs import PluginError

KEY = METHOD
PARTS = ("linears", "attention")


def lent(additional: Mapping[str, Any], own: bool = False) -> Collection[str]:
    """Which parts a server uses.

    Args:
        additional: its ``additional_config``.
        own: the model is one of mmqc's.

    Raises:
        PluginError: there is no such part.
    """
    parts = additional.get(KEY, ("attention",) if own else ())
    unknown = [part for part in parts if part not in PARTS] if isinstance(parts, list | tuple) else [parts]
    if unknown:
        raise PluginError(f"--additional-config: {KEY!r} = {parts!r}, and {unknown[0]!r} is no part of it: a list of {PARTS}")
    return parts


def lent_here() -> Collection[str]:
    """As ``lent``, of the model that vLLM is building; none outside of that."""
    from vllm.config import get_current_vllm_config_or_none

    config: Any = get_current_vllm_config_or_none()
    if config is None:
        return ()
    additional: Any = config.additional_config if isinstance(config.additional_config, dict) else {}
    name = None if config.quant_config is None else config.quant_config.get_name()
    return lent(additional, own=name == METHOD)
