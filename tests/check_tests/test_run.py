"""``mmqc check``: planted faults are found, each with its level, its kind and what to do; good checkpoints are called good."""

import json

import pytest
import torch
from engine_checkpoints import ENGINE, WEIGHTS, edit, edit_tensors, made, packed
from often import often
from typer.testing import CliRunner

from mmqc.check.finding import Finding, several
from mmqc.check.run import check
from mmqc.check.stored import NoCheckpointError
from mmqc.cli.app import app
from mmqc.engines.table import versions

needs_presets = pytest.importorskip("compressed_tensors", reason="pip install 'mmqc[formats]' for what its presets write")
DOWN = "model.language_model.layers.1.mlp.down_proj"


def groups(config):
    return config["quantization_config"]["config_groups"]


def each_group(change):
    def apply(folder):
        edit(folder, lambda config: [change(group) for group in groups(config).values()])

    return apply


def config(change):
    return lambda folder: edit(folder, lambda c: change(c["quantization_config"]))


def inputs(**settings):
    return each_group(lambda group: group["input_activations"].update(settings))


def weights(**settings):
    return each_group(lambda group: group["weights"].update(settings))


def whole_config(**settings):
    return lambda folder: edit(folder, lambda c: c.update(settings))


def int_static(folder):
    """W4A8 as older exports have it: 4-bit codes beside a static input scale."""
    each_group(lambda g: g["weights"].update(num_bits=4))(folder)


def without(name):
    return lambda folder: edit_tensors(folder, lambda tensors: tensors.pop(name))


def changed(name, change):
    return lambda folder: edit_tensors(folder, lambda tensors: tensors.update({name: change(tensors[name])}))


