"""Round the exported model's weights with HQQ, optimum-quanto or torchao, which look at no data; write what it answers.

    python run_data_free.py FOLDER METHOD BITS GROUP asym OUT        METHOD: hqq, quanto, torchao

FOLDER holds model/ and questions.pt, as ``compare.py`` writes them.  Every library as its documentation has it: HQQ's solver for
zero points, quanto's default optimizer, torchao's integers by groups.  Zero points are theirs: HQQ and quanto have them at these
bits, torchao where asymmetry is asked for.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from answers import answers, scores
from torch import nn
from transformers import Qwen2VLForConditionalGeneration


def rounded_by_hqq(model: nn.Module, bits: int, group: int) -> None:
    from hqq.core.quantize import BaseQuantizeConfig, HQQBackend, HQQLinear

    HQQLinear.set_backend(HQQBackend.PYTORCH)
    how = BaseQuantizeConfig(nbits=bits, group_size=group)
    for name, linear in linears(model).items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, HQQLinear(linear, how, compute_dtype=torch.float32, device="cpu"))


def rounded_by_quanto(model: nn.Module, bits: int, group: int) -> None:
    from optimum.quanto import QLinear, freeze, qint2, qint4, quantize
    from optimum.quanto.tensor import qtype

    kind: qtype = {2: qint2, 4: qint4}[bits]
    quantize(model, weights=kind, include=list(linears(model)))
    for module in model.modules():
        if isinstance(module, QLinear):
            module.weight_group_size = group
    freeze(model)


def rounded_by_torchao(model: nn.Module, bits: int, group: int) -> None:
    from torchao.quantization import IntxWeightOnlyConfig, quantize_
    from torchao.quantization.granularity import PerGroup
    from torchao.quantization.quant_primitives import MappingType

    how = IntxWeightOnlyConfig(
        weight_dtype=getattr(torch, f"int{bits}"), granularity=PerGroup(group), mapping_type=MappingType.ASYMMETRIC
    )
    wanted = linears(model)
    quantize_(model, how, filter_fn=lambda module, name: name in wanted)


WAYS: dict[str, Callable[[nn.Module, int, int], None]] = {
    "hqq": rounded_by_hqq,
    "quanto": rounded_by_quanto,
    "torchao": rounded_by_torchao,
}


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Those of the language model."""
    found = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    return {name: m for name, m in found.items() if "visual" not in name and name != "lm_head"}


def check(linear: Any, width: int, bits: int, group: int, name: str) -> None:
    """Every group of the weight that it multiplies by has so many values, and groups differ."""
    with torch.no_grad():
        weight = (linear(torch.eye(width)) - linear(torch.zeros(1, width))).T[:8]
    groups = [row.round(decimals=5).unique() for part in weight.split(group, 1) for row in part]
    most = max(map(len, groups))
    assert most <= 2**bits, f"{name} has {most} values in a group"
    wider = [row.round(decimals=5).unique() for part in weight.split(2 * group, 1) for row in part]
    assert width <= group or max(map(len, wider)) > 2**bits, f"{name} has groups of more than {group}"


def main() -> None:
    folder, method, bits, group, symmetry, out = sys.argv[1:]
    assert symmetry == "asym", symmetry
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: Any = Qwen2VLForConditionalGeneration.from_pretrained(f"{folder}/model", dtype=torch.float32)
    shapes = {name: linear.in_features for name, linear in linears(model).items()}
    WAYS[method](model.eval(), int(bits), int(group))
    for name, width in shapes.items():
        check(model.get_submodule(name), width, int(bits), int(group), name)
    questions = torch.load(f"{folder}/questions.pt", weights_only=True)
    found = answers(model, questions["batches"])
    Path(out).write_text(json.dumps(scores(found, questions["exact"], questions["ids"])))


if __name__ == "__main__":
    main()
