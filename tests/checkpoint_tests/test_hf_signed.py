"""transformers reads and writes config.json and generation_config.json; what it writes is signed, what it reads is checked."""

import subprocess
import sys

import forked
import pytest
from saved_checkpoint import edit_json, saved
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedConfig

from mmqc.checkpoint.checksum import CheckpointError


def test_written_by_transformers__is_meant(tmp_path):
    saved(tmp_path)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path)
    model.config.text_config.rms_norm_eps = 0.25
    model.config.save_pretrained(tmp_path)
    model.generation_config.max_new_tokens = 3
    model.generation_config.save_pretrained(tmp_path)
    again = AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert again.model.language_model.norm.variance_epsilon == 0.25
    assert again.generation_config.max_new_tokens == 3


def test_read__every_reader_is_told(tmp_path):
    saved(tmp_path)
    AutoConfig.from_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", lambda c: c["text_config"].update(hidden_act="relu"))
    for read in (AutoConfig.from_pretrained, PreTrainedConfig.get_config_dict):
        with pytest.raises(CheckpointError, match="differs from what was saved"):
            read(tmp_path)


def test_config_of_others__is_none_of_our_business(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_vl", "extra": {"hashes": 3}}')
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", lambda c: c.update(image_token_id=7))
    assert AutoConfig.from_pretrained(tmp_path).image_token_id == 7


FIRST = """
import sys, mmqc
assert "transformers" not in sys.modules
from transformers import AutoModelForImageTextToText
assert "transformers.modeling_utils" not in sys.modules  # the config is read before the quantizer is there
try:
    AutoModelForImageTextToText.from_pretrained(sys.argv[1])
except mmqc.MmqcError as error:
    sys.exit(f"told: {error}")
"""
LATE = """
import sys
from transformers import AutoConfig, AutoModelForImageTextToText
config = AutoConfig.from_pretrained(sys.argv[1])
import mmqc
try:
    AutoModelForImageTextToText.from_pretrained(sys.argv[1], config=config)
except mmqc.MmqcError as error:
    sys.exit(f"told: {error}")
"""


def by_itself(*words):
    return subprocess.run([sys.executable, *words], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("run", "code", "change"),
    [
        pytest.param(
            by_itself, FIRST, lambda c: c.update(quantization_confih=c.pop("quantization_config")), marks=pytest.mark.slow
        ),
        (forked.run, LATE, lambda c: c["text_config"].update(rms_norm_eps=0.25)),
    ],
    ids=["first load of a process", "mmqc imported after the config was read"],
)
def test_first_load__is_checked_too(tmp_path, run, code, change):
    saved(tmp_path)
    edit_json(tmp_path / "config.json", change)
    done = run("-c", code, str(tmp_path))
    assert "told: " in done.stderr, done.stderr
    assert "config.json is damaged" in done.stderr
