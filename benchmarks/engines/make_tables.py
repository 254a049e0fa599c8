"""Write mmqc/engines/tables/vllm-X.Y.json from vLLM X.Y's own Python: what it does with every form of a linear, on three GPUs.

    python -m benchmarks.engines.make_tables .venv-vllm-0.33.0/bin/python [.venv-vllm-0.32.0/bin/python ...]

The Pythons are those of ``make vllm``.  A form is asked at a width that suits every kernel, and, if it is taken there, at all 81
pairs of classes of widths (engines/form.py).  tests/engines_tests/test_real_vllm.py asks
the same engine at other widths and expects the table's answers.
"""

from __future__ import annotations

import json
import string
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from mmqc.engines import form
from mmqc.engines.table import ask

FOLDER = Path(__file__).parents[2] / "mmqc" / "engines" / "tables"
CAPABILITIES = (80, 89, 90)
BACKENDS = ("auto", "humming")
LETTERS = string.ascii_uppercase + string.ascii_lowercase + string.digits
MODELS = (
    "AriaForConditionalGeneration",
    "AyaVisionForConditionalGeneration",
    "Cohere2VisionForConditionalGeneration",
    "Gemma3ForConditionalGeneration",
    "Glm4vForConditionalGeneration",
    "Idefics3ForConditionalGeneration",
    "InternVLForConditionalGeneration",
    "LlamaForCausalLM",
    "LlavaForConditionalGeneration",
    "LlavaNextForConditionalGeneration",
    "LlavaOnevisionForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "MistralForCausalLM",
    "Ovis2ForConditionalGeneration",
    "PaliGemmaForConditionalGeneration",
    "Qwen2ForCausalLM",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "SmolVLMForConditionalGeneration",
)
INPUTS: tuple[dict[str, Any] | None, ...] = (
    None,
    {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False, "symmetric": True},
    {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False, "symmetric": False},
    {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True},
    {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": False},
    {"num_bits": 4, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True},
    {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True},
    {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True},
    {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, "dynamic": True, "symmetric": True},
)


def weights() -> Iterator[tuple[dict[str, Any], tuple[str, ...]]]:
    """Weights and the formats in which they may lie."""
    for bits, group, symmetric in product((2, 3, 4, 8), (None, 0, 32, 64, 128), (True, False)):
        strategy = {None: "tensor", 0: "channel"}.get(group, "group")
        base = {"num_bits": bits, "type": "int", "dynamic": False, "symmetric": symmetric, "strategy": strategy}
        yield base | ({"group_size": group} if group else {}), ("pack-quantized", "int-quantized")
    for strategy in ("tensor", "channel"):
        base = {"num_bits": 8, "type": "float", "dynamic": False, "symmetric": True, "strategy": strategy}
        yield base, ("float-quantized", "naive-quantized")
    block = {
        "num_bits": 8,
        "type": "float",
        "dynamic": False,
        "symmetric": True,
        "strategy": "block",
        "block_structure": [128, 128],
    }
    yield block, ("float-quantized",)


def forms() -> dict[str, dict[str, Any]]:
    """The config that says each form."""
    found: dict[str, dict[str, Any]] = {}
    for (weight, formats), inputs in product(weights(), INPUTS):
        for stored in formats:
            group = {"targets": ["Linear"], "weights": weight, "input_activations": inputs, "format": stored}
            config = {"quant_method": "compressed-tensors", "format": stored, "ignore": [], "config_groups": {"group_0": group}}
            found[form.of_group(group)] = config
    ordered = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True, "actorder": "group"}
    group = {"targets": ["Linear"], "weights": ordered, "input_activations": None, "format": "pack-quantized"}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": [], "config_groups": {"group_0": group}}
    found[form.of_group(group)] = config
    for bits, size, zero in product((4, 8), (32, 64, 128, -1), (True, False)):
        awq = {"quant_method": "awq", "bits": bits, "group_size": size, "zero_point": zero, "version": "gemm"}
        found[form.of_config(awq)] = awq
    for bits, size, symmetric, act in product((2, 3, 4, 8), (32, 64, 128, -1), (True, False), (True, False)):
        gptq = {"quant_method": "gptq", "bits": bits, "group_size": size, "sym": symmetric, "desc_act": act}
        found[form.of_config(gptq)] = gptq
    return found


