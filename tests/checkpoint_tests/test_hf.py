"""Saving and loading with transformers: the same modules, the same bits, and clear words where that cannot be."""

import copy
import json
import subprocess
import sys

import forked
import pytest
import torch
from models import tiny_qwen2_vl
from torch import nn
from torchao.quantization.granularity import PerGroup
from transformers import AutoModel, AutoModelForImageTextToText, Qwen2VLForConditionalGeneration

from mmqc import recipes
from mmqc.checkpoint.hf import MmqcConfig, MmqcQuantizer, attach_config, build_module, module_spec
from mmqc.checkpoint.sign import sign
from mmqc.config import WeightSpec
from mmqc.nn.linear import HadamardLinear, QuantLinear, RMSNorm
from mmqc.nn.modality import ModalityContext, attached
from mmqc.ops.hadamard_matrix import hadamard_factors
from mmqc.solvers import solve

VISUAL = (500, 501)
CONFIG = recipes.mquant(weight_bits=4, solver="rtn")


def rotated(weight):
    """W Hᵀ, in float64."""
    h = torch.ones(1, 1, dtype=torch.float64)
    for factor in hadamard_factors(weight.shape[1]):
        h = torch.kron(h, factor)
    return (weight.double() @ h.T).to(weight.dtype)


def quantized(linear, spec, *, static=False, context=None, hadamard=False, outliers=()):
    """A QuantLinear in place of ``linear``."""
    weight = rotated(linear.weight.detach()) if hadamard else linear.weight.detach()
    skip = torch.tensor(outliers, dtype=torch.int64)
    q = solve(weight, spec, skip=skip)
    scale = torch.tensor([0.04, 0.06] if context else [0.05]) if static else None
    return QuantLinear.from_parts(
        q,
        weight_bits=spec.bits,
        activation_bits=8 if static else None,
        bias=linear.bias,
        input_scale=scale,
        outliers=(skip, weight[:, skip]) if outliers else None,
        hadamard=hadamard,
        modality=context,
        dtype=linear.weight.dtype,
    )


@torch.no_grad()
def quantize_by_hand(model, *, untie=False):
    """One of everything: every kind of module of ours, and plain modules whose parameters changed."""
    w4, w8 = WeightSpec(4), WeightSpec(8)
    context = ModalityContext.attach(model, VISUAL)
    tower, decoder = model.model.visual, model.model.language_model
    for block in tower.blocks:
        block.attn.qkv = quantized(block.attn.qkv, w8, static=True)
        block.mlp.fc2 = quantized(block.mlp.fc2, w4, static=True, hadamard=True, outliers=(3, 200))
        block.norm1 = RMSNorm(64, eps=1e-5)
    tower.blocks[0].norm2 = RMSNorm(64, eps=1e-6, weight=torch.rand(64).to(model.dtype))
    tower.blocks[1].attn.proj = quantized(tower.blocks[1].attn.proj, WeightSpec(4, PerGroup(16)))
    tower.blocks[0].attn.proj = quantized(tower.blocks[0].attn.proj, WeightSpec(3, PerGroup(16)))
    tower.merger.mlp[0] = quantized(tower.merger.mlp[0], WeightSpec(2, PerGroup(16)))
    fc1 = tower.blocks[1].mlp.fc1
    tower.blocks[1].mlp.fc1 = HadamardLinear.from_parts(rotated(fc1.weight.detach()), fc1.bias.detach())
    for layer in decoder.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(layer.self_attn, name, quantized(getattr(layer.self_attn, name), w4, static=True, context=context))
        layer.mlp.down_proj = quantized(layer.mlp.down_proj, w8, static=True, context=context, hadamard=True)
    decoder.layers[0].mlp.up_proj.bias = nn.Parameter(torch.randn(296).to(model.dtype))
    if untie:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() * 1.25)
    attach_config(model, CONFIG, {"passes": [{"name": "fold_norm_scale", "sites": 3}]})
    return model


def example(dtype=torch.float32, **options):
    model, inputs = tiny_qwen2_vl(**options)
    # not model.to(): that would round the rotary frequencies, which from_pretrained always computes in float32
    for p in model.parameters():
        p.data = p.data.to(dtype)
    return model, {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}


@torch.no_grad()
def logits(model, inputs):
    return model(**inputs, use_cache=False).logits


