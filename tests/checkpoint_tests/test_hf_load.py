"""``from_pretrained(..., quantization_config=...)`` of a float checkpoint: what ``quantize_`` makes of the loaded model."""

import copy
import json

import pytest
import torch
from models import tiny_qwen2_vl
from often import often
from tiny_families import FAMILIES
from transformers import AutoModelForImageTextToText

import mmqc
from mmqc import recipes
from mmqc.checkpoint.hf import MmqcConfig
from mmqc.nn.linear import QuantLinear


def example(dtype=torch.float32, **options):
    model, inputs = tiny_qwen2_vl(**options)
    for p in model.parameters():
        p.data = p.data.to(dtype)
    return model, {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}


@torch.no_grad()
def logits(model, inputs):
    return model(**inputs, use_cache=False).logits


def assert_same(model, again, inputs):
    want, got = model.state_dict(), again.state_dict()
    assert want.keys() == got.keys()
    for name, tensor in want.items():
        assert tensor.dtype == got[name].dtype, name
        assert torch.equal(tensor, got[name]), name
    assert torch.equal(logits(model, inputs), logits(again, inputs))


CONFIGS = {
    "int8": recipes.rtn(8),
    "int4-g8": recipes.rtn(4, group_size=8),
    "head": recipes.rtn(8, head_bits=8),
    "mse": recipes.rtn(4, solver="mse_clip"),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("tied", often((True, False), True), ids=["tied", "untied"])
def test_load__equals_quantize_after_loading(tmp_path, config, tied):
    model, inputs = example(tied=tied)
    model.save_pretrained(tmp_path / "float", max_shard_size="100KB")
    assert len(list((tmp_path / "float").glob("*.safetensors"))) > 1
    mmqc.quantize_(model, config, progress=False)
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "float", quantization_config=config)
    assert_same(model, again, inputs)
    assert isinstance(again.lm_head, QuantLinear) is (config.head is not None)
    again.save_pretrained(tmp_path / "quantized")
    assert_same(model, AutoModelForImageTextToText.from_pretrained(tmp_path / "quantized"), inputs)
    assert (again.lm_head.weight is again.model.language_model.embed_tokens.weight) is (tied and config.head is None)


def test_load__any_dtype_and_device_map(tmp_path):
    model, _ = example()
    model.save_pretrained(tmp_path)
    again = AutoModelForImageTextToText.from_pretrained(
        tmp_path, quantization_config=recipes.rtn(4, group_size=8), dtype=torch.bfloat16, device_map="cpu"
    )
    half, inputs = example(torch.bfloat16)
    mmqc.quantize_(half, recipes.rtn(4, group_size=8), progress=False)
    assert again.model.language_model.layers[0].self_attn.q_proj.bias.dtype == torch.bfloat16
    assert_same(half, again, inputs)


def test_load__keeps_what_either_name_says(tmp_path):
    model, _ = example()
    model.save_pretrained(tmp_path)
    config = MmqcConfig(config=recipes.rtn(8).replace(keep=("lm_head", "fc1")), modules_to_not_convert=["o_proj"])
    again = AutoModelForImageTextToText.from_pretrained(tmp_path, quantization_config=config)
    left = {n.rpartition(".")[2] for n, m in again.named_modules() if type(m) is torch.nn.Linear}
    assert left == {"lm_head", "fc1", "o_proj"}
    again.save_pretrained(tmp_path / "q")
    saved = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    assert saved["config"]["keep"] == ["lm_head", "fc1", "o_proj"]
    assert "modules_to_not_convert" not in saved


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (recipes.mquant(), r"recorded.*mmqc\.quantize_"),
        (recipes.rtn(8, activation_bits=8), r"needs calibration.*mmqc\.quantize_"),
        (MmqcConfig(), r"quantizes no linear.*mmqc\.quantize_"),
        (recipes.rtn(8).replace(vision=None), r"or one has none.*mmqc\.quantize_"),
        (recipes.rtn(8).replace(keep=("nowhere",)), "'nowhere' matches no linear"),
    ],
    ids=["rewrites", "static", "nothing", "one tower", "keep"],
)
def test_load__refuses_what_needs_data(tmp_path, config, words):
    model, _ = example()
    model.save_pretrained(tmp_path)
    with pytest.raises(mmqc.ConfigError, match=words):
        AutoModelForImageTextToText.from_pretrained(tmp_path, quantization_config=config)