def cut(folder):
    raw = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(raw[: len(raw) // 2])


def other_scheme_of_k(folder):
    """k_proj of one layer by int8 weights, of which q_proj and v_proj know nothing."""

    def change(settings):
        (group,) = settings["config_groups"].values()
        name = next(t for t in group["targets"] if t.endswith("layers.1.self_attn.k_proj"))
        group["targets"].remove(name)
        other = {**group, "targets": [name], "weights": {**group["weights"], "num_bits": 8}}
        settings["config_groups"]["group_1"] = other

    config(change)(folder)


def narrow(folder):
    """A tower whose MLP is 3,420 wide, as Qwen2.5-VL's."""

    def change(tensors):
        for own, width in (("fc1", 3420), ("fc2", 256)):
            name = f"model.visual.blocks.0.mlp.{own}"
            inner = 256 if own == "fc1" else 3420
            tensors[f"{name}.weight"] = torch.zeros(width, inner, dtype=torch.int8)
            tensors[f"{name}.weight_scale"] = torch.ones(width, 1)
            tensors[f"{name}.bias"] = torch.zeros(width)

    edit_tensors(folder, change)


def experts(scale):
    def apply(folder):
        def change(tensors):
            for i in range(4):
                name = f"model.language_model.layers.1.mlp.experts.{i}.down_proj"
                tensors[f"{name}.weight"] = torch.zeros(256, 256, dtype=torch.int8)
                tensors[f"{name}.weight_scale"] = torch.ones(256, 1)
                tensors[f"{name}.input_scale"] = torch.tensor([0.02 if i else scale])

        edit_tensors(folder, change)
        each_group(lambda g: g["targets"].append(r"re:.*experts\.\d+\.down_proj$"))(folder)

    return apply


def class_target(folder):
    """The class in place of names: it means the float linears of the tower too, and the head not."""
    each_group(lambda g: g.update(targets=["Linear"]))(folder)
    (folder / "mmqc_engine.json").unlink()
    (folder / "mmqc_manifest.json").unlink()


def float_tower(folder):
    def change(tensors):
        for name in [n for n in tensors if n.startswith("model.visual.") and n.endswith(".weight_packed")]:
            module = name.removesuffix(".weight_packed")
            rows, columns = (int(v) for v in tensors.pop(f"{module}.weight_shape"))
            del tensors[name], tensors[f"{module}.weight_scale"]
            tensors[f"{module}.weight"] = torch.zeros(rows, columns)

    edit_tensors(folder, change)
    config(lambda c: c.update(ignore=[*c["ignore"], r"re:model\.visual\..*"]))(folder)


def float_language(folder):
    """Most of the language model in floating point."""

    def change(tensors):
        for name in [
            n
            for n in tensors
            if n.startswith("model.language_model.layers.") and n.endswith(".weight_packed") and ".layers.0." not in n
        ]:
            module = name.removesuffix(".weight_packed")
            rows, columns = (int(v) for v in tensors.pop(f"{module}.weight_shape"))
            del tensors[name], tensors[f"{module}.weight_scale"]
            tensors[f"{module}.weight"] = torch.zeros(rows, columns)

    edit_tensors(folder, change)
    each_group(lambda g: g.update(targets=[t for t in g["targets"] if ".layers." not in t or ".layers.0." in t]))(folder)


def transform(**settings):
    apply = {"location": "input", "targets": [r"re:.*mlp\.down_proj$"], **settings.pop("apply", {})}
    entry = {"type": "hadamard", "apply": [apply], **settings}
    return config(lambda c: c.update(transform_config={"config_groups": {"R4": entry}}))


FP8_CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": True, "symmetric": True}
FAULTS = {
    # name: (checkpoint, what is done to it, level, kind, words of the finding)
    "static inputs beside 4-bit weights": ("w8a8", int_static, "error", "refused", "No compressed-tensors compatible scheme"),
    "static float8 inputs beside 4-bit weights": (
        "w4a8",
        inputs(dynamic=False, strategy="tensor"),
        "error",
        "refused",
        "takes no linear of this form",
    ),
    "float8 beside groups of 64": ("w4a8", weights(group_size=64), "error", "refused", "groups of 128 alone"),
    "int8 inputs left in floating point": ("w4a8", inputs(type="int"), "warning", "weight-only", "--linear-backend humming"),
    "groups in the order of activations": (
        "W4A16",
        weights(actorder="group"),
        "error",
        "refused",
        "order of activations",
    ),
    "q, k and v of two schemes": ("w4a8", other_scheme_of_k, "error", "joined", "have different schemes"),
    "k alone ignored": (
        "w4a8",
        config(lambda c: c["ignore"].append("model.language_model.layers.1.self_attn.k_proj")),
        "error",
        "joined",
        "it refuses that; list all, or none",
    ),
    "no scale": ("w4a8", without(f"{DOWN}.weight_scale"), "error", "unloadable", "looks for weight_scale"),
    "scales of other groups": (
        "w4a8",
        changed(f"{DOWN}.weight_scale", lambda s: s[:, :3].contiguous()),
        "error",
        "unloadable",
        "weight_scale is [256, 3], not [256, 6], for groups of 128",
    ),
    "codes in another format": ("W4AFP8", lambda folder: None, "error", "unloadable", "looks for weight_packed"),
    "a file that is cut off": ("w4a8", cut, "error", "unloadable", "cut off"),
    "an index that is damaged": (
        "w4a8",
        lambda folder: (folder / "model.safetensors.index.json").write_text("{"),
        "error",
        "unloadable",
        "index.json is damaged",
    ),
    "NaN among the scales": (
        "w4a8",
        changed(f"{DOWN}.weight_scale", lambda s: s * float("nan")),
        "error",
        "scales",
        "holds NaN",
    ),
    "widths without a fast kernel": ("w8a8", narrow, "warning", "slow widths", "multiples of 16"),
    "experts without tokens": ("w8a8", experts(0.0), "warning", "experts unseen", "routed no token"),
    "a float tower that the config quantizes": ("w4a8", float_tower, "error", "tower by accident", "does not match 'visual."),
    "a tower that nobody named": ("w4a8", class_target, "warning", "tower by accident", "does not name it"),
    "a head that the class does not mean": ("head", class_target, "error", "head", "re:.*lm_head$"),
    "a head that is tied": ("head", whole_config(tie_word_embeddings=True), "error", "head", "tie_word_embeddings"),
    "a float8 cache without norms": (
        "w4a8",
        config(lambda c: c.update(kv_cache_scheme=FP8_CACHE)),
        "warning",
        "cache",
        "no norms of queries and keys",
    ),
    "an int8 cache": (
        "w4a8",
        config(lambda c: c.update(kv_cache_scheme={**FP8_CACHE, "type": "int"})),
        "error",
        "cache",
        "8 of type float",
    ),
    "little of it quantized": ("w4a8", float_language, "warning", "share", "25% of the language model"),
    "a target that means nothing": (
        "w4a8",
        each_group(lambda g: g["targets"].append("re:.*fc3$")),
        "warning",
        "no such linear",
        "means nothing",
    ),
    "left out of the targets": (
        "w4a8",
        each_group(lambda g: g["targets"].remove("model.language_model.layers.1.mlp.down_proj")),
        "error",
        "left out",
        "no target of the config means it",
    ),
    "a Hadamard beside a bias": (
        "w4a8",
        transform(apply={"targets": [r"re:.*visual\.blocks\.\d+\.mlp\.fc2$", r"re:visual\.blocks\.\d+\.mlp\.fc2$"]}),
        "error",
        "transform",
        "that has a bias",
    ),
    "a Hadamard of 768": ("w4a8", transform(head_dim=768), "error", "transform", "powers of two"),
    "a transform's target by name": (
        "w4a8",
        transform(apply={"targets": ["model.language_model.layers.0.mlp.down_proj"]}),
        "error",
        "transform",
        "write it as a pattern",
    ),
    "another class": ("w4a8", whole_config(architectures=["NoSuchModel"]), "warning", "architecture", "has no such class"),
}


PLANTED_BY_OTHERS = ("codes in another format",)  # as compressed-tensors writes this preset


ENGINES = [f"vllm=={v}" for v in versions()]


@pytest.mark.parametrize("engine", often(ENGINES, ENGINES[-1]))
@pytest.mark.parametrize("name", FAULTS)
def test_check__finds(name, engine, tmp_path):
    checkpoint, plant, level, code, words = FAULTS[name]
    folder = made(checkpoint, tmp_path / "out")
    before = {(f.level, f.code) for f in check(folder, engine).findings}
    plant(folder)
    found = check(folder, engine)
    assert any((f.level, f.code) == (level, code) and words in f.text for f in found.findings), list(map(str, found.findings))
    assert (level, code) not in before or name in PLANTED_BY_OTHERS
    assert not found.good


GOOD = ("W8A8", "W4A16", "W8A16", "FP8", "FP8_DYNAMIC", "W4A16_ASYM")


@pytest.mark.parametrize("engine", [f"vllm=={v}" for v in versions()])
@pytest.mark.parametrize("name", [*GOOD, "w4a8", "w8a8"])
def test_check__calls_good_what_is(name, engine, tmp_path):
    found = check(made(name, tmp_path / "out"), engine)
    assert found.good, list(map(str, found.findings))
    assert sum(found.kernels.values()) == len(found.linears) >= 16
    assert not found.flag


@pytest.mark.parametrize(
    ("method", "settings", "good", "words"),
    [
        ("awq", {}, True, ""),
        ("gptq", {}, True, ""),
        ("gptq", {"desc_act": True}, False, "order of activations"),
        ("gptq", {"sym": False}, False, "Unsupported quantization config"),
        ("awq", {"zero_point": False}, False, "written out in every call"),
    ],
)
def test_check__awq_and_gptq(method, settings, good, words, tmp_path):
    found = check(packed(tmp_path / "out", method, **settings), ENGINE)
    assert found.good == good, list(map(str, found.findings))
    assert words in " ".join(f.text for f in found.findings)


def test_check__scales_of_gptq_that_fit_no_group(tmp_path):
    folder = packed(tmp_path / "out", "gptq")
    changed(f"{DOWN}.scales", lambda s: s[:2].contiguous())(folder)
    assert any("scales are [2, 256], not [6, 256]" in f.text for f in check(folder, ENGINE).findings)


def test_check__tensor_parallel_changes_widths(tmp_path):
    folder = made("w4a8", tmp_path / "out")
    assert check(folder, ENGINE, tensor_parallel=2).good
    found = check(folder, ENGINE, tensor_parallel=4)  # 256 inputs of o_proj: 64 on a GPU, half a group
    assert any(f.code == "refused" and "group size" in f.text and "x 256)" in f.where for f in found.findings)
    found = check(folder, ENGINE, tensor_parallel=3)
    assert any(f.code == "tensor parallel" for f in found.findings)
    transform()(folder)
    assert any("on 2 GPUs" in f.text for f in check(folder, ENGINE, tensor_parallel=2).findings)


def test_check__other_gpus_have_other_kernels(tmp_path):
    folder = made("w4a8", tmp_path / "out")
    found = check(folder, ENGINE, gpu="a100")
    assert {f.code for f in found.findings if f.level == "error"} == {"refused"}
    assert check(made("W4A16", tmp_path / "w4a16"), ENGINE, gpu="a100").good


def test_check__with_the_flag_it_names_all_is_as_the_config_says(tmp_path):
    folder = made("w4a8", tmp_path / "out")
    inputs(type="int")(folder)
    found = check(folder, ENGINE)
    assert found.flag == "--linear-backend humming"
    assert check(folder, ENGINE, linear_backend="humming").good


def test_check__a_directory_that_is_no_checkpoint(tmp_path):
    with pytest.raises(NoCheckpointError, match=r"has no config\.json"):
        check(tmp_path, ENGINE)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(NoCheckpointError, match="no quantization_config"):
        check(tmp_path, ENGINE)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "bitsandbytes"}}))
    with pytest.raises(NoCheckpointError, match="'bitsandbytes'"):
        check(tmp_path, ENGINE)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(NoCheckpointError, match="has no safetensors"):
        check(tmp_path, ENGINE)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(NoCheckpointError, match="no JSON"):
        check(tmp_path, ENGINE)