def same_tensors(one, two):
    a, b = one.state_dict(), two.state_dict()
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype, name
        assert torch.equal(tensor, b[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("untie", [False, True], ids=["tied", "untied"])
def test_round_trip__the_same_bits_by_either_class(tmp_path, dtype, untie):
    model, inputs = example(dtype)
    quantize_by_hand(model, untie=untie)
    want = logits(model, inputs)
    model.save_pretrained(tmp_path)
    for cls in (AutoModelForImageTextToText, Qwen2VLForConditionalGeneration):
        again = cls.from_pretrained(tmp_path)
        same_tensors(model, again)
        assert torch.equal(logits(again, inputs), want)
        assert {n: type(m) for n, m in again.named_modules()} == {n: type(m) for n, m in model.named_modules()}
        assert (again.lm_head.weight is again.model.language_model.embed_tokens.weight) is not untie
        assert again.is_quantized
        assert not again.training
        assert again.config.quantization_config.to_dict() == model.config.quantization_config.to_dict()


def test_files__are_safetensors_and_a_config_that_tells_all(tmp_path):
    model, _ = example()
    quantize_by_hand(model, untie=True).save_pretrained(tmp_path)
    assert {p.suffix for p in tmp_path.iterdir()} == {".json", ".safetensors"}
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    assert config["text_config"].get("tie_word_embeddings", False) is False
    saved = config["quantization_config"]
    assert saved["quant_method"] is None  # transformers without mmqc refuses that
    assert "import mmqc" in saved["requires"]
    assert saved["untied"] is True
    assert saved["visual_token_ids"] == list(VISUAL)
    assert saved["record"] == {"passes": [{"name": "fold_norm_scale", "sites": 3}]}
    assert MmqcConfig(**saved).quant_config == CONFIG
    assert saved["parameters"] == {"model.language_model.layers.0.mlp.up_proj.bias": {"shape": [296], "dtype": "float32"}}
    assert saved["modules"]["model.visual.blocks.0.mlp.fc2"] == {
        "kind": "quant_linear",
        "in": 256,
        "out": 64,
        "weight_bits": 4,
        "activation_bits": 8,
        "group_size": 0,
        "hadamard": True,
        "bias": True,
        "input_scales": 1,
        "outliers": 2,
        "modality": False,
        "dtype": "float32",
        "zero": False,
        "float8": False,
        "integer_scales": False,
    }
    assert saved["modules"]["model.visual.blocks.0.norm1"] == {
        "kind": "rms_norm",
        "size": 64,
        "eps": 1e-5,
        "weight": False,
        "bias": False,
        "dtype": None,
    }


def test_modality__is_hooked_to_the_loaded_model_and_known_to_its_linears(tmp_path):
    model, inputs = example()
    quantize_by_hand(model).save_pretrained(tmp_path)
    again = AutoModelForImageTextToText.from_pretrained(tmp_path)
    context = attached(again)
    assert context.visual_token_ids == VISUAL
    linears = {n: m for n, m in again.named_modules() if isinstance(m, QuantLinear)}
    assert {n for n, m in linears.items() if m.modality is context} == {n for n in linears if "language_model" in n}
    text = {"input_ids": inputs["input_ids"][:, :5]}
    assert torch.equal(logits(again, text), logits(model, text))


def test_save_again__shards_and_copies_load_too(tmp_path):
    model, inputs = example()
    quantize_by_hand(model)
    want = logits(model, inputs)
    copy.deepcopy(model).save_pretrained(tmp_path / "a", max_shard_size="100KB")
    assert len(list((tmp_path / "a").glob("*.safetensors"))) > 1
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "a", device_map="cpu")
    assert torch.equal(logits(again, inputs), want)
    again.save_pretrained(tmp_path / "b")
    assert torch.equal(logits(AutoModelForImageTextToText.from_pretrained(tmp_path / "b"), inputs), want)


def test_compiled__saves_like_any_other(tmp_path):
    model, inputs = example()
    quantize_by_hand(model)
    want = logits(model, inputs)
    model.compile(backend="mmqc")
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(AutoModelForImageTextToText.from_pretrained(tmp_path), inputs), want)


def test_base_model__loads_without_the_head(tmp_path):
    model, inputs = example()
    quantize_by_hand(model).save_pretrained(tmp_path)
    base = AutoModel.from_pretrained(tmp_path)
    assert not hasattr(base, "lm_head")
    with torch.no_grad():
        states = base(**inputs, use_cache=False).last_hidden_state
        assert torch.equal(model.lm_head(states), logits(model, inputs))


def test_another_dtype__casts_the_float_parts_only(tmp_path):
    model, inputs = example()
    quantize_by_hand(model).save_pretrained(tmp_path)
    again = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.bfloat16)
    fc2 = again.model.visual.blocks[0].mlp.fc2
    assert (fc2.qweight.dtype, fc2.weight_scale.dtype, fc2.input_scale.dtype) == (torch.uint8, torch.float32, torch.float32)
    assert (fc2.bias.dtype, fc2.outlier_weight.dtype, fc2.weight.dtype, again.dtype) == (torch.bfloat16,) * 4
    inputs["pixel_values"] = inputs["pixel_values"].bfloat16()
    for tensor in [*model.parameters(), *(b for n, b in model.named_buffers() if n.endswith(("bias", "outlier_weight")))]:
        tensor.data = tensor.data.bfloat16()
    assert torch.equal(logits(again, inputs), logits(model, inputs))