def test_load__a_checkpoint_that_mmqc_saved_wins(tmp_path):
    model, inputs = example()
    mmqc.quantize_(model, recipes.rtn(8), progress=False)
    copy.deepcopy(model).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="already has a `quantization_config`"):
        again = AutoModelForImageTextToText.from_pretrained(tmp_path, quantization_config=MmqcConfig(config=recipes.rtn(4)))
    assert_same(model, again, inputs)


def test_load__never_holds_a_float_copy_of_what_it_quantized(tmp_path, monkeypatch):
    model, _ = example()
    model.save_pretrained(tmp_path)
    from mmqc.checkpoint import hf_load

    waiting = []
    swap = hf_load.LoadPlan.swap

    def watched(plan, model, fqn, weight):
        swap(plan, model, fqn, weight)
        floats = [n for n, m in model.named_modules() if type(m) is torch.nn.Linear and not m.weight.is_meta]
        waiting.append([n for n in floats if n in plan.schemes])

    monkeypatch.setattr(hf_load.LoadPlan, "swap", watched)
    AutoModelForImageTextToText.from_pretrained(tmp_path, quantization_config=recipes.rtn(8))
    assert len(waiting) == 24
    assert not any(waiting)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "qwen2_vl"])
def test_load__every_family_equals_quantize_and_round_trips(tmp_path, family):
    model, inputs = FAMILIES[family]()
    model.save_pretrained(tmp_path / "float")
    config = recipes.rtn(8, head_bits=8)  # the head too, so that what was tied comes apart
    mmqc.quantize_(model, config, progress=False)
    again = type(model).from_pretrained(tmp_path / "float", quantization_config=config)
    assert_same(model, again, inputs)
    again.save_pretrained(tmp_path / "quantized")
    assert_same(model, type(model).from_pretrained(tmp_path / "quantized"), inputs)


def test_load__a_block_that_initialises_its_experts_weights(tmp_path, monkeypatch):
    """As Qwen3-Omni's does, whose experts have no float weights any more."""
    model, inputs = FAMILIES["mixtral"]()
    block, initialise = type(model.model.layers[0].mlp), type(model)._init_weights

    def init(self, module):
        initialise(self, module)
        if isinstance(module, block):
            module.experts.gate_up_proj.detach()

    monkeypatch.setattr(type(model), "_init_weights", init)
    mmqc.quantize_(model, recipes.rtn(8), progress=False)
    model.save_pretrained(tmp_path)
    assert_same(model, type(model).from_pretrained(tmp_path), inputs)


def test_offload__a_quantized_model_runs_from_disk(tmp_path):
    model, inputs = example()
    mmqc.quantize_(model, recipes.rtn(8), progress=False)
    model.save_pretrained(tmp_path / "quantized", max_shard_size="100KB")
    places = {"model.visual": "disk", "model.language_model": "cpu", "lm_head": "cpu"}
    again = AutoModelForImageTextToText.from_pretrained(
        tmp_path / "quantized", device_map=places, offload_folder=tmp_path / "offload", offload_buffers=True
    )
    assert all(b.is_meta for n, b in again.model.visual.named_buffers() if n.endswith("qweight"))
    assert torch.equal(logits(again, inputs), logits(model, inputs))


@pytest.mark.parametrize("buffers", often((True, False), True))
def test_offload__online_hadamards_stay_where_they_are_computed(tmp_path, buffers):
    model, inputs = example()
    mmqc.quantize_(model, recipes.mquant(4, solver="rtn"), [inputs], progress=False)
    assert sum(bool(getattr(m, "hadamard", False)) for m in model.modules()) > 2
    model.save_pretrained(tmp_path / "quantized")
    places = {"model.visual": "disk", "model.language_model": "disk", "lm_head": "cpu"}
    again = AutoModelForImageTextToText.from_pretrained(
        tmp_path / "quantized", device_map=places, offload_folder=tmp_path / "offload", offload_buffers=buffers
    )
    assert sum(t.is_meta for n, t in again.state_dict().items() if n.endswith("norm.weight")), "left on disk"
    for _ in range(2):
        assert torch.equal(logits(again, inputs), logits(model, inputs))


def test_flipped_bit__in_one_of_many_shards_is_named(tmp_path):
    model, _ = example()
    mmqc.quantize_(model, recipes.rtn(8), progress=False)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    with pytest.raises(ValueError, match=r"damaged: \S+ differs"):
        AutoModelForImageTextToText.from_pretrained(tmp_path)
