"""Runs in vLLM's Python: mmqc's linear kernel and its attention in vLLM's own layers, for models of other projects, on the CPU.

python vllm_lent.py WORLD RANK STORE GIVEN OUT
    GIVEN   {"linears": {name: {"config", "tensors", "outputs", "x"}}, "q", "k", "v", "ends"}
    OUT     {"linears": {name: {tensor: values, "kernel", "y"}}, "refused": {form: reason}, "without": the kernel that vLLM takes
            unasked, "attention": {case: values}}; of ranks that split the inputs, the linears alone

The platform is an emulated Hopper, vLLM's FlashAttention is torch's, and so is mmqc's kernel, which no CPU runs.
"""

import contextlib
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace


def main(world, rank, store, given, out):
    world, rank = int(world), int(rank)
    support = Path(__file__).parent
    asking = runpy.run_path(str(support.parents[1] / "mmqc" / "engines" / "ask_vllm.py"))
    layers = runpy.run_path(str(support / "vllm_layers.py"))
    asking["prepare"].__globals__["one_rank"] = lambda: layers["groups"](world, rank, store)
    import torch

    given = torch.load(given)
    with contextlib.redirect_stdout(sys.stderr):
        asking["prepare"](90)
        import mmqc.vllm

        mmqc.vllm.register()
        with asking["configured"]("auto"), torch.no_grad():
            found = {}
            if world == 1:
                found["without"] = kernel_of(asking, built(asking, next(iter(given["linears"].values())), 1))
                found["unknown"] = refused_part()
            alone = {name: each for name, each in given["linears"].items() if world == 1 or len(each["outputs"]) == 1}
            found["linears"] = {name: linear(asking, layers, each, world, rank) for name, each in alone.items()}
            if world == 1:
                found |= {"refused": refusals(), "attention": attention(given)}
    torch.save(found, out)


def asked(*parts):
    """As --additional-config says it."""
    from vllm.config import get_current_vllm_config

    get_current_vllm_config().additional_config = {"mmqc": list(parts)}


def refused_part():
    from mmqc.vllm.lent import lent_here
    from mmqc.vllm.specs import PluginError

    asked("kernels")
    try:
        lent_here()
    except PluginError as error:
        return str(error)
    return ""


def built(asking, each, world):
    """A linear of vLLM's: of one part, of several that it joins, or of one whose inputs ranks split."""
    import torch
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear, ReplicatedLinear, RowParallelLinear

    options = {
        "quant_config": asking["quantization"](each["config"]),
        "prefix": "layer",
        "params_dtype": torch.float16,
        "bias": False,
    }
    inputs, outputs = each["x"].shape[-1], each["outputs"]
    if len(outputs) > 1:
        return MergedColumnParallelLinear(inputs, outputs, **options)
    return (ReplicatedLinear if world == 1 else RowParallelLinear)(inputs, outputs[0], **options)


def kernel_of(asking, layer):
    return type(asking["kernel_of"](layer)).__name__


def linear(asking, layers, each, world, rank):
    """What the layer holds once it is loaded, and what it computes."""
    asked("linears")
    layer = built(asking, each, world)
    for shard, tensors in enumerate(each["tensors"]):
        for own, tensor in tensors.items():
            parameter = getattr(layer, own, None)
            assert parameter is not None or own in ("weight_shape", "g_idx"), own
            if parameter is not None:
                parameter.weight_loader(parameter, tensor, *([shard] if len(each["tensors"]) > 1 else []))
    (getattr(layer, "scheme", None) or layer.quant_method).process_weights_after_loading(layer)
    held = {name: value.data.clone() for name, value in layer._parameters.items() if value is not None}
    y = layer.quant_method.apply(layer, each["x"].chunk(world, -1)[rank])
    return {"kernel": kernel_of(asking, layer), "y": y, **held}


