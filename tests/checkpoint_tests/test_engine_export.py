"""Checkpoints for an engine: what is written, what transformers computes from it without mmqc, what is refused before that."""

import copy
import json
import os
import re
import subprocess
import sys

import pytest
import torch
from models import tiny_qwen2_vl
from torch import nn
from torchao.quantization.granularity import PerGroup

import mmqc
from mmqc import recipes
from mmqc.checkpoint import compressed_tensors, engine_export
from mmqc.checkpoint.engine_export import RECORD
from mmqc.engines.table import Answer, Case, versions

pytest.importorskip("compressed_tensors", reason="pip install 'mmqc[formats]' to read what mmqc writes")
ENGINES = [f"vllm=={version}" for version in versions()]
STATIC8 = recipes.rtn(8, activation_bits=8)
RECIPES = {
    "W8A8 static": recipes.mquant(8, msq=False, solver="rtn"),
    "W8A8 by modality": recipes.mquant(8, solver="rtn"),
    "W8A8-fp8": STATIC8.with_float8(),
    "W8A8-fp8 by token": STATIC8.with_token_scales().with_float8(),
    "W4A8-fp8": recipes.mquant(4),
    "W4A16": recipes.gptq(4, 128),
    "W4A16 asym": recipes.awq(4, symmetric=False),
    "W8A16": recipes.rtn(8),
    "mixed": recipes.mquant(4, vision_weight_bits=8, msq=False),
}
READ = """
import sys, torch
from transformers import AutoModelForImageTextToText
found = {}
for directory in sys.argv[2:]:
    model = AutoModelForImageTextToText.from_pretrained(directory).eval()
    with torch.no_grad():
        found[directory] = [model(**batch, use_cache=False).logits for batch in torch.load(directory + "/batches.pt")]
assert "mmqc" not in sys.modules
torch.save(found, sys.argv[1])
"""
BATCHES = 12


def in_float64(model):
    """The model as from_pretrained leaves one of float64, where no activation falls on the other side of a rounding boundary."""
    for part in (model.config, model.config.text_config, model.config.vision_config):
        part.dtype = torch.float64
    return model.double()


def batches_of(sample, count, after=0):
    """Calibration batches in float64."""
    return [
        {k: v.double() if v.is_floating_point() else v for k, v in b.items()} for b in sample.calibration(after + count)[after:]
    ]


def their_scales(x, code):
    """Scales as compressed-tensors' own emulation has them: half of the codes' range, and one for all rows without a batch axis.

    vLLM divides by the largest code, as mmqc does, and has a scale for every token.
    """
    peak = x.abs().amax().expand(*x.shape[:-1], 1) if x.dim() == 2 else x.abs().amax(-1, keepdim=True)
    return (peak / (448.0 if code == torch.float8_e4m3fn else 127.5)).clamp_min(1e-12)


@pytest.fixture(scope="module")
def sample():
    return mmqc.samples.load("digits-vqa")


@torch.no_grad()
def logits(model, batches):
    return [model(**batch, use_cache=False).logits for batch in batches]


