"""Block by block gives what the whole model's forwards give, for models that are built in every which way."""

from pathlib import Path
from typing import Any

import pytest
import torch
from blocks import Attention, Branch, Mlp, RMSNorm, Text, ids, shared
from models import randomise, tiny_qwen2_vl
from often import often
from small_vlm import Small, batches, logits, quantize
from streams import Between, Masked
from tiny_families import FAMILIES
from torch import Tensor, nn

import mmqc
import mmqc.quantization.units
from mmqc import recipes
from mmqc.calibration.blocks import block_lists, survey
from mmqc.nn.linear import QuantLinear
from mmqc.quantization.units import NOT_PAIRED
from mmqc.report.report import Refusal

GPTQ = recipes.mquant(4, rotate=False)


def whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """No list of blocks is taken apart."""

    def none(model: nn.Module, linears: Any, calls: Any, refused: Any) -> Any:
        return survey(model, linears, calls, dict.fromkeys(block_lists(model, linears), "for comparison"))

    monkeypatch.setattr(mmqc.quantization.units, "survey", none)


def equal(a: nn.Module, b: nn.Module) -> bool:
    one, two = a.state_dict(), b.state_dict()
    return one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)


def text_batches() -> list[dict[str, Tensor]]:
    return [ids(6, 0), ids(6, 1), ids(9, 2)]


MODELS: dict[str, Any] = {
    "two towers": lambda: (Small(), batches()),
    "shared block": lambda: (shared(), text_batches()),
    "changed between": lambda: (Between("outside"), text_batches()),
    "changed in place": lambda: (Between("in place"), text_batches()),
    "masks": lambda: (Masked(), text_batches()),
}


@pytest.mark.parametrize("name", MODELS)
def test_float__equals_forwards_of_the_whole_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for streamed in (True, False):
        torch.manual_seed(0)
        model, data = MODELS[name]()
        model = randomise(model).eval()
        if not streamed:
            whole(monkeypatch)
        results.append((model, quantize(model, recipes.mquant(4, rotate=False), data)))
    (streamed, report), (plain, expected) = results
    assert equal(streamed, plain)
    assert report.config == expected.config
    assert [layer.ranges for layer in report.layers] == [layer.ranges for layer in expected.layers]
    assert [layer.sqnr for layer in report.layers] == [layer.sqnr for layer in expected.layers]
    refused = [r.reason for r in report.refused if "whole model" in r.reason]
    reason = "calibrated by forwards of the whole model: its blocks are called more than once in one forward"
    assert refused == ([reason] if name == "shared block" else [])


@pytest.mark.parametrize("name", often(sorted(FAMILIES), "internvl", "mixtral"))
def test_float__equals_the_whole_model_for_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    models = []
    reasons = []
    for streamed in (True, False):
        model, batch = FAMILIES[name]()
        if not streamed:
            whole(monkeypatch)
        config = recipes.rtn(8, 8)
        report = mmqc.quantize_(model, config, [batch], progress=False)
        models.append(model)
        reasons.append([str(r) for r in report.refused if "whole model" in r.reason])
    assert equal(*models)
    assert reasons[0] == []
    assert reasons[1] != []


def test_survey__forwards_stop_behind_the_last_block_that_meets_new_arguments() -> None:
    model = randomise(Between("none")).eval()
    data = text_batches()
    quantize(model, recipes.rtn(8, 8).replace(keep=("body.head",)), data)
    whole_forwards = 2 + 2 + 2  # recorded and surveyed, two batches each; the rewrites change nothing here
    assert model.calls[0] <= whole_forwards
    assert model.calls[2] <= whole_forwards


