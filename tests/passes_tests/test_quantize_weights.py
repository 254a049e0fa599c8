import pytest
import torch
from float64 import passed, relative_error, replayed
from pass_cases import CASES, check_golden, check_once, program
from rounding import nearest
from torch import Tensor
from torchao.quantization.granularity import PerGroup

from mmqc.config import ActivationSpec, QuantConfig, Scheme, WeightSpec
from mmqc.graph.program import Program
from mmqc.ops.pack import unpack
from mmqc.passes.assign_scheme import AssignScheme
from mmqc.passes.quantize_weights import QuantizeWeights
from mmqc.passes.suppress_magnitude import SuppressMagnitude
from mmqc.solvers import Quantized


def assigned(case: str, bits: int = 8, group: int = 0, suppress: bool = False) -> Program:
    weight = WeightSpec(bits, PerGroup(group)) if group else WeightSpec(bits)
    item = AssignScheme(QuantConfig(vision=Scheme(weight), projector=Scheme(weight), language=Scheme(weight)))
    return passed(program(case, item), [item, *([SuppressMagnitude()] if suppress else [])])


def reference(w: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    """Codes and the dequantized weight, group by group with plain loops."""
    codes, values = torch.zeros_like(w), torch.zeros_like(w)
    step = group or w.shape[1]
    for n in range(w.shape[0]):
        for k in range(0, w.shape[1], step):
            codes[n, k : k + step], scale = nearest(w[n, k : k + step], bits)
            values[n, k : k + step] = codes[n, k : k + step] * scale
    return codes, values


@pytest.mark.parametrize(("bits", "group"), [(8, 0), (4, 0), (4, 8), (8, 4)])
def test_quantize_weights__codes_are_the_references(bits: int, group: int) -> None:
    prog = assigned("rms_gqa", bits, group)
    values = {n.args[1].target: prog.value(n.args[1].target) for n in prog.nodes("linear") if "scheme" in n.meta}
    passed(prog, [QuantizeWeights()])
    assert len(values) == 7
    for fqn, value in values.items():
        codes, _ = reference(value.float(), bits, group)
        stored = unpack(prog.weights[f"{fqn}.codes"], value.shape[1], 4 if bits == 4 else 8)
        assert torch.equal(stored, codes.to(torch.int8))
        assert stored.abs().max() >= 2 ** (bits - 1) - 1


@pytest.mark.parametrize("case", CASES)
def test_quantize_weights__equals_linears_of_dequantized_weights(case: str) -> None:
    prog, plain = assigned(case), assigned(case)
    passed(prog, [QuantizeWeights()])
    for fqn in {n.args[1].target for n in plain.nodes("linear") if "scheme" in n.meta}:
        plain.derive(fqn, "dequantized", lambda w: reference(w.float(), 8, 0)[1].double())
    assert relative_error(replayed(prog), replayed(plain)) < torch.finfo(torch.float32).eps


@pytest.mark.parametrize("case", CASES)
def test_quantize_weights__once(case: str) -> None:
    check_once(assigned(case), QuantizeWeights())


def test_quantize_weights__golden() -> None:
    check_golden(assigned("shared", suppress=True), QuantizeWeights(), "shared")


def test_quantize_weights__suppressed_columns_stay_in_floating_point() -> None:
    prog = assigned("rms_gqa", 4)
    fqn = "blocks.1.body.down.weight"
    prog.weights[fqn] = torch.ones_like(prog.weights[fqn])
    passed(prog, [SuppressMagnitude()])
    value = prog.value(fqn)
    passed(prog, [QuantizeWeights()])
    index = prog.weights[f"{fqn}.outliers"]
    assert index.numel()
    assert torch.equal(prog.weights[f"{fqn}.outlier_weight"], value[:, index])
    assert unpack(prog.weights[f"{fqn}.codes"], 24, 4)[:, index].eq(0).all()


def test_quantize_weights__shared_weight_is_solved_once() -> None:
    prog, solved = assigned("shared"), []

    def done(fqn: str, result: Quantized, error: float, seconds: float) -> None:
        solved.append(fqn)
        assert 0 < error < 2**-6
        assert seconds >= 0
        assert result.codes.dtype == torch.int8

    passed(prog, [QuantizeWeights(done=done)])
    assert len(solved) == len(set(solved)) == 7
    assert len(prog.nodes("weight_only_matmul")) == 10


def test_quantize_weights__cache_spares_the_solver() -> None:
    first, second, cache = assigned("rms_gqa"), assigned("rms_gqa"), {}
    passed(first, [QuantizeWeights(cache=cache)])
    passed(second, [QuantizeWeights(cache=cache)])
    assert all(second.solved[fqn] is first.solved[fqn] for fqn in first.solved)


def test_quantize_weights__gptq_gets_its_hessian() -> None:
    weight = WeightSpec(4, solver="gptq")
    item = AssignScheme(QuantConfig(language=Scheme(weight)))
    prog = passed(program("rms_gqa", item), [item])
    asked = []

    def hessian(fqn: str) -> Tensor:
        asked.append(fqn)
        return torch.eye(prog.weights[fqn].shape[1], dtype=torch.float64)

    passed(prog, [QuantizeWeights(hessian=hessian)])
    assert sorted(asked) == sorted(prog.solved)


def test_quantize_weights__notes_layers_whose_integer_scales_could_overflow() -> None:
    item = AssignScheme(QuantConfig(language=Scheme(WeightSpec(4, PerGroup(8), amplifier=1024), ActivationSpec())))
    prog = passed(program("rms_gqa", item), [item])
    large = "blocks.1.body.down.weight"
    prog.weights[large] = prog.weights[large] * 1e6
    passed(prog, [QuantizeWeights()])
    assert {fqn for fqn, solved in prog.solved.items() if not solved.amplifier} == {large}
    (note,) = (n for n in prog.notes if "overflow" in n)
    assert note.startswith(f"{large}: integer scales with amplifier 1024 could overflow")


@pytest.mark.parametrize("symmetric", [True, False])
def test_quantize_weights__a_group_that_does_not_divide_leaves_a_short_one(symmetric: bool) -> None:
    weight = WeightSpec(4, PerGroup(12), symmetric=symmetric)
    item = AssignScheme(QuantConfig(language=Scheme(weight)))
    prog, plain = (passed(program("rms_gqa", item), [item]) for _ in "ab")
    passed(prog, [QuantizeWeights()])
    assert prog.records[-1].misses == []
    assert prog.solved["blocks.0.body.q.weight"].note == "the last group has 4 of 12 input channels"
    assert prog.solved["blocks.1.body.down.weight"].note == ""
    for fqn, solved in prog.solved.items():
        assert (solved.zero is None) == symmetric
        plain.derive(fqn, "dequantized", lambda w, solved=solved: solved.dequantize().double())
    assert relative_error(replayed(prog), replayed(plain)) < torch.finfo(torch.float32).eps