def by_transformers(directories, batches, folder):
    """Logits in a process that has transformers and compressed-tensors and does not import mmqc, by directory."""
    for directory in directories:
        torch.save(batches, directory / "batches.pt")
    command = [sys.executable, "-c", READ, str(folder / "logits.pt"), *map(str, directories)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=folder, env={**os.environ, "PYTHONPATH": ""}, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    return torch.load(folder / "logits.pt")


def answers(out, batches):
    """How often the last token's answer is the label's."""
    return sum(int(a[0, -2].argmax() == b["input_ids"][0, -1]) for a, b in zip(out, batches, strict=True)) / len(batches)


@pytest.fixture(scope="module")
def exported(sample, tmp_path_factory):
    """By recipe: logits of the model as it was, of our modules, and of what transformers reads; and the batches."""
    folder, batches = tmp_path_factory.mktemp("exported"), batches_of(sample, BATCHES, after=8)
    ours = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mmqc.ops.token_matmul.token_scales", their_scales)
        for i, (name, recipe) in enumerate(RECIPES.items()):
            model, config = in_float64(copy.deepcopy(sample.model)), recipes.for_engine(recipe, ENGINES[-1])
            needs = config.needs_calibration or config.rewrites.rotate
            mmqc.quantize_(model, config, batches_of(sample, 4) if needs else None, progress=False)
            mmqc.save_pretrained(model, folder / str(i), engine=ENGINES[-1])
            ours[name] = logits(model, batches)
    theirs = by_transformers([folder / str(i) for i in range(len(RECIPES))], batches, folder)
    named = {name: theirs[str(folder / str(i))] for i, name in enumerate(RECIPES)}
    return logits(in_float64(copy.deepcopy(sample.model)), batches), ours, named, batches


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_save__transformers_without_mmqc_computes_the_same(name, exported):
    floats, ours, theirs, batches = exported
    noise = sum(float((w - f).norm()) for w, f in zip(ours[name], floats, strict=True))
    apart = sum(float((g - w).norm()) for g, w in zip(theirs[name], ours[name], strict=True))
    # half of a range of integers puts a token's largest channel halfway between two codes, where the last bit decides
    bound = 0.5 if name == "W8A8 by modality" else 0.01
    assert apart <= bound * noise, (apart, noise)
    least = 0.99 if "W8A8" in name else 0.985
    assert answers(theirs[name], batches) >= least * answers(floats, batches)


@pytest.mark.slow
def test_save__in_float64_nothing_falls_on_the_other_side(tmp_path, monkeypatch):
    monkeypatch.setattr("mmqc.ops.token_matmul.token_scales", their_scales)
    want, directories = {}, []
    model, inputs = tiny_qwen2_vl()
    inputs["pixel_values"] = inputs["pixel_values"].double()
    token = recipes.rtn(8, activation_bits=8).with_token_scales()
    float8 = recipes.rtn(4, activation_bits=8, group_size=8).with_token_scales().with_float8()
    for name, config in {"int8": token, "int4 x float8": float8}.items():
        model, _ = tiny_qwen2_vl()
        for p in model.parameters():
            p.data = p.data.double()
        mmqc.quantize_(model, config, progress=False)
        mmqc.save_pretrained(model, tmp_path / name, format="compressed-tensors")
        directories.append(tmp_path / name)
        (want[str(tmp_path / name)],) = logits(model, [inputs])
    for directory, (got,) in by_transformers(directories, [inputs], tmp_path).items():
        assert float((got - want[directory]).abs().max()) <= 2e-5 * float(want[directory].abs().max()), directory


@pytest.mark.parametrize("engine", ENGINES)
def test_save__writes_names_kernels_and_the_command(engine, sample, tmp_path):
    model = copy.deepcopy(sample.model)
    mmqc.quantize_(model, recipes.rtn(4, group_size=128), progress=False)
    mmqc.save_pretrained(model, tmp_path, engine=engine)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    (group,) = config["config_groups"].values()
    assert "Linear" not in group["targets"]
    assert len(group["targets"]) == sum(isinstance(m, mmqc.nn.linear.QuantLinear) for m in model.modules())
    record = json.loads((tmp_path / RECORD).read_text())
    assert record["engine"] == engine
    assert record["serve"] == "vllm serve ."
    assert record["kernels"] == {"int4 group128 / none / pack-quantized: Machete, W4A16, groups of 128": 34}
    assert mmqc.load_quantized(tmp_path) is not None


@pytest.mark.slow
def test_save__a_scale_per_modality_becomes_one_per_token(sample, tmp_path):
    model = copy.deepcopy(sample.model)
    mmqc.quantize_(model, recipes.mquant(8, rotate=False, solver="rtn"), sample.calibration(4), progress=False)
    mmqc.save_pretrained(model, tmp_path, engine=ENGINES[-1])
    groups = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["config_groups"].values()
    kinds = {(g["input_activations"]["strategy"], g["input_activations"]["dynamic"]) for g in groups}
    assert kinds == {("token", True), ("tensor", False)}  # the tower has one modality, whose scale stays


@pytest.mark.slow
def test_save__names_the_flag_where_a_kernel_waits_for_one(sample, tmp_path):
    model = copy.deepcopy(sample.model)
    mmqc.quantize_(model, recipes.mquant(4, msq=False, rotate=False, solver="rtn"), sample.calibration(4), progress=False)
    mmqc.save_pretrained(model, tmp_path, engine=ENGINES[-1])
    assert json.loads((tmp_path / RECORD).read_text())["serve"] == "vllm serve . --linear-backend humming"


def test_save__a_quantized_head_is_targeted_by_a_pattern(sample, tmp_path):
    model = copy.deepcopy(sample.model)
    mmqc.quantize_(model, recipes.rtn(8, head_bits=8), progress=False)
    mmqc.save_pretrained(model, tmp_path, engine=ENGINES[-1])
    groups = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["config_groups"].values()
    assert any(t.startswith("re:") and t.endswith("lm_head$") for g in groups for t in g["targets"])


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (recipes.mquant(4, solver="rtn"), r"an RMSNorm that was a LayerNorm.*for_engine.* rotations keep LayerNorms"),
        (recipes.per_token(8, 8, solver="rtn"), r"at run time: quantize by recipes\.for_engine"),
        (recipes.rtn(2, group_size=32), r"weights of 2 bits: quantize to 4 or 8"),
        (recipes.rtn(4, activation_bits=8).with_float8(), r"is refused there.*for_engine"),
        (recipes.rtn(8, activation_bits=8, group_size=128).with_integer_scales(), r"holds group_scale.*float scales"),
    ],
    ids=["hadamard", "asymmetric", "bits", "float8 per channel", "integer scales"],
)
def test_save__refuses_before_anything_is_written(config, words, tmp_path):
    model, inputs = tiny_qwen2_vl(width=128, inner=256, depth=1)
    mmqc.quantize_(model, config, [inputs], progress=False)
    with pytest.raises(mmqc.FormatError, match=words):
        mmqc.save_pretrained(model, tmp_path / "out", engine=ENGINES[-1])
    assert not (tmp_path / "out").exists()