def refusals():
    """Why the kernel does not take what it has no place for."""
    import torch
    from vllm.model_executor.kernels.linear import MPLinearLayerConfig
    from vllm.scalar_type import scalar_types as types

    from mmqc.vllm.linear_kernel import MmqcLinearKernel

    plain = {"weight_type": types.uint4b8, "act_type": torch.float16, "group_size": 64, "zero_points": False}
    asked("linears")
    found = {}
    for name, k, change in (
        ("taken", 256, {}),
        ("groups", 288, {}),
        ("words", 36, {"group_size": -1}),
        ("bits", 256, {"weight_type": types.uint3b4}),
        ("inputs", 256, {"act_type": torch.float8_e4m3fn}),
    ):
        config = MPLinearLayerConfig(full_weight_shape=(k, 64), partition_weight_shape=(k, 64), **{**plain, **change})
        found[name] = MmqcLinearKernel.can_implement(config)[1]
    asked()
    found["asked"] = MmqcLinearKernel.can_implement(config)[1]
    return found


def attention(given):
    """What vLLM's layer computes with mmqc's kernel and without, and what the kernel was called with."""
    import torch
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers.attention import mm_encoder_attention as engines
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.ops import vit_attn_wrappers

    from mmqc.kernels.attention import variable_length as op
    from mmqc.kernels.shared import device_facts
    from mmqc.vllm import encoder_attention

    current_platform.__class__.get_vit_attn_backend = classmethod(lambda cls, *a, **k: AttentionBackendEnum.FLASH_ATTN)
    engines.get_flash_attn_version = lambda **k: 3
    device_facts.has_warpgroup_products = lambda device: True
    calls = []

    def kernel(q, k, v, ends, scale, causal):
        calls.append(("mmqc", tuple(q.shape), ends.tolist()))
        return op.reference(q, k, v, ends, ends, scale, causal, q.shape[2])

    def flash(q, k, v, batch, aiter, version, scale, ends, longest):
        calls.append(("vllm", tuple(q.shape), version))
        return encoder_attention.by_reference(q, k, v, ends, longest, scale, version)

    op._kernels = lambda: SimpleNamespace(why_not=lambda *a: None, segment_attention=kernel, prepare=lambda *a, **k: None)
    vit_attn_wrappers.flash_attn_maxseqlen_wrapper = flash
    q, k, v, ends = (given[name] for name in ("q", "k", "v", "ends"))
    longest = (ends[1:] - ends[:-1]).max()
    heads, channels = q.shape[2:]
    found = {}

    def layer(dtype=torch.float16, head_size=channels):
        torch.set_default_dtype(dtype)
        made = engines.MMEncoderAttention(heads, head_size, num_kv_heads=k.shape[2], prefix="visual.blocks.0.attn.attn")
        torch.set_default_dtype(torch.float32)
        return made

    config = get_current_vllm_config()
    config.additional_config, config.quant_config = {}, SimpleNamespace(get_name=lambda: "mmqc")
    found["own"] = layer().reason
    config.quant_config = SimpleNamespace(get_name=lambda: "awq")
    found["not asked"] = layer().reason
    asked("attention")
    found["float32"], found["heads"] = layer(torch.float32).reason, layer(head_size=136).reason
    own = layer()
    found["class"], found["reason"] = type(own).__name__, own.reason
    found["native"] = own.forward_native(q, k, v, ends)
    found["op"] = own(q, k, v, ends, longest)
    found["flat"] = own(q.flatten(2), k.flatten(2), v.flatten(2), ends, longest)
    found["whole native"], found["whole"] = own.forward_native(q, k, v), own(q, k, v)
    torch.library.opcheck(torch.ops.mmqc_vllm.encoder_attention, (q, k, v, ends, longest, own.scale, 3))
    for case, op.MANY, op.LONG in (("few", 8192, 1024), ("short", 8, 1024), ("many", 8, 4)):
        found[case] = encoder_attention.on_cuda(q, k, v, ends, longest, own.scale, 3)
    two = [t.view(2, -1, *t.shape[2:]) for t in (q, k, v)]
    found["batch"] = encoder_attention.on_cuda(*two, None, None, own.scale, 3)
    found["batch native"] = own.forward_native(*two)
    found["calls"] = calls
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