def test_quantized_inputs__are_what_the_quantized_model_sees() -> None:
    model, batch = tiny_qwen2_vl()
    _, other = tiny_qwen2_vl(grids=((1, 8, 8),))
    plain, _ = tiny_qwen2_vl()
    mmqc.quantize_(plain, recipes.rtn(4, 8), [batch, other], progress=False)
    report = mmqc.quantize_(model, recipes.rtn(4, 8), [batch, other], progress=False, inputs="quantized")
    assert not equal(model, plain)
    linears = {n: m for n, m in model.named_modules() if isinstance(m, QuantLinear)}
    first = [n for n in linears if n.endswith((".q_proj", ".qkv", "gate_proj.unused", "mlp.0"))]
    seen: dict[str, list[Tensor]] = {n: [] for n in first}
    handles = [linears[n].register_forward_pre_hook(lambda m, a, n=n: seen[n].append(a[0].detach().clone())) for n in first]
    with torch.no_grad():
        for data in (batch, other):
            model(**data, use_cache=False)
    for handle in handles:
        handle.remove()
    ranges = {layer.fqn: layer.ranges for layer in report.layers}
    assert len(first) == 5
    for name in first:
        low, high = (min(r[0] for r in ranges[name].values()), max(r[1] for r in ranges[name].values()))
        assert (low, high) == (min(float(x.min()) for x in seen[name]), max(float(x.max()) for x in seen[name]))


def inputs_of(model: nn.Module, names: list[str], data: Any) -> dict[str, Tensor]:
    """What these linears are fed, rows of all batches under each other."""
    seen: dict[str, list[Tensor]] = {n: [] for n in names}
    handles = [
        model.get_submodule(n).register_forward_pre_hook(lambda m, a, n=n: seen[n].append(a[0].detach().flatten(0, -2).double()))
        for n in names
    ]
    with torch.no_grad():
        for batch in data:
            model(**batch, use_cache=False)
    for handle in handles:
        handle.remove()
    return {n: torch.cat(parts) for n, parts in seen.items()}


