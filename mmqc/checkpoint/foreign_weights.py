"""Weights that other projects packed, as codes and scales: AWQ, GPTQ and compressed-tensors.

    AWQ (gemm)   qweight int32 [K, N b/32], eight outputs a word in the order 0 2 4 6 1 3 5 7; qzeros [K/g, N b/32] alike
    GPTQ         qweight int32 [K b/32, N], inputs of a word in order; qzeros [K/g, N b/32], outputs in order, less one in v1
    both         scales [K/g, N]       w[k, n] = (u[k, n] - z[g, n]) s[g, n]
    compressed   weight_packed int32 [N, K b/32] or weight int8 or float8 [N, K]; weight_scale [N, 1] or [N, K/g]; input_scale [1]
                 where inputs are static; floats of 4 bits: compressed_tensors.py;
                 weight_zero_point like the scales, or int32 [N b/32, K/g] where the weight is packed

Codes and zero points are kept less 2^(b-1), as signed numbers; zero points that then are all zero are none.  Groups that are no
stretches of a row (GPTQ's act-order without static groups) are refused.
Sources: AutoAWQ's awq/utils/packing_utils.py and GPTQModel's nn_modules/qlinear, as described by their documentation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmqc.checkpoint.compressed_tensors import float4_form, read_float4, unpack_words
from mmqc.errors import MmqcError
from mmqc.nn.integer_weight import PackedLinear
from mmqc.nn.linear import QuantLinear
from mmqc.nn.token_linear import TokenLinear
from mmqc.ops.pack import FLOAT8
from mmqc.solvers import Quantized

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Tensors = Mapping[str, Tensor]
Settings = Mapping[str, Any]


LEAVE = "load_quantized(..., leave=('activations',)) reads the weights and leaves activations in floating point"
WAY_AROUND = (
    "load it with from_pretrained(..., quantization_config=transformers.CompressedTensorsConfig(dequantize=True)), "
    "and call mmqc.quantize_ on that"
)


class ForeignError(MmqcError, ValueError):
    """A checkpoint of another project that mmqc's modules cannot represent: says which layer, why and what to do."""


@dataclass(frozen=True)
class Foreign:
    """One linear: int8 or float8 codes [N, K], float32 scale [N] or [N, K/g], bits of a code, g or 0, input scale, int8 zeros.

    ``float8``: activations are float8 codes.  ``by_token``: their scales are found token by token.
    """

    codes: Tensor
    scale: Tensor
    bits: int
    group_size: int
    input_scale: Tensor | None = None
    zero: Tensor | None = None
    float8: bool = False
    by_token: bool = False

    def linear(self, bias: Tensor | None, dtype: torch.dtype) -> PackedLinear:
        """The module of mmqc's for a model of that dtype."""
        solved = Quantized(self.codes, self.scale, zero=self.zero, group_size=self.group_size)
        options: Any = {"weight_bits": self.bits, "bias": None if bias is None else bias.to(dtype), "dtype": dtype}
        if self.by_token:
            return TokenLinear.from_parts(solved, float8=self.float8, **options)
        bits = 8 if self.input_scale is not None else None
        return QuantLinear.from_parts(solved, activation_bits=bits, input_scale=self.input_scale, float8=self.float8, **options)


@dataclass(frozen=True)
class ForeignFloat4:
    """One linear whose weights are floats of 4 bits: the file's own tensors, and the form that they have."""

    tensors: Tensors
    form: str

    def linear(self, bias: Tensor | None, dtype: torch.dtype) -> PackedLinear:
        """As ``Foreign.linear``; the bias is among the tensors."""
        del bias
        return read_float4(self.tensors, self.form, dtype)


