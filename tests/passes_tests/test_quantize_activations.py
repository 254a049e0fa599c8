from typing import Any

import pytest
import torch
from blocks import IMAGE
from float64 import Float64, passed, replayed
from pass_cases import check_golden, check_once, program
from torch import Tensor
from torchao.quantization.granularity import PerGroup

from mmqc.config import ActivationSpec, QuantConfig, Scheme, WeightSpec
from mmqc.graph.linear import weight_of
from mmqc.graph.program import VISUAL, Program
from mmqc.ops.pack import unpack
from mmqc.passes.assign_scheme import AssignScheme
from mmqc.passes.quantize_activations import QuantizeActivations
from mmqc.passes.quantize_weights import QuantizeWeights
from mmqc.recipes import mquant, rtn


def ready(case: str = "vlm", config: QuantConfig | None = None, **forget: Any) -> Program:
    """Weights quantized, statistics as from calibration: text 0.02, visual 0.03."""
    item = AssignScheme(config if config is not None else rtn(8, 8))
    prog = passed(program(case, item), [item])
    nodes = [n for n in prog.nodes("linear") if "scheme" in n.meta]
    msq = any(s.activation and s.activation.per_modality for s in item.config.schemes.values())
    scales = {weight_of(n): [0.02, 0.03] if msq and n.meta["tower"] == "language" else [0.02] for n in nodes}
    prog.statistics = {"linears": {fqn: {"input_scale": forget.get("scale", s)} for fqn, s in scales.items()}}
    if case == "vlm":
        prog.visual = prog.inputs[0] == IMAGE
    return passed(prog, [QuantizeWeights()])


def quantized(x: Tensor, scale: float) -> Tensor:
    return torch.clamp(torch.round(x / torch.tensor(scale).double()), -128, 127).to(torch.int8)


def codes_of(prog: Program) -> dict[str, tuple[Tensor, Tensor]]:
    """(input, codes) of every quantize by the weight behind it."""
    seen: dict[Any, tuple[Tensor, Tensor]] = {}
    found = {}

    def watch(node: Any, result: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
        if node.target == torch.ops.mmqc.quantize.default:
            seen[node] = (args[0].clone(), result.clone())
        if node.target == torch.ops.mmqc.scaled_matmul.default:
            found[node.meta["fqn"]] = seen[node.args[0]]

    with Float64(), torch.no_grad():
        prog.replay(watch)
    return found


def test_quantize_activations__codes_are_the_references() -> None:
    prog = passed(ready(), [QuantizeActivations()])
    found = codes_of(prog)
    assert len(found) == 13
    assert not prog.nodes("weight_only_matmul")
    for x, codes in found.values():
        assert torch.equal(codes, quantized(x, 0.02))


def test_quantize_activations__per_modality_rows_have_their_own_scale() -> None:
    prog = passed(ready(config=mquant(8, solver="rtn", rotate=False)), [QuantizeActivations()])
    visual = prog.visual
    for fqn, (x, codes) in codes_of(prog).items():
        expected = quantized(x, 0.02)
        if fqn.startswith("text"):
            expected[visual] = quantized(x, 0.03)[visual]
        assert torch.equal(codes, expected)
    assert [n.target for n in prog.graph.nodes if n.op == "placeholder"][-1] == VISUAL


def test_quantize_activations__output_is_the_integer_products() -> None:
    prog = passed(ready("rms_gqa"), [QuantizeActivations()])
    shadow = ready("rms_gqa")
    for node in shadow.nodes("weight_only_matmul"):
        with shadow.graph.inserting_before(node):
            fake = shadow.graph.call_function(_fake_quantize, (node.args[0], 0.02))
        node.replace_input_with(node.args[0], fake)
    close = torch.finfo(torch.float32).eps * 10
    assert (replayed(prog) - replayed(shadow)).norm() / replayed(shadow).norm() < close


def _fake_quantize(x: Tensor, scale: float) -> Tensor:
    return quantized(x, scale).double() * torch.tensor(scale).double()


@pytest.mark.parametrize("amplifier", [None, 256])
def test_quantize_activations__group_scales(amplifier: int | None) -> None:
    spec = WeightSpec(4, PerGroup(8), amplifier=amplifier)
    ready_for = ready("rms_gqa", QuantConfig(language=Scheme(spec, ActivationSpec())))
    weights = {fqn: solved.dequantize() for fqn, solved in ready_for.solved.items()}
    prog = passed(ready_for, [QuantizeActivations()])
    nodes = prog.nodes("scaled_matmul")
    assert {n.meta["fqn"] for n in nodes} == weights.keys()
    for node in nodes:
        fqn, (group_scale, group) = node.meta["fqn"], node.args[8:]
        codes, scale = (prog.weights[node.args[i].target] for i in (1, 3))
        width = prog.weights[fqn].shape[1]
        if amplifier is not None:
            scale = scale[:, None] * prog.weights[group_scale.target]
        assert (group_scale is not None) == (amplifier is not None)
        wide = unpack(codes, width, 4) * scale.repeat_interleave(group, 1)
        assert torch.equal(wide, weights[fqn])
    assert torch.isfinite(replayed(prog)).all()


def test_quantize_activations__once() -> None:
    check_once(ready(), QuantizeActivations())


@pytest.mark.parametrize("msq", [False, True])
def test_quantize_activations__golden(msq: bool) -> None:
    config = mquant(8, solver="rtn", rotate=False, msq=msq)
    check_golden(ready(config=config), QuantizeActivations(), "vlm_msq" if msq else "vlm")


def test_quantize_activations__weight_only_has_no_site() -> None:
    config = QuantConfig(language=Scheme(WeightSpec(8)))
    prog = passed(ready("rms_gqa", config), [QuantizeActivations()])
    assert prog.records[-1].sites == prog.records[-1].misses == []


def test_quantize_activations__refuses_without_statistics() -> None:
    prog = passed(ready("rms_gqa", scale=None), [QuantizeActivations()])
    reason = "calibration saw no input of it, so it has no static scale"
    nodes = {n.name: n.meta["fqn"] for n in prog.nodes("weight_only_matmul")}
    assert {m.node: m.fqn for m in prog.records[-1].misses} == nodes
    assert {m.reason for m in prog.records[-1].misses} == {reason}


def test_quantize_activations__float8_codes_and_integers_where_calibration_saw_nothing() -> None:
    config = rtn(8, 8).with_float8()
    prog = passed(ready(config=config), [QuantizeActivations()])
    quantizations = [n for n in prog.graph.nodes if n.target == torch.ops.mmqc.quantize.default]
    assert quantizations
    assert all(n.args[4] == torch.float8_e4m3fn for n in quantizations)
    assert {solved.codes.dtype for solved in prog.solved.values()} == {torch.float8_e4m3fn}
    blind = ready(config=config, scale=None)
    assert {solved.codes.dtype for solved in blind.solved.values()} == {torch.int8}
