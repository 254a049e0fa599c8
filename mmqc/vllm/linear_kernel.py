"""mmqc's kernels of integer weights as one of vLLM's, for checkpoints of compressed-tensors, AWQ and GPTQ.

    y = x Wᵀ + b                W[n, k] = (u[n, k] - z[n, k // g]) s[n, k // g]
    y = token_matmul(x, W, b)   where the checkpoint asks for inputs in 8 bits, a scale a token, which most kernels overlook

Shapes:  x [..., K]   u int32 [N, K b/32] in words, or [K b/32, N]   s [N, 1 or K/g] or its transpose   z like s, in words of
         outputs, or none: then 2^(b-1)   y [..., N]
Stored:  u as ops/pack.py lays codes, s as it was, z int8 [N] or [N, K/g], under the names that they had.

vLLM tries its kernels in their order, and this one refuses unless the server lends it (vllm/lent.py).
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear import MPLinearKernel, MPLinearLayerConfig
from vllm.model_executor.parameter import permute_param_layout_
from vllm.platforms import PlatformEnum, current_platform
from vllm.scalar_type import scalar_types

from mmqc.vllm.lent import KEY, lent_here
from mmqc.vllm.specs import PluginError

BITS = {
    scalar_types.uint2b2: 2,
    scalar_types.uint4b8: 4,
    scalar_types.uint8b128: 8,
    scalar_types.uint2: 2,
    scalar_types.uint4: 4,
    scalar_types.uint8: 8,
}
HALF = (torch.float16, torch.bfloat16)
ROWS = 4096  # unpacked at a time: codes take eight times the memory while they are
ASKED = "_humming_input_quant_config"  # what vLLM's scheme of inputs in 8 bits leaves on a layer


def why_not(c: MPLinearLayerConfig) -> str | None:
    """None, or why mmqc's kernels do not compute such a linear."""
    k, group = c.partition_weight_shape[0], c.group_size
    checks = (
        ("linears" in lent_here(), f"""mmqc's kernel waits to be asked: --additional-config '{{"{KEY}": ["linears"]}}'"""),
        (current_platform.is_cuda(), "mmqc's kernels are for NVIDIA's GPUs"),
        (importlib.util.find_spec("triton") is not None, "Triton is not installed"),
        (c.weight_type in BITS, f"weights of {c.weight_type}: mmqc reads {', '.join(map(str, BITS))}"),
        (c.act_type in HALF, f"inputs of {c.act_type}: mmqc's kernel takes {HALF[0]} and {HALF[1]}"),
        (group == -1 or (group > 0 and k % group == 0), f"groups of {group} do not divide {k} input channels"),
        (k % (32 // BITS.get(c.weight_type, 32)) == 0, f"{k} input channels fill no whole words of 32 bits"),
    )
    return next((why for right, why in checks if not right), None)


def codes_of(words: Tensor, width: int, bits: int) -> Tensor:
    """Int32 [N, K b/32] -> as mmqc stores codes of so many bits."""
    from mmqc.checkpoint.compressed_tensors import unpack_words
    from mmqc.ops.pack import pack

    parts = [unpack_words(part, width, bits) for part in words.split(ROWS)]
    return torch.cat([part if bits == 8 else pack(part, bits) for part in parts])


class MmqcLinearKernel(MPLinearKernel):
    """Of one linear."""

    @classmethod
    def get_min_capability(cls) -> int:
        """Ampere: mmqc's kernels are Triton's."""
        return 80

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        """Whether it computes a linear, and else why not."""
        reason = why_not(c)
        return reason is None, reason

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Lays codes, scales and zero points as mmqc's ops take them.

        Raises:
            PluginError: the checkpoint asks for inputs that mmqc multiplies with no such weights.
        """
        import mmqc.ops  # noqa: F401  (defines torch.ops.mmqc)
        from mmqc import kernels

        kernels.install()
        self._read_inputs(layer)
        bits, (k, n) = BITS[self.config.weight_type], self.config.partition_weight_shape
        whole = self.config.group_size == -1

        def codes(parameter: Any) -> Any:
            permute_param_layout_(parameter, input_dim=1, output_dim=0, packed_dim=1)
            parameter.data = codes_of(parameter.data, k, bits)
            return parameter

        def scales(parameter: Any) -> Any:
            permute_param_layout_(parameter, input_dim=1, output_dim=0)
            scale = parameter.data.float() if self.by_token else parameter.data
            parameter.data = scale[:, 0].contiguous() if whole else scale.contiguous()
            return parameter

        def zeros(parameter: Any) -> Any:
            from mmqc.checkpoint.compressed_tensors import unpack_words

            permute_param_layout_(parameter, input_dim=0, output_dim=1, packed_dim=1)
            zero = unpack_words(parameter.data, n, bits).T
            parameter.data = zero[:, 0].contiguous() if whole else zero.contiguous()
            return parameter

        self._transform_param(layer, self.w_q_name, codes)
        self._transform_param(layer, self.w_s_name, scales)
        if self.config.zero_points:
            self._transform_param(layer, self.w_zp_name, zeros)

    def _read_inputs(self, layer: Any) -> None:
        """Whether inputs are quantized, which a layer's scheme notes after it has chosen the kernel."""
        asked, where = getattr(layer, ASKED, None), getattr(layer, "prefix", "a linear")
        self.by_token = asked is not None
        if asked is None:
            return
        plain = asked["num_bits"] == 8 and asked["type"] == "int" and asked["strategy"] == "token"
        if not plain or self.config.zero_points or BITS[self.config.weight_type] == 2:
            raise PluginError(
                f"{where} has inputs as {asked} beside {self.config.weight_type}: mmqc's kernel has inputs in 8 bits by token "
                f"beside symmetric weights in 4 and 8; serve without {KEY!r}: ['linears']"
            )

    def apply_weights(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """[..., K] -> [..., N]."""
        codes, scale, zero = self._get_weight_params(layer)
        bits, group = BITS[self.config.weight_type], max(self.config.group_size, 0)
        if self.by_token:
            return torch.ops.mmqc.token_matmul(x, codes, scale, bias, bits, group, None)
        return torch.ops.mmqc.weight_only_matmul(x, codes, scale, bias, bits, group, zero if self.config.zero_points else None)


def register() -> None:
    """As the first of vLLM's kernels for NVIDIA's GPUs."""
    linear.register_linear_kernel(MmqcLinearKernel, PlatformEnum.CUDA, "mp")
    order = linear._POSSIBLE_KERNELS[PlatformEnum.CUDA]
    order.insert(0, order.pop())
