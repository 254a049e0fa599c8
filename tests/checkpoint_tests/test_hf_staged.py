"""A checkpoint is never loaded with random weights, and a save that fails leaves the old one."""

import contextlib
import copy
import itertools
import os
import random
import signal
import time

import forked
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
    done = forked.run("-c", code, str(tmp_path))
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


def test_killed_save__leaves_the_old_one_or_the_new_one(tmp_path, quantized):
    """A child process saves another model over the first again and again, and is killed."""
    model, inputs = quantized
    target = tmp_path / "model"
    model.save_pretrained(target)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.language_model.norm.weight.mul_(2)
        wanted = [m(**inputs).logits for m in (model, other)]
    found = set()
    for kill in range(8):
        child = os.fork()
        if not child:
            with contextlib.suppress(BaseException):
                for saved in itertools.cycle((other, model)):
                    saved.save_pretrained(target, max_shard_size="50KB" if kill % 2 else "5GB")
            os._exit(1)
        time.sleep(random.uniform(0.02, 0.3))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with torch.no_grad():
            got = AutoModelForImageTextToText.from_pretrained(target)(**inputs).logits
        found |= {i for i, logits in enumerate(wanted) if torch.equal(got, logits)} or {f"neither, kill {kill}"}
    assert found <= {0, 1}


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


@pytest.mark.parametrize("recipe", [recipes.rtn(4), recipes.mquant(8, solver="rtn")], ids=["rtn", "mquant"])
def test_two_saves__are_equal_byte_by_byte(tmp_path, recipe):
    """Of two runs of all that makes a checkpoint."""
    for name in ("one", "two"):
        model, inputs = tiny_qwen2_vl()
        quantize_(model, recipe, [inputs] if recipe.needs_calibration else None, progress=False)
        model.save_pretrained(tmp_path / name)
    one, two = ({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("one", "two"))
    assert one == two


def test_a_pipeline_without_mmqc__is_refused(tmp_path, quantized):
    quantized[0].save_pretrained(tmp_path)
    code = "import sys; sys.modules['mmqc'] = None; from transformers import pipeline; pipeline('image-text-to-text', sys.argv[1])"
    done = forked.run("-c", code, str(tmp_path))
    assert done.returncode != 0
    assert "quant_method" in done.stderr
