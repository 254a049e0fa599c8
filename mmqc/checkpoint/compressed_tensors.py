"""The compressed-tensors format, which vLLM and transformers read: schemes, packed codes, and what it cannot say.

    weight-only          pack-quantized   weight_packed int32 [N, K b/32], weight_scale [N, 1] or [N, K/g], weight_shape [2]
                                          with zero points: weight_zero_point int32 [N b/32, K/g], packed along the outputs
    static activations   int-quantized    weight int8 [N, K], weight_scale [N, 1], input_scale [1]
                         float-quantized  the same with weight float8_e4m3fn; 4 bits beside float8 activations are packed
    by token             the same without input_scale; 4 bits are packed, and so are groups

32/b codes lie in a word, the first lowest, each offset by 2^(b-1), and so do zero points.  Scales have the model's dtype, as the
format's readers expect; in a float32 model nothing is lost, in bfloat16 they are rounded.

The format describes linears of one input scale and a model that is otherwise the architecture's own.  One scale per modality,
Hadamards at run time, channels kept in higher precision and norms of another kind are refused, with what to do instead.

Written for an engine, static inputs that the engine has no kernel for are described as quantized by token: one scale per modality,
and those beside 4-bit weights.  Linears are then targeted by name, never as a class, which the engine's own may share.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mmqc.checkpoint.module_spec import module_spec
from mmqc.nn.integer_weight import PackedLinear
from mmqc.nn.linear import QuantLinear
from mmqc.nn.token_linear import TokenLinear

Scheme = dict[str, Any]
BITS = (4, 8)
FOR_ENGINE = "by recipes.for_engine(config, 'vllm==0.33')"  # what an objection names as the way around
WRITTEN = {
    "qweight",
    "weight_scale",
    "weight_zero",
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


def written_linears(model: nn.Module) -> dict[str, QuantLinear | TokenLinear]:
    """The linears that are written in the format's own way, by FQN."""
    return {n: m for n, m in model.named_modules() if isinstance(m, QuantLinear | TokenLinear)}


def objections(model: nn.Module, engine: bool = False) -> Iterator[str]:
    """What this model has that the format cannot say, each with the way around it."""
    for fqn, module in model.named_modules():
        spec = module_spec(module)
        if spec is not None and spec["kind"] == "kv_rounder":
            yield f"{fqn} rounds keys and values per head and token: quantize without kv_rounding"
        elif spec is not None and spec["kind"] == "mixed_linear":
            yield f"{fqn} has asymmetric activations quantized at run time: quantize {FOR_ENGINE}"
        elif spec is not None and spec["kind"] not in ("quant_linear", "token_linear"):
            kind = {"rms_norm": "an RMSNorm that was a LayerNorm", "hadamard_linear": "an online Hadamard"}
            keeps = (
                "by recipes.for_engine(config, 'vllm==0.33'), whose rotations keep LayerNorms, or " if spec["kind"] in kind else ""
            )
            what = kind.get(spec["kind"], "a module of mmqc")
            yield f"{fqn} is {what}: quantize {keeps}without rewrites (rotate=False)"
    for fqn, linear in written_linears(model).items():
        yield from (f"{fqn} {why}" for why in _linear_objections(linear, engine))


def _linear_objections(linear: QuantLinear | TokenLinear, engine: bool) -> Iterator[str]:
    if linear.hadamard:
        yield "has an online Hadamard: quantize without (rotate=False, or Rewrites(hadamard=False))"
    if linear.input_scale is not None and linear.input_scale.numel() > 1 and not engine:
        yield "has one input scale per modality: quantize with msq=False, or save with engine='vllm==0.33', as one per token"
    if linear.outlier_index is not None:
        yield "keeps input channels in higher precision: quantize with suppress=False"
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


def scheme_of(linear: QuantLinear | TokenLinear, engine: bool = False) -> Scheme:
    """The format's description of a linear, without its targets."""
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
    state = model.state_dict()
    for fqn, linear in written_linears(model).items():
        for name in [n for n in state if n.rpartition(".")[0] == fqn]:
            del state[name]
        state |= {f"{fqn}.{name}": tensor for name, tensor in _tensors(linear, engine)}
    return state


def _tensors(linear: QuantLinear | TokenLinear, engine: bool) -> Iterator[tuple[str, Tensor]]:
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