def width(place: int) -> int:
    """A width of this class that no larger power of two divides, between 1,024 and 2,048 channels, and so about as a model's."""
    return (1024 // (1 << place) | 1) << place if place < len(form.CLASSES) - 1 else 5 * form.LARGEST


class Maps:
    """Answers by classes of widths: each answer a letter, each table of 9 rows by inputs once."""

    def __init__(self) -> None:
        self.letters: dict[str, str] = {}
        self.maps: dict[tuple[str, ...], int] = {}

    def letter(self, given: dict[str, str]) -> str:
        """Of an answer."""
        key = json.dumps(given, sort_keys=True)
        return self.letters.setdefault(key, LETTERS[len(self.letters)])

    def number(self, rows: tuple[str, ...]) -> int:
        """Of a table."""
        return self.maps.setdefault(rows, len(self.maps))


def answers(python: str, capability: int, backend: str, maps: Maps) -> list[int]:
    """Number of the map of each form, in their order."""
    configs, places = forms(), range(len(form.CLASSES))
    asked = {"capability": capability, "backend": backend}
    suits = [{"config": config, "inputs": 2048, "outputs": 2048} for config in configs.values()]
    first = dict(zip(configs, ask(python, asked | {"questions": suits})["answers"], strict=True))
    taken = [name for name, given in first.items() if "refused" not in given]
    pairs = [(width(k), width(n)) for k, n in product(places, places)]
    questions = [{"config": configs[name], "inputs": k, "outputs": n} for name in taken for k, n in pairs]
    given = iter(ask(python, asked | {"questions": questions})["answers"])
    found = []
    for name in configs:
        if name in taken:
            rows = tuple("".join(maps.letter(_general(next(given))) for _ in places) for _ in places)
        else:
            rows = (maps.letter(_general(first[name])) * len(places),) * len(places)
        found.append(maps.number(rows))
    return found


# What an engine's words say, whatever widths and names are in them.
SAYS = {
    "No compressed-tensors compatible scheme": "No compressed-tensors compatible scheme",
    "Failed to find a kernel": "Failed to find a kernel",
    "not divisible by group_size": "the group size does not divide the input channels",
    "input size is not aligned": "the group size does not divide the input channels",
    "output size is not aligned": "the output channels do not fill whole words of codes",
    "requires group quantization": "takes groups alone",
    "kernels require group quantization with group size 128": "takes groups of 128 alone",
    "actorder": "groups in the order of activations",
    "activation ordering": "groups in the order of activations",
}


def _general(given: dict[str, str]) -> dict[str, str]:
    """An answer without the widths and names of the question."""
    if "refused" not in given:
        return given
    text = given["refused"]
    said = next((said for words, said in SAYS.items() if words in text), None)
    kind, _, message = text.partition(": ")
    return {"refused": said or (f"{kind}: {message.split('. ')[0][:90]}" if message else f"{kind} without words")}


def written(table: dict[str, Any]) -> str:
    """JSON with one line for each entry of each part."""
    parts = []
    for name, part in table.items():
        if isinstance(part, dict):
            lines = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v, sort_keys=True)}" for k, v in sorted(part.items()))
            parts.append(f" {json.dumps(name)}: {{\n{lines}\n }}")
        elif isinstance(part, list):
            lines = ",\n".join(f"  {json.dumps(v)}" for v in part)
            parts.append(f" {json.dumps(name)}: [\n{lines}\n ]")
        else:
            parts.append(f" {json.dumps(name)}: {json.dumps(part)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main(pythons: list[str]) -> None:
    """A table for each."""
    for python in pythons:
        maps, models = Maps(), ask(python, {"models": MODELS})
        made = {f"{c} {b}": answers(python, c, b, maps) for c, b in product(CAPABILITIES, BACKENDS)}
        version = models["version"]
        table = {
            "engine": "vllm",
            "version": version,
            "letters": {letter: json.loads(key) for key, letter in maps.letters.items()},
            "maps": [list(rows) for rows in maps.maps],
            "forms": list(forms()),
            "answers": made,
            "models": models["models"],
        }
        path = FOLDER / f"vllm-{'.'.join(version.split('.')[:2])}.json"
        path.write_text(written(table))
        print(f"{path.name}: {len(forms())} forms, {len(maps.maps)} maps, {len(maps.letters)} answers")


if __name__ == "__main__":
    main(sys.argv[1:])
