"""Quantize the exported model with LLM Compressor, and write what it answers; runs in an environment of its own, without mmqc.

    python run_llmcompressor.py FOLDER METHOD BITS GROUP sym|asym OUT        METHOD: rtn, gptq, awq, awq+gptq, autoround

FOLDER holds model/, calibration.pt and questions.pt, as ``compare.py`` writes them.  The modifiers are as their authors ship
them, but for what a machine without an accelerator cannot do: AWQ pins no memory, AutoRound compiles nothing.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from answers import answers, scores
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.pipelines.cache import IntermediatesCache
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast, Qwen2VLForConditionalGeneration

IGNORED = ["lm_head", "re:.*visual.*"]


def modifiers(method: str, bits: int, group: int, symmetric: bool) -> list[Any]:
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, **strategy}
    scheme = {"ignore": IGNORED, "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}
    if method == "autoround":
        from llmcompressor.modifiers.autoround import AutoRoundModifier

        return [AutoRoundModifier(iters=200, enable_torch_compile=False, **scheme)]
    rounding = GPTQModifier(**scheme) if method.endswith("gptq") else QuantizationModifier(**scheme)
    return [AWQModifier(), rounding] if method.startswith("awq") else [rounding]


def in_float32() -> None:
    """AutoRound's automatic precision would leave parts of a float32 model in bfloat16."""
    import llmcompressor.modifiers.autoround.base as base

    made = base.AutoRound
    base.AutoRound = lambda *args, **kwargs: made(*args, **{**kwargs, "amp": False})


def main() -> None:
    folder, method, bits, group, symmetry, out = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    IntermediatesCache.pin_memory = lambda self, *args, **kwargs: None
    if method == "autoround":
        in_float32()
    model = Qwen2VLForConditionalGeneration.from_pretrained(f"{folder}/model", dtype=torch.float32)
    batches = torch.load(f"{folder}/calibration.pt", weights_only=True)
    oneshot(
        model=model,
        processor=PreTrainedTokenizerFast(tokenizer_file=f"{folder}/tokenizer.json"),
        recipe=modifiers(method, int(bits), int(group), symmetry == "sym"),
        dataset=DataLoader(batches, batch_size=None),
        num_calibration_samples=len(batches),
        max_seq_length=4096,
        shuffle_calibration_samples=False,
        pipeline="datafree" if method == "rtn" else "independent",  # GPTQ has to see inputs behind AWQ's factors
    )
    questions = torch.load(f"{folder}/questions.pt", weights_only=True)
    found = answers(model.eval(), questions["batches"])
    Path(out).write_text(json.dumps(scores(found, questions["exact"], questions["ids"])))


if __name__ == "__main__":
    main()
