"""Packages with a quantized KV cache: prefill packs what mmqc's own cache packs, decode reads it, text stays the caller's."""

import functools
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from cpp_program import build, saved
from models import tiny_qwen2_vl
from other_batches import other_batches
from tolerance import assert_close
from torch import Tensor, nn

import mmqc
from mmqc.aot.packed_programs import COUNT, PackedSteps, steps_of
from mmqc.aot.programs import StepError
from mmqc.aot.sensitivity import relative_error
from mmqc.aot.step_batches import Steps
from mmqc.kv.cache import QuantizedCache

SPECS = {
    "1 bit": mmqc.KVSpec(1, shrink_keys=0.6, shrink_values=0.6, tau=((1, 0), (0, 2))),
    "by layer": mmqc.KVSpec(2, layer_bits=(1, 2), shrink_keys=0.6, tau=((1, 1),)),
    "by token": mmqc.KVSpec(4, values="token"),
    "one range": mmqc.KVSpec(8, keys="tensor", values="tensor"),
}


@functools.cache
def packed(name: str) -> tuple[PackedSteps, dict[str, Tensor]]:
    model, batch = tiny_qwen2_vl()
    mmqc.quantize_(model, mmqc.QuantConfig(kv=SPECS[name]), progress=False)
    with torch.no_grad():
        split = steps_of(model, batch)
    assert isinstance(split, PackedSteps)
    return split, batch


@pytest.mark.parametrize("name", SPECS)
@torch.no_grad()
def test_programs__equal_the_model_with_its_quantized_cache(name: str) -> None:
    split, batch = packed(name)
    for case in (batch, *other_batches(batch)):
        for a, b in zip(split.run(split.modules(), case), split.expected(case), strict=True):
            assert_close(a, b)


@torch.no_grad()
def test_programs__hold_what_the_cache_holds_and_less_than_a_plain_one() -> None:
    split, batch = packed("1 bit")
    cache = QuantizedCache(split.model)
    split.model(**batch, past_key_values=cache, use_cache=True)
    inputs = split.batches(batch)["decode"]
    words = sum(v.numel() * v.element_size() for n, v in inputs.items() if n.startswith(("k_words", "v_words")))
    length = batch["input_ids"].shape[1]
    assert words * 16 <= sum(2 * h * d * 4 * (length + 15) for h, d in (*split.cache.keys, *split.cache.values))
    for i, layer in enumerate(cache.packed):
        segment = layer.segments[0]
        assert torch.equal(inputs[COUNT], segment.count)
        assert torch.equal(inputs[f"k_words_{i}"][:, :, : segment.k_words.shape[2]], segment.k_words)
        assert torch.equal(inputs[f"v_scale_{i}"], segment.v_scale)


@torch.no_grad()
def test_programs__one_bit_is_not_the_plain_cache() -> None:
    split, batch = packed("1 bit")
    plain = Steps(split.model, split.seam, split.cache)
    first, *later = zip(split.run(split.modules(), batch), plain.run(plain.modules(), batch), strict=True)
    assert_close(*first)
    assert all(relative_error(a, b) > 1e-2 for a, b in later)


@torch.no_grad()
def test_programs__text_that_does_not_fit_is_an_error() -> None:
    split, batch = packed("by layer")
    text = int((batch["input_ids"] != split.model.config.image_token_id).sum(1).max())
    inputs = split.batches(batch)["prefill"]

    def with_room(room: int) -> dict[str, Tensor]:
        return {n: v[:, :, :room].contiguous() if n.startswith(("key_", "value_")) else v for n, v in inputs.items()}

    split.modules()["prefill"](**with_room(text + 1))
    with pytest.raises(RuntimeError, match="the cache is shorter than the text"):
        split.modules()["prefill"](**with_room(text))


def test_programs__sliding_windows_are_refused() -> None:
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=4,
    )
    config.layer_types = ["sliding_attention", "full_attention"]
    model = MistralForCausalLM(config).eval()
    with pytest.raises(StepError, match=r"full attention in every layer, this one has .'full_attention', 'sliding"):
        PackedSteps(model, None, None, None, SPECS["by layer"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spec", "why"),
    [(mmqc.KVSpec(2, text_bits=8), "text in the model's precision"), (mmqc.KVSpec(1, rounding="queries"), "nearest code")],
)
def test_programs__what_a_package_does_not_store_is_refused(spec: mmqc.KVSpec, why: str) -> None:
    with pytest.raises(StepError, match=why):
        PackedSteps(tiny_qwen2_vl()[0], None, None, None, spec)  # type: ignore[arg-type]


# --- packages ---------------------------------------------------------------------------------------------------------


def answer_of(model: nn.Module, batch: dict[str, Tensor], longest: int) -> list[int]:
    generate: Any = model.generate
    ids = generate(**batch, max_new_tokens=longest, do_sample=False, eos_token_id=None, pad_token_id=0)
    return ids[0, batch["input_ids"].shape[1] :].tolist()


@pytest.mark.slow
def test_package__the_cpp_program_answers_as_generate_does(tmp_path: Path) -> None:
    split, batch = packed("1 bit")
    package = mmqc.export(split.model, batch, tmp_path / "model.pt2", programs=["vision", "prefill", "decode"])
    runner = build(tmp_path)
    for number, case in enumerate((batch, *other_batches(batch))):
        if len(case["input_ids"]) > 1:
            continue
        done = subprocess.run(
            [str(runner), str(package), str(saved(case, tmp_path / f"{number}.safetensors")), "8", "-1"],
            check=True,
            capture_output=True,
            text=True,
        )
        assert [int(t) for t in done.stdout.split()] == answer_of(split.model, case, 8)
