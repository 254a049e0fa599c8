"""The compressed-tensors format, which vLLM and transformers read: schemes, packed codes, and what it cannot say.

    weight-only          pack-quantized   weight_packed int32 [N, K b/32], weight_scale [N, 1] or [N, K/g], weight_shape [2]
                                          with zero points: weight_zero_point int32 [N b/32, K/g], packed along the outputs
    static activations   int-quantized    weight int8 [N, K], weight_scale [N, 1], input_scale [1]
                         float-quantized  the same with weight float8_e4m3fn; 4 bits beside float8 activations are packed
    by token             the same without input_scale; 4 bits are packed, and so are groups
    floats of 4 bits     nvfp4-pack-quantized   weight_packed uint8 [N, K/2], weight_scale float8_e4m3fn [N, K/16],
                                                weight_global_scale float32 [1], which is the divisor of ops/float4.py
                         mxfp4-pack-quantized   weight_packed uint8 [N, K/2], weight_scale uint8 [N, K/32], the exponents
                         columns 2 j and 2 j + 1 lie in byte j, the first in its lower four bits

32/b codes lie in a word, the first lowest, each offset by 2^(b-1), and so do zero points.  Scales have the model's dtype, as the
format's readers expect; in a float32 model nothing is lost, in bfloat16 they are rounded.

The format describes linears of one input scale and a model that is otherwise the architecture's own.  One scale per modality,
Hadamards at run time, channels kept in higher precision and norms of another kind are refused, with what to do instead.

Written for an engine, static inputs that the engine has no kernel for are described as quantized by token: one scale per modality,
and those beside 4-bit weights.  Linears are then targeted by name, never as a class, which the engine's own may share.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mmqc.checkpoint.module_spec import module_spec
from mmqc.nn.float4_linear import Float4Linear
from mmqc.nn.integer_weight import PackedLinear, kind_of_zero
from mmqc.nn.linear import QuantLinear
from mmqc.nn.token_linear import TokenLinear
from mmqc.ops.pack import FLOAT8, pack, unpack
from mmqc.specs import BLOCKS

Scheme = dict[str, Any]
Written = QuantLinear | TokenLinear | Float4Linear
BITS = (4, 8)
FLOAT4_STRATEGY = {"nvfp4": "tensor_group", "mxfp4": "group"}
FLOAT4_SCALES = {"nvfp4": FLOAT8, "mxfp4": torch.uint8}
FOR_ENGINE = "by recipes.for_engine(config, 'vllm==0.33')"  # what an objection names as the way around
WRITTEN = {
    "qweight",
    "weight_scale",
    "weight_zero",
    "weight_divisor",
    "bias",
    "input_scale",
}  # the buffers of a linear that the format has a place for


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Int8 codes [N, K] -> int32 words [N, ceil(K bits / 32)]; what is missing in the last word is zero bits."""
    per_word = 32 // bits
    u = (codes.to(torch.int64) + 2 ** (bits - 1)).clamp_(0, 2**bits - 1)
    u = nn.functional.pad(u, (0, -u.shape[1] % per_word)).unflatten(1, (-1, per_word))
    words = (u << (bits * torch.arange(per_word, device=u.device))).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def unpack_words(words: Tensor, width: int, bits: int) -> Tensor:
    """Int32 words [N, W] -> int8 codes [N, width]."""
    u = (words.to(torch.int64)[..., None] >> (bits * torch.arange(32 // bits, device=words.device))) & (2**bits - 1)
    return (u.flatten(1)[:, :width] - 2 ** (bits - 1)).to(torch.int8)


def written_linears(model: nn.Module) -> dict[str, Written]:
    """The linears that are written in the format's own way, by FQN."""
    return {n: m for n, m in model.named_modules() if isinstance(m, Written)}


def objections(model: nn.Module, engine: bool = False) -> Iterator[str]:
    """What this model has that the format cannot say, each with the way around it."""
    for fqn, module in model.named_modules():
        spec = module_spec(module)
        if spec is not None and spec["kind"] == "kv_rounder":
            yield f"{fqn} rounds keys and values per head and token: quantize without kv_rounding"
        elif spec is not None and spec["kind"] == "mixed_linear":
            yield f"{fqn} has asymmetric activations quantized at run time: quantize {FOR_ENGINE}"
        elif spec is not None and spec["kind"] not in ("quant_linear", "token_linear", "float4_linear"):
            kind = {"rms_norm": "an RMSNorm that was a LayerNorm", "hadamard_linear": "an online Hadamard"}
            keeps = (
                "by recipes.for_engine(config, 'vllm==0.33'), whose rotations keep LayerNorms, or " if spec["kind"] in kind else ""
            )
            what = kind.get(spec["kind"], "a module of mmqc")
            yield f"{fqn} is {what}: quantize {keeps}without rewrites (rotate=False)"
    for fqn, linear in written_linears(model).items():
        yield from (f"{fqn} {why}" for why in _linear_objections(linear, engine))


def _linear_objections(linear: Written, engine: bool) -> Iterator[str]:
    if linear.hadamard:
        yield "has an online Hadamard: quantize without (rotate=False, or Rewrites(hadamard=False))"
    if linear.input_scale is not None and linear.input_scale.numel() > 1 and not engine:
        yield "has one input scale per modality: quantize with msq=False, or save with engine='vllm==0.33', as one per token"
    if linear.outlier_index is not None:
        yield "keeps input channels in higher precision: quantize with suppress=False"
    if kind_of_zero(getattr(linear, "weight_zero", None)) == "float":
        yield "has zero points between the codes, where the format has them on the codes: quantize with zero_point='int'"
    other = [n for n, b in linear.named_buffers() if n not in WRITTEN and not n.startswith(("factor_", "outlier_"))]
    if other:
        yield f"holds {', '.join(other)}, which mmqc does not write in this format: quantize with float scales"
    if linear.weight_bits not in BITS:
        yield f"has weights of {linear.weight_bits} bits: quantize to 4 or 8"
    if linear.group_size and linear.in_features % linear.group_size:
        yield f"has {linear.in_features} input channels, no multiple of its group size {linear.group_size}: choose one that is"


def inputs_of(linear: PackedLinear, engine: bool = False) -> str:
    """How its inputs are written: "none", "static" or "token"."""
    if isinstance(linear, TokenLinear):
        return "token"
    if linear.input_scale is None:
        return "none"
    several = linear.input_scale.numel() > 1 or linear.weight_bits < 8 or bool(linear.group_size)
    return "token" if engine and several else "static"


def scheme_of(linear: Written, engine: bool = False) -> Scheme:
    """The format's description of a linear, without its targets."""
    if isinstance(linear, Float4Linear):
        return float4_scheme(linear)
    inputs, floats = inputs_of(linear, engine), float_weight(linear)
    weights = {
        "num_bits": linear.weight_bits,
        "type": "float" if floats else "int",
        "dynamic": False,
        "symmetric": getattr(linear, "weight_zero", None) is None,
        "strategy": "group" if linear.group_size else "channel",
        "group_size": linear.group_size or None,
    }
    activations = {
        "num_bits": linear.activation_bits,
        "type": "float" if linear.float8 else "int",
        "symmetric": True,
        "dynamic": inputs == "token",
        "strategy": "token" if inputs == "token" else "tensor",
    }
    return {
        "weights": weights,
        "input_activations": activations if inputs != "none" else None,
        "output_activations": None,
        "format": "float-quantized" if floats else "pack-quantized" if packed(linear, engine) else "int-quantized",
    }


def float_weight(linear: PackedLinear) -> bool:
    """Whether its codes are float8."""
    return linear.float8_weight if isinstance(linear, TokenLinear) else linear.float8 and linear.storage_bits == 8


def packed(linear: PackedLinear, engine: bool = False) -> bool:
    """Whether the format has this linear's codes in words."""
    inputs = inputs_of(linear, engine)
    if inputs == "static":
        return linear.float8 and linear.storage_bits != 8
    return not float_weight(linear) and (inputs == "none" or linear.weight_bits < 8 or bool(linear.group_size))


def quantization_config(model: nn.Module, engine: bool = False) -> dict[str, Any]:
    """``quantization_config`` of the format: one group per scheme; one alone targets every linear but those in ``ignore``."""
    left = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    groups: list[tuple[Scheme, list[str]]] = []
    for fqn, linear in written_linears(model).items():
        scheme, target = scheme_of(linear, engine), target_of(fqn, engine)
        names = next((names for known, names in groups if known == scheme), None)
        if names is None:
            groups.append((scheme, [target]))
        else:
            names.append(target)
    alone = len(groups) == 1 and not engine
    formats = {scheme["format"] for scheme, _ in groups}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "ignore": left,
        "config_groups": {
            f"group_{i}": {"targets": ["Linear"] if alone else names, **scheme} for i, (scheme, names) in enumerate(groups)
        },
    }


def target_of(fqn: str, engine: bool) -> str:
    """A linear's name; of one on the model's top level a pattern, since vLLM renames only names with a dot."""
    return rf"re:(.*\.)?{re.escape(fqn)}$" if engine and "." not in fqn else fqn


def state_dict(model: nn.Module, engine: bool = False) -> dict[str, Tensor]:
    """The model's tensors, those of quantized linears as the format has them."""
    state, linears = model.state_dict(), written_linears(model)
    divisors = shared_divisors({n: m for n, m in linears.items() if isinstance(m, Float4Linear)})
    for fqn, linear in linears.items():
        for name in [n for n in state if n.rpartition(".")[0] == fqn]:
            del state[name]
        state |= {f"{fqn}.{name}": tensor for name, tensor in _tensors(linear, engine, divisors.get(fqn))}
    return state


def _tensors(linear: Written, engine: bool, divisor: Tensor | None) -> Iterator[tuple[str, Tensor]]:
    if isinstance(linear, Float4Linear):
        yield from float4_tensors(linear, divisor)
        return
    codes, dtype = linear.codes(), linear.float_dtype
    zeros: Tensor | None = getattr(linear, "weight_zero", None)
    if packed(linear, engine):
        yield "weight_packed", pack_words(codes, linear.weight_bits)
        yield "weight_shape", torch.tensor(codes.shape)
        if zeros is not None:
            zero = zeros.reshape(codes.shape[0], -1)
            yield "weight_zero_point", pack_words(zero.T, linear.weight_bits).T.contiguous()
    else:
        yield "weight", codes
    if linear.input_scale is not None and inputs_of(linear, engine) == "static":
        yield "input_scale", linear.input_scale.to(dtype)
    scale = linear.weight_scale if linear.group_size else linear.weight_scale[:, None]
    yield "weight_scale", scale.to(dtype).contiguous()
    if linear.bias is not None:
        yield "bias", linear.bias


def in_pairs(stored: Tensor, width: int) -> Tensor:
    """Bytes [N, width/2] with neighbours in a byte, of those with stretches."""
    bits = (unpack(stored, width, 4) + 8).to(torch.uint8)
    return bits[:, ::2] | bits[:, 1::2] << 4


def in_stretches(pairs: Tensor) -> Tensor:
    """The way back."""
    bits = torch.stack((pairs & 15, pairs >> 4), -1).flatten(1)
    return pack(bits.to(torch.int8) - 8, 4)


def float4_scheme(linear: Float4Linear) -> dict[str, Any]:
    """The format's description, without targets."""
    weights = {
        "num_bits": 4,
        "type": "float",
        "dynamic": False,
        "symmetric": True,
        "strategy": FLOAT4_STRATEGY[linear.form],
        "group_size": linear.group_size,
        "scale_dtype": str(FLOAT4_SCALES[linear.form]),
        "zp_dtype": str(FLOAT4_SCALES[linear.form]),
    }
    inputs = {"input_activations": None, "output_activations": None}
    return {"weights": weights, **inputs, "format": f"{linear.form}-pack-quantized"}


def shared_divisors(linears: Mapping[str, Float4Linear]) -> dict[str, Tensor]:
    """nvfp4's divisors, by name: one for all linears of a module where that changes no scale's number.

    Engines compute q, k and v, or gate and up, in one product, with one ``weight_global_scale`` for all.
    """
    found = {n: m.weight_divisor for n, m in linears.items() if m.weight_divisor is not None}
    for parent in {n.rpartition(".")[0] for n in found}:
        names = [n for n in found if n.rpartition(".")[0] == parent]
        least = torch.stack([found[n] for n in names]).amin(0)
        if all(_scales_over(linears[n], least) is not None for n in names):
            found |= dict.fromkeys(names, least)
    return found


def _scales_over(linear: Float4Linear, divisor: Tensor) -> Tensor | None:
    """The linear's float8 scales over another divisor; None if there are none that stand for the same numbers."""
    scale, own = linear.weight_scale.view(FLOAT8), linear.weight_divisor
    if own is None or torch.equal(own, divisor):
        return scale
    wanted = scale.double() * (divisor.double() / own.double())
    other = wanted.float().to(FLOAT8)
    return other if torch.equal(other.double(), wanted) else None


def float4_tensors(linear: Float4Linear, divisor: Tensor | None) -> Iterator[tuple[str, Tensor]]:
    """The linear's tensors as the format has them; ``divisor``: what ``shared_divisors`` found for it."""
    yield "weight_packed", in_pairs(linear.qweight, linear.in_features)
    if divisor is None:
        yield "weight_scale", linear.weight_scale
    else:
        scale = _scales_over(linear, divisor)
        assert scale is not None
        yield "weight_scale", scale
        yield "weight_global_scale", divisor.clone()
    if linear.bias is not None:
        yield "bias", linear.bias


def float4_form(weights: Mapping[str, Any]) -> str:
    """Which of the two the format's description of weights is, or nothing."""
    group = weights.get("group_size")
    floats = weights.get("type") == "float" and int(weights.get("num_bits", 8)) == 4
    return next((f for f, size in BLOCKS.items() if floats and group == size and weights.get("strategy") == FLOAT4_STRATEGY[f]), "")


def read_float4(tensors: Mapping[str, Tensor], form: str, dtype: torch.dtype) -> Float4Linear:
    """A linear, from the format's tensors; every byte of codes and scales is kept."""
    pairs, bias = tensors["weight_packed"], tensors.get("bias")
    scale = tensors["weight_scale"].contiguous().view(torch.uint8)
    divisor = tensors["weight_global_scale"].float().reshape(1) if form == "nvfp4" else None
    bias = None if bias is None else bias.to(dtype)
    return Float4Linear.from_stored(in_stretches(pairs), scale, divisor, 2 * pairs.shape[1], form, bias, dtype)
