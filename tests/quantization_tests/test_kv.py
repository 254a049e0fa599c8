"""The cache part: what has no kernel is named, and a search that fails leaves what was there before."""

from typing import Any

import pytest
import torch
from models import tiny_qwen2_vl

import mmqc
from mmqc.config import KVSpec
from mmqc.kv import calibrate
from mmqc.kv.cache import SPEC
from mmqc.nn.modality import attached
from mmqc.quantization import kv
from mmqc.recipes import calibquant, rtn


def test_unfused__names_what_has_no_kernel_and_why(monkeypatch) -> None:
    pytest.importorskip("triton")
    spec = KVSpec(1, rounding="queries", text_bits=8, text_block=32)
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    monkeypatch.setattr(kv.kernels, "install", lambda: False)
    assert all("no Triton kernels" in line for line in kv.unfused(spec, cuda, torch.bfloat16, 128))
    monkeypatch.setattr(kv.kernels, "install", lambda: True)
    assert list(kv.unfused(spec, cuda, torch.bfloat16, 128)) == []
    assert list(kv.unfused(KVSpec(1), cpu, torch.bfloat16, 128)) == []
    keys, text = kv.unfused(spec, cpu, torch.bfloat16, 128)
    assert "kv_round_keys" in keys
    assert "kv_token_attention" in text
    assert keys.endswith(": the model is on cpu")
    keys, text = kv.unfused(spec, cuda, torch.float64, 128)
    assert "not torch.float64" in keys
    assert "not torch.float64" in text
    (text,) = kv.unfused(KVSpec(1, rounding="queries", text_bits=4, text_block=2), cuda, torch.float16, 128)
    assert "at most 32 blocks, not 64" in text


@pytest.mark.parametrize("config", [calibquant(2), rtn(8) | calibquant(2)], ids=["cache", "weights and cache"])
def test_quantize_kv__a_failure_leaves_the_cache_of_an_earlier_call(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = tiny_qwen2_vl()
    mmqc.quantize_(model, calibquant(8), progress=False)
    context, spec, hooks = attached(model), getattr(model, SPEC), len(model._forward_hooks)
    assert context is not None

    def fail(*args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(calibrate, "divergences", fail)
    with pytest.raises(KeyboardInterrupt):
        mmqc.quantize_(model, config, [batch], progress=False)
    assert getattr(model, SPEC) is spec
    assert attached(model) is context
    assert len(model._forward_hooks) == hooks
    found = model.generate(**batch, max_new_tokens=2, do_sample=False, return_dict_in_generate=True).past_key_values
    assert found.spec == spec
