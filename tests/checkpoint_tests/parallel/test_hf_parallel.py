"""What is refused before ranks share a model; what they answer is in distributed_tests/test_many_ranks.py."""

from __future__ import annotations

import pytest
from models import tiny_qwen2_vl
from transformers.distributed import DistributedConfig

import mmqc
from mmqc import recipes
from mmqc.checkpoint.hf import MmqcQuantizer
from mmqc.checkpoint.parallel import hf_parallel
from mmqc.nn.split import SplitError


def shared(recipe=None, ranks=2, plan="auto"):
    """A model that so many ranks are about to share."""
    model, batch = tiny_qwen2_vl()
    if recipe is not None:
        mmqc.quantize_(model, recipe, [batch], progress=False)
    model.config.distributed_config = DistributedConfig(tp_size=ranks, tp_plan=plan)
    return model


def test_check__takes_what_can_be_shared():
    model = shared(recipes.mquant(4, solver="rtn"))
    hf_parallel.check(model)
    assert not hf_parallel.is_split(model)
    assert hf_parallel.split(model) == {}, "no mesh: transformers has not distributed it"


def test_check__heads_have_to_be_shared_evenly():
    with pytest.raises(SplitError, match="num_attention_heads = 6 cannot be shared evenly by 4 ranks"):
        hf_parallel.check(shared(ranks=4))


def test_check__a_float_linear_behind_an_online_hadamard():
    with pytest.raises(SplitError, match=r"layers.0.mlp.down_proj is a float linear behind an online Hadamard"):
        hf_parallel.check(shared(recipes.rotate()))


def test_check__a_plan_is_needed_and_its_styles_are_known():
    model = shared()
    model._tp_plan = {}
    with pytest.raises(SplitError, match="transformers has no plan by which ranks share a Qwen2VLForConditionalGeneration"):
        hf_parallel.check(model)
    plan = {"model.language_model.layers.*.mlp.up_proj": "packed_colwise"}
    with pytest.raises(SplitError, match=r"layers.0.mlp.up_proj: no quantized linear is cut as 'packed_colwise'"):
        hf_parallel.check(shared(recipes.rtn(8), plan=plan))


def test_quantizing_on_load__is_refused():
    with pytest.raises(SplitError, match="quantize it, save it, and load that with tp_plan"):
        MmqcQuantizer(recipes.rtn(8), pre_quantized=False)._process_model_before_weight_loading(shared())


def test_static_caches__have_room_for_keys_that_are_gathered():
    model = shared(plan={"model.language_model.layers.*.self_attn.k_proj": "colwise_gather_output"})
    model._tp_size = 2
    whole = model.config.get_text_config().num_key_value_heads
    _, width = model._get_static_cache_init_shape()  # the heads of a rank, where transformers does not know what is gathered
    hf_parallel._size_static_caches(model)
    assert model._get_static_cache_init_shape() == (whole, width)


def test_check__a_float_linear_behind_blocks_of_a_hadamard():
    hf_parallel.check(shared(recipes.rotate(tensor_parallel=2)))


def test_style__a_quantized_head_is_shared_unless_the_caller_has_a_plan():
    model = shared(recipes.rtn(8, head_bits=8))
    assert hf_parallel._style(model, "lm_head") == "colwise_gather_output"
    model.config.distributed_config = DistributedConfig(tp_size=2, tp_plan=dict(model.tp_plan))
    named = model.tp_plan.get("lm_head")  # by plans of newer versions
    assert hf_parallel._style(model, "lm_head") == named
    assert hf_parallel._style(shared(), "lm_head") == named, "a float head is transformers' affair"