def test_command__one_line_a_finding_an_exit_code_and_json(tmp_path):
    folder, out = made("w4a8", tmp_path / "out"), tmp_path / "check.json"
    result = CliRunner().invoke(app, ["check", str(folder), "--engine", ENGINE, "--json", str(out)])
    assert result.exit_code == 0, result.output
    assert "34 linears  int4 group128 / float8 token dynamic / pack-quantized: CutlassW4A8, groups of 128" in result.output
    figures = json.loads(out.read_text())["check"]
    assert figures["good"]
    assert figures["findings"] == []
    assert figures["linears"][0]["kernel"] == "CutlassW4A8LinearKernel"
    without(f"{DOWN}.weight_scale")(folder)
    result = CliRunner().invoke(app, ["check", str(folder), "--engine", ENGINE])
    assert result.exit_code == 1
    assert sum(line.startswith("error") for line in result.output.splitlines()) == 1
    result = CliRunner().invoke(app, ["check", str(folder), "--engine", "vllm==0.1"])
    assert result.exit_code == 3
    assert "known are 'vllm==0.32'" in result.output


def test_finding__is_one_line():
    (found,) = several("error", "refused", ["a", "b", "c"], "no")
    assert str(found) == "error    refused               a and 2 more: no"
    assert several("note", "x", [], "no") == []
    assert str(Finding("note", "x", "y", "z")).count("\n") == 0
