"""``torchao.quantization.quantize_(model, mmqc_config)``: one linear at a time, for configs that need no data.

torchao hands over modules without their names, so its ``filter_fn`` decides what is quantized and ``keep`` cannot: a config
with patterns of its own is refused.  ``lm_head``, the default, is no pattern of the user's; leave the head out by
``filter_fn``, or use ``mmqc.quantize_``, which knows it.
"""

from __future__ import annotations

from torch import nn

from mmqc.checkpoint.data_free import only_scheme, quantized_linear
from mmqc.config import HEAD, ConfigError, QuantConfig


def quantize_module(module: nn.Module, config: QuantConfig) -> nn.Module:
    """The quantized linear in place of ``module``; what is no ``nn.Linear`` comes back as it is.

    Raises:
        ConfigError: the config needs data, rewrites, has ``keep`` patterns.
    """
    scheme = only_scheme(config)
    own = [pattern for pattern in config.keep if pattern != HEAD]
    if own:
        raise ConfigError(
            f"torchao's quantize_ passes no layer names, so keep = {own[0]!r} cannot be applied; use filter_fn, or call "
            f"mmqc.quantize_(model, config)"
        )
    if type(module) is not nn.Linear:
        return module
    return quantized_linear(module.weight, module.bias, scheme)[0].train(module.training)
