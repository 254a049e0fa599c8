"""A checkpoint is never loaded with random weights, and a save that fails leaves the old one."""

import subprocess
import sys

import pytest
import torch
from models import tiny_qwen2_vl
from transformers import AutoModelForImageTextToText

from mmqc import quantize_, recipes
from mmqc.checkpoint import hf_staged
from mmqc.checkpoint.staging import replacing


@pytest.fixture(scope="module")
def quantized():
    model, inputs = tiny_qwen2_vl()
    quantize_(model, recipes.rtn(4))
    return model, inputs


LOADERS = {
    "auto": "from transformers import AutoModelForImageTextToText as C",
    "class": "from transformers import Qwen2VLForConditionalGeneration as C",
}


@pytest.mark.parametrize("loader", LOADERS)
def test_without_mmqc__is_refused(tmp_path, quantized, loader):
    quantized[0].save_pretrained(tmp_path)
    code = f"import sys; sys.modules['mmqc'] = None; {LOADERS[loader]}; C.from_pretrained(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode != 0
    assert "quant_method" in done.stderr.splitlines()[-1]


def test_with_mmqc__the_same_outputs(tmp_path, quantized):
    model, inputs = quantized
    model.save_pretrained(tmp_path)
    again = AutoModelForImageTextToText.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(again(**inputs).logits, model(**inputs).logits)


def test_fewer_shards__leave_no_stale_file_and_keep_foreign_ones(tmp_path, quantized):
    model, _ = quantized
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    (tmp_path / "README.md").write_text("mine")
    model.save_pretrained(tmp_path)
    names = {p.name for p in tmp_path.iterdir()}
    assert {n for n in names if n.startswith("model")} == {"model.safetensors"}
    assert (tmp_path / "README.md").read_text() == "mine"
    assert not [p for p in tmp_path.parent.iterdir() if ".saving-" in p.name]


def test_config_without_times__is_the_same_in_two_runs(tmp_path, quantized):
    model, _ = quantized
    config = model.config.quantization_config
    config.record["passes"] = [{"name": "fold", "ms": 1.5}]
    assert config.to_dict()["record"]["passes"] == [{"name": "fold"}]
    config.record["passes"] = []


def test_positional_arguments__are_staged_too(tmp_path, quantized, monkeypatch):
    """``save_pretrained(directory, is_main_process, state_dict, push_to_hub, max_shard_size)``."""
    model, _ = quantized
    model.save_pretrained(tmp_path / "out", True)
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    staged = []
    monkeypatch.setattr(hf_staged, "replacing", lambda *args: staged.append(args) or replacing(*args))
    model.save_pretrained(tmp_path / "out", True, None)
    assert len(staged) == 1
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before


def test_two_saves__are_equal_byte_by_byte(tmp_path):
    """Of two runs of all that makes a checkpoint."""
    for name in ("one", "two"):
        model, _ = tiny_qwen2_vl()
        quantize_(model, recipes.rtn(4), progress=False)
        model.save_pretrained(tmp_path / name)
    one, two = ({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("one", "two"))
    assert one == two


def test_a_pipeline_without_mmqc__is_refused(tmp_path, quantized):
    quantized[0].save_pretrained(tmp_path)
    code = "import sys; sys.modules['mmqc'] = None; from transformers import pipeline; pipeline('image-text-to-text', sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode != 0
    assert "quant_method" in done.stderr
