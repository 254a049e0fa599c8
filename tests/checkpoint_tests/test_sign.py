"""Who edits config.json on purpose says so with one command."""

import forked
import pytest
from saved_checkpoint import edit_json, saved
from transformers import AutoModelForImageTextToText

import mmqc
from mmqc.checkpoint.checksum import CheckpointError
from mmqc.checkpoint.sign import sign


def test_sign__the_edited_checkpoint_loads(tmp_path):
    saved(tmp_path)
    edit_json(tmp_path / "config.json", lambda c: c["text_config"].update(rms_norm_eps=0.25))
    edit_json(tmp_path / "generation_config.json", lambda g: g.update(max_new_tokens=3))
    with pytest.raises(CheckpointError, match=r"run `python -m mmqc\.checkpoint\.sign "):
        AutoModelForImageTextToText.from_pretrained(tmp_path)
    done = forked.run("-m", "mmqc.checkpoint.sign", str(tmp_path))
    assert done.returncode == 0, done.stderr
    model = AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert model.model.language_model.norm.variance_epsilon == 0.25
    assert model.generation_config.max_new_tokens == 3
    assert not list(tmp_path.glob(".*"))


def test_sign__of_the_compressed_tensors_format_renews_the_manifest(tmp_path):
    saved(tmp_path, format="compressed-tensors")
    edit_json(tmp_path / "config.json", lambda c: c["text_config"].update(rms_norm_eps=0.25))
    with pytest.raises(CheckpointError, match=r"config\.json is damaged or was edited"):
        mmqc.load_quantized(tmp_path)
    sign(tmp_path)
    assert mmqc.load_quantized(tmp_path).model.language_model.norm.variance_epsilon == 0.25


def test_sign__keeps_links_and_modes(tmp_path):
    saved(tmp_path / "model")
    real, link = tmp_path / "shared.json", tmp_path / "model" / "config.json"
    link.rename(real)
    real.chmod(0o640)
    link.symlink_to(real)
    edit_json(link, lambda c: c["text_config"].update(rms_norm_eps=0.25))
    sign(tmp_path / "model")
    assert link.is_symlink()
    assert real.stat().st_mode & 0o777 == 0o640
    assert AutoModelForImageTextToText.from_pretrained(tmp_path / "model").model.language_model.norm.variance_epsilon == 0.25


def test_sign__refuses_what_mmqc_does_not_sign(tmp_path):
    with pytest.raises(FileNotFoundError):
        sign(tmp_path)
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "awq"}}')
    with pytest.raises(CheckpointError, match="no checkpoint that mmqc signs"):
        sign(tmp_path)
    done = forked.run("-m", "mmqc.checkpoint.sign", str(tmp_path))
    assert done.returncode == 1
    assert "no checkpoint that mmqc signs" in done.stderr