def test_flipped_bit__is_noticed_by_name(tmp_path):
    model, _ = example()
    quantize_by_hand(model).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 0x10
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=r"damaged: model\.\S+ differs .*1 tensors differ, 0 are missing.*copy or download"):
        AutoModelForImageTextToText.from_pretrained(tmp_path)


def edit(directory, **changes):
    """Changes quantization_config, and says that it is meant, if this mmqc signs such a version."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= changes
    path.write_text(json.dumps(config))
    if "version" not in changes:
        sign(directory)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": 99}, "version = 99.*reads versions 1 and 2.*update mmqc"),
        ({"surprise": 1}, "unknown key 'surprise'"),
        ({"modules": {"model.visual.blocks.0.norm1": {"kind": "layer_norm"}}}, "unknown kind of module 'layer_norm'"),
        ({"modules": {"model.visual.blocks.0.norm1": {"kind": "rms_norm"}}}, "spec of a rms_norm lacks 'weight'"),
        ({"modules": {"nowhere": {"kind": "rms_norm"}}}, "has nowhere, but Qwen2VLForConditionalGeneration has no such module"),
    ],
)
def test_config__that_cannot_be_read_says_why(tmp_path, changes, words):
    model, _ = example()
    quantize_by_hand(model).save_pretrained(tmp_path)
    edit(tmp_path, **changes)
    with pytest.raises(ValueError, match=words):
        AutoModelForImageTextToText.from_pretrained(tmp_path)


def test_missing_tensor__is_noticed():
    from mmqc.checkpoint.checksum import hashes, verify

    state = {"a": torch.ones(3), "b": torch.tensor(1.0)}
    expected = hashes(state)
    assert verify(expected, state, lambda name: name) == 0
    assert verify(expected, {**state, "a": torch.ones(3).half()}, lambda name: name) == 1
    with pytest.raises(ValueError, match=r"b is missing \(0 tensors differ, 1 are missing\)"):
        verify(expected, {"a": state["a"]}, lambda name: name)


def test_handmade_buffer__cannot_be_saved_and_is_named(tmp_path):
    model, _ = example()
    quantize_by_hand(model)
    model.model.visual.register_buffer("extra", torch.ones(2))
    with pytest.raises(ValueError, match=r"no buffer model\.visual\.extra"):
        model.save_pretrained(tmp_path)


def test_plain_module__is_left_alone():
    linear = nn.Linear(3, 3)
    assert attach_config(linear, CONFIG) is None
    assert module_spec(linear) is None
    assert not hasattr(linear, "hf_quantizer")


@pytest.mark.parametrize(
    "module",
    [
        RMSNorm(7, 1e-5),
        RMSNorm(7, 1e-5, torch.ones(7, dtype=torch.bfloat16)),
        HadamardLinear(12, 5, bias=False),
        QuantLinear(12, 5, weight_bits=4, group_size=4),
        QuantLinear(12, 5, weight_bits=8, activation_bits=8, input_scales=2, outliers=1, bias=True, hadamard=True),
    ],
    ids=lambda m: type(m).__name__,
)
def test_spec__rebuilds_keys_shapes_and_dtypes(module):
    spec = json.loads(json.dumps(module_spec(module)))
    again = build_module(spec)
    assert module_spec(again) == spec
    want = {k: (v.shape, v.dtype) for k, v in module.state_dict().items()}
    assert {k: (v.shape, v.dtype) for k, v in again.state_dict().items()} == want
    assert all(tensor.is_meta for tensor in again.state_dict().values())


CHECK = """
import transformers.modeling_utils
from transformers.quantizers import auto
assert auto.AUTO_QUANTIZER_MAPPING["mmqc"].__name__ == "MmqcQuantizer"
assert auto.AUTO_QUANTIZATION_CONFIG_MAPPING["mmqc"].__name__ == "MmqcConfig"
import inspect, sys
assert "AUTO_QUANTIZER_MAPPING" in inspect.getsource(auto)
left = [f.target for f in sys.meta_path if type(f).__module__ == "mmqc.checkpoint.hf_hook"]
assert set(left) <= {"peft.tuners.lora.model"}, left
"""
HOOK = "import mmqc; mmqc.checkpoint.hf_hook.install()\n"
LIGHT = "import sys; assert 'transformers' not in sys.modules\n"


def test_import__registers_after_transformers():
    done = forked.run("-c", "import sys; assert 'transformers.modeling_utils' in sys.modules\n" + HOOK + CHECK)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        HOOK + LIGHT + "from transformers import AutoModelForImageTextToText\n" + CHECK,
        HOOK + LIGHT + "import mmqc.checkpoint.hf\n" + CHECK,
    ],
    ids=["mmqc first", "hf itself"],
)
def test_import__registers_before_transformers(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_quantizer__says_what_it_can_do():
    quantizer = MmqcQuantizer(MmqcConfig())
    assert quantizer.is_serializable()
    assert quantizer.is_compileable
    assert quantizer.is_trainable  # with adapters: tests/adapters_tests/test_peft_layers.py
