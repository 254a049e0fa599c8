"""A head that was tied to the embedding and no longer is: what the model computes, and what its checkpoint says."""

import json

import pytest
import torch
import transformers
from models import randomise, tiny_qwen2_vl
from tolerance import assert_close

import mmqc
from mmqc import recipes
from mmqc.checkpoint.hf import attach_config
from mmqc.checkpoint.save import FormatError, save_pretrained
from mmqc.checkpoint.skeleton.untie import computes_by_flag, untie

SIZES = {"vocab_size": 512, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 4}
FAMILIES = ["t5", "mt5", "umt5", "longt5", "switch_transformers"]


def tiny(kind):
    """An encoder and a decoder whose embeddings are the head."""
    options = {"tie_word_embeddings": True} if kind == "switch_transformers" else {}
    config = transformers.AutoConfig.for_model(kind, **SIZES, **options)
    torch.manual_seed(0)
    model = randomise(transformers.AutoModelForSeq2SeqLM.from_config(config).float().eval())
    model.generation_config.pad_token_id = model.generation_config.decoder_start_token_id = 0
    ids = torch.randint(2, 512, (1, 9), generator=torch.Generator().manual_seed(0))
    return model, {"input_ids": ids, "decoder_input_ids": ids[:, :4]}


@torch.no_grad()
def logits(model, inputs):
    return model(**inputs, use_cache=False).logits


@pytest.mark.parametrize("kind", FAMILIES)
def test_untie__changes_nothing_that_is_computed(tmp_path, kind):
    model, inputs = tiny(kind)
    model.lm_head.weight = torch.nn.Parameter(3 * model.lm_head.weight.detach())
    want = logits(model, inputs)
    quantization = attach_config(model, recipes.rtn(8), {"passes": []})
    assert quantization is not None
    assert quantization.untied
    assert torch.equal(logits(model, inputs), want)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert torch.equal(logits(again, inputs), want)
    again.tie_weights()  # as a resize of the embeddings does
    assert torch.equal(logits(again, inputs), want)


@pytest.mark.parametrize("kind", FAMILIES)
def test_quantize__with_a_head_of_few_bits(tmp_path, kind):
    model, inputs = tiny(kind)
    want = logits(model, inputs)
    mmqc.quantize_(model, recipes.rtn(8, head_bits=8), progress=False)
    assert torch.linalg.norm(logits(model, inputs) - want) < 0.05 * torch.linalg.norm(want)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(type(model).from_pretrained(tmp_path), inputs), logits(model, inputs))


def test_flag__is_false_only_where_nothing_is_computed_by_it(tmp_path):
    models = {kind: tiny(kind)[0] for kind in FAMILIES} | {"qwen2_vl": tiny_qwen2_vl(tied=True)[0]}
    assert {kind for kind, model in models.items() if not computes_by_flag(model)} == {"qwen2_vl"}
    for kind, model in models.items():
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        assert untie(model)
        assert not untie(model)
        model.config.save_pretrained(tmp_path)
        assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is (kind != "qwen2_vl")


def test_other_formats__refuse_what_config_json_cannot_say(tmp_path):
    model, _ = tiny("umt5")
    model.lm_head.weight = torch.nn.Parameter(2 * model.lm_head.weight.detach())
    mmqc.quantize_(model, recipes.rtn(8), progress=False)
    with pytest.raises(FormatError, match=r"its head is untied, and UMT5ForConditionalGeneration computes by tie_word_embeddings"):
        save_pretrained(model, tmp_path, format="compressed-tensors")


@pytest.mark.parametrize("kind", ["t5", "umt5"])
def test_rotate__leaves_the_logits_as_they_were(kind):
    model, inputs = tiny(kind)
    want = logits(model, inputs)
    mmqc.quantize_(model, recipes.rotate(), [inputs], progress=False)
    assert model.config.quantization_config.untied
    assert_close(logits(model, inputs), want)
