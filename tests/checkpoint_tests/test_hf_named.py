"""config.json names its method for programs that ask."""

import json
import subprocess
import sys

from mmqc.checkpoint.method_name import METHOD, REQUIRES, with_method

READ = """
import json, sys
import mmqc
from mmqc.checkpoint.hf_named import name_methods
from transformers.configuration_utils import PreTrainedConfig
name_methods(); name_methods()
found = [PreTrainedConfig.get_config_dict(folder)[0].get("quantization_config") for folder in sys.argv[1:]]
assert "transformers.modeling_utils" not in sys.modules
print(json.dumps(found))
"""


def test_method__is_named_when_a_config_of_ours_is_read(tmp_path):
    mine, other, none = ({"version": 1, "quant_method": None, "requires": REQUIRES}, {"quant_method": "awq"}, None)
    folders = []
    for i, settings in enumerate((mine, other, none)):
        folder = tmp_path / str(i)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", "quantization_config": settings}))
        folders.append(str(folder))
    done = subprocess.run([sys.executable, "-c", READ, *folders], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [{**mine, "quant_method": METHOD}, other, None]


def test_method__is_put_back_only_where_ours_is_meant():
    assert with_method({"requires": REQUIRES, "quant_method": None}) == {"requires": REQUIRES, "quant_method": METHOD}
    for other in (None, {}, {"quant_method": "gptq", "requires": REQUIRES}, {"requires": "another"}):
        assert with_method(other) is other