def test_save__refuses_widths_that_no_kernel_has(tmp_path):
    model, inputs = tiny_qwen2_vl()
    mmqc.quantize_(
        model, recipes.rtn(4, group_size=8, activation_bits=8).with_token_scales().with_float8(), [inputs], progress=False
    )
    with pytest.raises(mmqc.FormatError, match=r"quantize by recipes\.for_engine|8 bits, or keep it"):
        mmqc.save_pretrained(model, tmp_path / "out", engine=ENGINES[-1])
    model, _ = tiny_qwen2_vl()
    mmqc.quantize_(model, recipes.rtn(4, group_size=128), progress=False)
    with pytest.raises(mmqc.FormatError, match="no multiple of its group size 128"):
        mmqc.save_pretrained(model, tmp_path / "out", engine=ENGINES[-1])
    assert not (tmp_path / "out").exists()


def test_save__refuses_parts_of_one_linear_with_different_schemes(sample, tmp_path):
    model = copy.deepcopy(sample.model)
    keep = ("lm_head", "model.language_model.layers.1.self_attn.k_proj")
    mmqc.quantize_(model, recipes.rtn(8).replace(keep=keep), progress=False)
    with pytest.raises(mmqc.FormatError, match=r"k_proj.*are one linear there and have different schemes"):
        mmqc.save_pretrained(model, tmp_path / "out", engine=ENGINES[-1])


def test_save__refuses_other_engines_formats_and_gpus(sample, tmp_path):
    model = copy.deepcopy(sample.model)
    mmqc.quantize_(model, recipes.rtn(8), progress=False)
    for options, words in (
        ({"engine": "sglang==0.5.23"}, "no table of SGLang"),
        ({"engine": ENGINES[0], "format": "mmqc"}, "reads 'compressed-tensors'"),
        ({"engine": ENGINES[0], "gpu": "tpu"}, "known are a100"),
    ):
        with pytest.raises(ValueError, match=words):
            mmqc.save_pretrained(model, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


class Says:
    """Rules that give one answer to everything."""

    source = "a test"

    def __init__(self, answer, names=True):
        self.answer, self.known = answer, names

    def answers(self, cases, backend="auto"):
        return [self.answer for _ in cases]

    def names(self, architecture):
        return {"joined": {}, "renaming": {}} if self.known else None


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        (Says(Answer(refused="Failed to find a kernel")), "8 bits, or keep it"),
        (Says(Answer(refused="no groups")), r"refused there \(no groups\)"),
        (Says(Answer("S", "K", "float inputs")), "inputs in floating point"),
        (Says(Answer("S", "K", "fails")), "its kernel fails"),
        (Says(None), "nobody asked the engine about"),
        (Says(Answer("S", "K"), names=False), "has no such class"),
    ],
)
def test_plan__every_objection_says_what_to_change(rules, words, sample):
    model = copy.deepcopy(sample.model)
    mmqc.quantize_(model, recipes.rtn(4, group_size=128), progress=False)
    made = engine_export.plan(model, rules, ENGINES[0], "h100")
    assert made.objections
    assert all(re.search(words, o) for o in made.objections)


def test_plan__float16_has_no_4_bit_cutlass_kernel():
    linear = engine_export.Linear("a", ("a",), Case("int4 group128 / float8 token dynamic / pack-quantized", {}, 256, 256))
    answer = Answer("CompressedTensorsW4A8Fp8", "CutlassW4A8LinearKernel")
    assert "bfloat16" in engine_export._objection(linear, answer, torch.float16)
    assert engine_export._objection(linear, answer, torch.bfloat16) == ""


def test_rotations__keep_layer_norms_and_the_model_is_saved_exactly(tmp_path):
    model, inputs = tiny_qwen2_vl(width=128, inner=256)
    batch = [inputs]
    norms = [n for n, m in model.named_modules() if isinstance(m, nn.LayerNorm)]
    config = recipes.for_engine(recipes.mquant(8, solver="rtn"), ENGINES[-1])
    report = mmqc.quantize_(model, config, batch, progress=False)
    assert norms
    assert [n for n, m in model.named_modules() if isinstance(m, nn.LayerNorm)] == norms
    turned = [p for p in report.passes if p.name == "fuse_rotation"]
    assert any("its mean kept" in str(site) for p in turned for site in p.sites)
    mmqc.save_pretrained(model, tmp_path, engine=ENGINES[-1])
    assert compressed_tensors.quantization_config(model, engine=True)["format"] in ("int-quantized", "mixed-precision")


def test_group__of_the_right_size_is_a_form_of_the_table():
    scheme = mmqc.Scheme(mmqc.WeightSpec(4, PerGroup(128)))
    assert str(scheme) == "W4A16-g128"