def test_asymmetric_inputs__are_compared_with_the_floating_point_models(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = tiny_qwen2_vl()
    plain, _ = tiny_qwen2_vl()
    _, other = tiny_qwen2_vl(grids=((1, 8, 8),))
    given: dict[int, tuple[Tensor, Tensor]] = {}
    real = mmqc.quantization.units.toward_float

    def watched(weight: Tensor, hessian: Tensor, drift: Tensor, name: str) -> Tensor:
        given[float(weight.double().sum())] = (hessian.clone(), drift.clone())
        return real(weight, hessian, drift, name=name)

    monkeypatch.setattr(mmqc.quantization.units, "toward_float", watched)
    weights = {n: float(m.weight.detach().double().sum()) for n, m in plain.named_modules() if isinstance(m, nn.Linear)}
    report = mmqc.quantize_(model, recipes.rtn(2, 8), [batch, other], progress=False, inputs="asymmetric")
    blocks = [n for n, m in model.named_modules() if isinstance(m, QuantLinear) and n.endswith((".q_proj", ".qkv", "merger.mlp.0"))]
    assert len(blocks) == 5
    x, y = (inputs_of(m, blocks, (batch, other)) for m in (plain, model))
    drifts = []
    for name in blocks:
        h, d = given[weights[name]]
        moment, drift = y[name].T @ y[name], (x[name] - y[name]).T @ y[name]
        assert float((h - moment).norm() / moment.norm()) < 1e-5
        assert float((d - drift).norm() / moment.norm()) < 1e-5
        drifts.append(float(d.abs().max()))
    assert drifts[0] == 0, "nothing is quantized in front of the first block"
    assert min(drifts[1:]) > 1e-2, "the merger, in no block, is behind a quantized tower"
    assert not [layer.fqn for layer in report.layers if NOT_PAIRED in layer.note]


def test_asymmetric_inputs__lists_that_are_not_taken_apart_go_without(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Small()
    whole(monkeypatch)
    report = quantize(model, recipes.gptq(4), inputs="asymmetric")
    unpaired = {layer.fqn for layer in report.layers if NOT_PAIRED in layer.note}
    assert unpaired == {layer.fqn for layer in report.layers if ".blocks." in layer.fqn}
    assert 0 < len(unpaired) < len(report.layers)


def test_asymmetric_inputs__bring_the_outputs_nearer_to_the_floating_point_models() -> None:
    lost = {}
    for inputs in ("quantized", "asymmetric"):
        torch.manual_seed(0)
        model = Small()
        expected = [logits(model, batch) for batch in batches(16)]
        quantize(model, recipes.gptq(3, 8), batches(16), inputs=inputs)
        lost[inputs] = sum(float((logits(model, b) - e).square().sum()) for b, e in zip(batches(16), expected, strict=True))
    assert lost["asymmetric"] < lost["quantized"]


@pytest.mark.parametrize("name", often(sorted(FAMILIES), "qwen2_vl", "mixtral"))
def test_asymmetric_inputs__bring_transformers_models_nearer_to_floating_point(name: str) -> None:
    lost = {}
    for inputs in ("quantized", "asymmetric"):
        model, batch = FAMILIES[name]()
        expected = logits(model, batch)
        mmqc.quantize_(model, recipes.gptq(4), [batch], progress=False, inputs=inputs)
        lost[inputs] = float((logits(model, batch) - expected).norm())
    assert lost["asymmetric"] < lost["quantized"]


@pytest.mark.parametrize("inputs", ["float", "asymmetric"])
def test_spool__in_files_gives_the_same_and_leaves_nothing(inputs: Any, tmp_path: Path) -> None:
    model, other = Small(), Small()
    quantize(model, GPTQ, inputs=inputs)
    quantize(other, GPTQ, spool=str(tmp_path / "activations"), inputs=inputs)
    assert equal(model, other)
    assert list((tmp_path / "activations").iterdir()) == []


def test_modality_weights__change_the_codes_of_the_language_model_only() -> None:
    model, other = Small(), Small()
    quantize(model, GPTQ)
    quantize(other, GPTQ, modality_weights={"visual": 100.0, "text": 0.01})
    differing = {
        n
        for n, m in model.named_modules()
        if isinstance(m, QuantLinear) and not torch.equal(m.qweight, other.get_submodule(n).qweight)  # type: ignore[arg-type]
    }
    assert differing
    assert all(".text." in name for name in differing)


def test_blocks__that_another_batch_calls_differently_are_calibrated_as_a_whole() -> None:
    class Moody(Text):
        def forward(self, input_ids: Tensor) -> Tensor:
            x = self.embed(input_ids)
            for block in self.blocks:
                x = block(x=x) if bool((input_ids == 7).all()) else block(x)
            return self.head(self.norm(x))

    torch.manual_seed(0)
    model = randomise(Moody(Branch(RMSNorm(), Attention()), Branch(RMSNorm(), Mlp()))).eval()
    data = [ids(6, 0), ids(9, 1), {"input_ids": torch.full((2, 6), 7)}]
    report = quantize(model, recipes.rtn(8, 8), data)
    found = [r for r in report.refused if "whole model" in r.reason]
    assert [r.fqn for r in found] == ["blocks"]
    assert "batch 2 calls blocks.0 with other arguments" in found[0].reason
    assert isinstance(found[0], Refusal)
    assert len(report.layers) == 6


@pytest.mark.parametrize("inputs", ["float", "quantized", "asymmetric"])
def test_blocks__refused_in_the_middle_of_a_run(inputs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Moody(nn.Module):
        """Hands the stream over by name if the batch says so."""

        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: Tensor, by_name: bool = False) -> Tensor:
            return self.block(x)

    model, data = Small(), batches(4)
    text = model.model.text
    text.blocks = nn.ModuleList(Moody(b) for b in text.blocks)
    forward = model.forward

    def moody(input_ids: Tensor, pixel_values: Tensor, use_cache: bool = True) -> Tensor:
        changed = bool((input_ids[:, 0] == 3).all())
        handle = text.blocks[0].register_forward_pre_hook(
            lambda m, a, k: (a, {"by_name": True} if changed else {}), with_kwargs=True, prepend=True
        )
        try:
            return forward(input_ids, pixel_values)
        finally:
            handle.remove()

    monkeypatch.setattr(model, "forward", moody)
    data[3] = {**data[3], "input_ids": data[3]["input_ids"].clone()}
    data[3]["input_ids"][:, 0] = 3
    report = quantize(model, recipes.rtn(8, 8), data, inputs=inputs)
    assert [r.fqn for r in report.refused if "whole model" in r.reason] == ["model.text.blocks"]
    assert {x.fqn for x in report.layers} == {n for n, m in model.named_modules() if isinstance(m, QuantLinear)}
    assert {x.tower for x in report.layers} == {"vision", "projector", "language"}