def _words(packed: Tensor, bits: int) -> Tensor:
    """Int32 [..., W] -> unsigned codes [..., W * 32/bits], lowest first, as int16."""
    shifts = bits * torch.arange(32 // bits, device=packed.device)
    return ((packed.to(torch.int64)[..., None] >> shifts) & (2**bits - 1)).flatten(-2).to(torch.int16)


def _built(u: Tensor, zero: Tensor, scale: Tensor, bits: int, fqn: str) -> Foreign:
    """From u [K, N], z and s [G, N]."""
    k, groups = u.shape[0], scale.shape[0]
    if k % groups:
        raise ForeignError(f"{fqn} has {k} input channels in {groups} groups of unequal size; mmqc's groups are equal")
    middle, whole = 2 ** (bits - 1), groups == 1
    s, z = scale.float().T.contiguous(), (zero - middle).to(torch.int8).T.contiguous()
    return Foreign(
        (u - middle).to(torch.int8).T.contiguous(),
        s[:, 0] if whole else s,
        bits,
        0 if whole else k // groups,
        zero=None if not z.any() else z[:, 0] if whole else z,
    )


def _bits(settings: Settings, allowed: tuple[int, ...]) -> int:
    bits = int(settings.get("bits", settings.get("w_bit", 4)))
    if bits not in allowed:
        raise ForeignError(f"a checkpoint of {bits} bits: mmqc reads {allowed} of this format")
    return bits


def read_awq(tensors: Tensors, settings: Settings, fqn: str) -> Foreign:
    """A linear of AutoAWQ: qweight, qzeros, scales.

    Raises:
        ForeignError: another layout than gemm, or another width than 4 bits.
    """
    version = str(settings.get("version", "gemm")).lower()
    if version != "gemm":
        raise ForeignError(f"an AWQ checkpoint of version {version!r}: mmqc reads 'gemm', which AutoAWQ writes by default")
    bits = _bits(settings, (4,))
    undo = torch.tensor([AWQ_ORDER.index(i) for i in range(8)])

    def unpack(packed: Tensor) -> Tensor:
        return _words(packed, bits).unflatten(-1, (-1, 8))[..., undo].flatten(-2)

    return _built(unpack(tensors["qweight"]), unpack(tensors["qzeros"]), tensors["scales"], bits, fqn)


def read_gptq(tensors: Tensors, settings: Settings, fqn: str) -> Foreign:
    """A linear of AutoGPTQ or GPTQModel: qweight, qzeros, scales, g_idx.

    Raises:
        ForeignError: 3 bits, or groups whose channels are not neighbours.
    """
    bits = _bits(settings, (2, 4, 8))
    u = _words(tensors["qweight"].T.contiguous(), bits).T
    scale = tensors["scales"]
    group = tensors.get("g_idx")
    if group is not None and not torch.equal(group.long(), torch.arange(u.shape[0]) // (u.shape[0] // scale.shape[0])):
        raise ForeignError(
            f"{fqn} has groups in the order of activations (desc_act without static groups), whose channels are not "
            f"neighbours; quantize the original model with mmqc.recipes, or take a checkpoint with desc_act=False"
        )
    stored = 0 if settings.get("checkpoint_format", "gptq") == "gptq_v2" else 1
    zero = (_words(tensors["qzeros"], bits) + stored) & (2**bits - 1)  # less one, 0 wraps to the largest
    return _built(u, zero[:, : scale.shape[1]], scale, bits, fqn)


def read_compressed(tensors: Tensors, settings: Settings, fqn: str) -> Foreign | ForeignFloat4:
    """A linear of compressed-tensors.

    Integer weights with or without zero points, alone, with one static input scale, or with one a token; float8 weights with a
    scale an output or one in all, and float8 activations of either kind; floats of 4 bits alone, as mxfp4 or nvfp4.

    ``settings["leave"]`` may hold "activations": inputs then stay in floating point.  ``settings["module"]`` is the linear's name
    in the model, where that is not the file's: a description may have either.

    Raises:
        ForeignError: float weights of other kinds, other activations, or groups that are no stretches.
    """
    scheme = _scheme_of(settings, {fqn, settings.get("module", fqn)})
    weights, inputs = scheme.get("weights") or {}, scheme.get("input_activations")
    left = "activations" in settings.get("leave", ())
    inputs = {} if left else inputs or {}
    if form := float4_form(weights):
        if inputs:
            raise ForeignError(f"{fqn}: quantized activations beside weights as floats of 4 bits are not mmqc's; {LEAVE}")
        return ForeignFloat4(tensors, form)
    if weights.get("type", "int") != "int":
        return _read_float8(tensors, weights, inputs, fqn)
    float8 = inputs.get("type") == "float" and int(weights.get("num_bits", 8)) <= 4
    if inputs:
        _check_inputs({**inputs, "type": "int"} if float8 else inputs, fqn)
    by_token = bool(inputs.get("dynamic"))
    if "weight_g_idx" in tensors:
        raise ForeignError(f"{fqn}: groups in the order of activations are not mmqc's; {WAY_AROUND}")
    scale, zero = tensors["weight_scale"].float(), tensors.get("weight_zero_point")
    if "weight_packed" in tensors:
        n, k = (int(v) for v in tensors["weight_shape"])
        bits = int(weights.get("num_bits", 32 * tensors["weight_packed"].shape[1] // k))
        if bits not in (4, 8):
            raise ForeignError(f"{fqn} has weights of {bits} bits: mmqc reads 4 and 8 of this format")
        codes = unpack_words(tensors["weight_packed"], k, bits)
        zero = None if zero is None else unpack_words(zero.T.contiguous(), n, bits).T
    else:
        codes = tensors["weight"]
        n, k = codes.shape
        small = int(codes.min()) >= -8 and int(codes.max()) <= 7 and zero is None
        bits = int(weights.get("num_bits", 8)) if by_token else 4 if small else 8
    groups = 1 if scale.numel() == 1 else scale.numel() // n
    scale, zero = (None if t is None else t.reshape(-1, groups).expand(n, groups).squeeze(1) for t in (scale, zero))
    assert scale is not None
    static = None if left or by_token else tensors.get("input_scale")
    if static is not None and float8 and groups > 1:
        raise ForeignError(f"{fqn}: groups of weights beside float8 activations are not mmqc's; {LEAVE}")
    if (static is not None or by_token) and zero is not None:
        raise ForeignError(f"{fqn}: zero points of weights beside quantized activations are not mmqc's; {LEAVE}")
    return Foreign(
        codes,
        scale,
        bits,
        0 if groups == 1 else k // groups,
        None if static is None else static.float().reshape(1),
        None if zero is None else zero.to(torch.int8),
        float8 and (static is not None or by_token),
        by_token,
    )


def _read_float8(tensors: Tensors, weights: Settings, inputs: Settings, fqn: str) -> Foreign:
    """Weights and activations in float8_e4m3fn."""
    codes, scale, static = tensors.get("weight"), tensors["weight_scale"].float(), tensors.get("input_scale")
    if codes is None or codes.dtype != FLOAT8 or scale.numel() not in (1, codes.shape[0]):
        raise ForeignError(
            f"{fqn}: weights of {weights.get('num_bits', 8)} bits that are neither integers nor float8 with a scale per "
            f"output are not mmqc's; {WAY_AROUND}"
        )
    by_token = bool(inputs.get("dynamic"))
    if inputs.get("type") != "float" or (static is None and not by_token):
        raise ForeignError(f"{fqn}: float8 weights without float8 activations are not mmqc's; {WAY_AROUND}")
    _check_inputs({**inputs, "type": "int"}, fqn)
    scale = scale.reshape(-1).expand(codes.shape[0]).contiguous()
    if static is None or by_token:
        return Foreign(codes, scale, 8, 0, float8=True, by_token=True)
    return Foreign(codes, scale, 8, 0, static.float().reshape(1), float8=True)


def _scheme_of(settings: Settings, names: set[str]) -> Mapping[str, Any]:
    """What the checkpoint says of a linear: by name, by a pattern on its name, or as any linear."""
    groups = list((settings.get("config_groups") or {}).values())

    def named(target: str) -> bool:
        return target in names or (target.startswith("re:") and any(re.match(target[3:], name) for name in names))

    by_name = (g for g in groups if any(named(t) for t in g.get("targets", ())))
    by_kind = (g for g in groups if "Linear" in g.get("targets", ()))
    return next(by_name, None) or next(by_kind, None) or {}


def _check_inputs(inputs: Mapping[str, Any], fqn: str) -> None:
    if inputs.get("type", "int") != "int" or inputs.get("num_bits", 8) != 8:
        raise ForeignError(f"{fqn}: activations that are no integers of 8 bits are not mmqc's; {LEAVE}")
    one = "token" if inputs.get("dynamic") else "tensor"  # scale
    if inputs.get("strategy") != one or not inputs.get("symmetric", True):
        raise ForeignError(
            f"{fqn}: activations with zero points, or with scales that are neither one for all tokens, static, nor one a token, "
            f"dynamic, are not mmqc's; {LEAVE}"
        )


READERS: dict[
    str, tuple[str, Callable[[Tensors, Settings, str], Foreign | ForeignFloat4]]
] = {  # by quant_method: a tensor's name, reader
    "awq": ("qweight", read_awq),
    "gptq": ("qweight", read_gptq),
    "compressed-tensors": ("weight_scale", read_compressed),
}
