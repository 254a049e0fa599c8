from fnmatch import fnmatch

import pytest
import torch
from float64 import Float64, passed, relative_error, replayed
from pass_cases import CASES, check_once, program
from rounding import nearest
from torch import Tensor

from mmqc.config import DynamicSpec, QuantConfig, Scheme, WeightSpec
from mmqc.graph.linear import operands, weight_of
from mmqc.graph.program import Program
from mmqc.ops.pack import unpack
from mmqc.passes.assign_scheme import AssignScheme
from mmqc.passes.quantize_mixed import HIGH, QuantizeMixed
from mmqc.passes.quantize_weights import QuantizeWeights


def assigned(case: str, dynamic: DynamicSpec, bits: int = 4, high: dict[str, Tensor] | None = None) -> Program:
    """The program with schemes; ``high`` gives the high channels of the weights that match a pattern."""
    scheme = Scheme(WeightSpec(bits, act_order=False), dynamic=dynamic)
    item = AssignScheme(QuantConfig(vision=scheme, projector=scheme, language=scheme))
    prog = passed(program(case, item), [item])
    for node in prog.nodes("linear"):
        for pattern, index in (high or {}).items():
            if fnmatch(weight_of(node), pattern):
                node.meta[HIGH] = index
    return prog


def fake_linear(x: Tensor, w: Tensor, high: Tensor, bits: tuple[int, int], a_bits: tuple[int, int]) -> Tensor:
    """Channel sets quantized one by one, nothing reordered."""
    is_high = torch.zeros(w.shape[1], dtype=torch.bool).index_fill(0, high, True)
    y = torch.zeros(*x.shape[:-1], len(w), dtype=torch.float64)
    least_w, least = torch.zeros(()), torch.zeros((), dtype=torch.float64)  # steps, as fine as the second part's may be
    for some, b, a in ((~is_high, bits[0], a_bits[0]), (is_high, bits[1], a_bits[1])):
        if not some.any():
            continue
        part, columns = x[..., some], w[:, some]
        s_w = torch.maximum(nearest(columns.float(), b)[1], least_w)
        least_w, s_w = s_w * 2.0 ** (b - bits[1] - 1), s_w.double()
        w_q = torch.round(columns / s_w).clamp(-(2 ** (b - 1)), 2 ** (b - 1) - 1) * s_w
        low, top = part.amin(-1, keepdim=True), part.amax(-1, keepdim=True)
        s = torch.maximum((top - low) / (2**a - 1), least)
        least = s * 2.0 ** (a - a_bits[1] - 1)
        y += (torch.round((part - low) / s) * s + low) @ w_q.T
    return y


@pytest.mark.parametrize(("bits", "a_bits", "high_bits"), [(4, 4, 8), (3, 8, 8), (2, 8, 8), (4, 4, 4)])
def test_quantize_mixed__is_fake_quantization_of_both_parts(bits: int, a_bits: int, high_bits: int) -> None:
    high = torch.tensor([3, 8, 15])
    prog = assigned("rms_gqa", DynamicSpec(a_bits, high_bits, 1 / 8), bits, {"blocks.0.body.[qko].weight": high})
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    wanted = {f: prog.value(f) for n in prog.nodes("linear") if "scheme" in n.meta for f in [weight_of(n)]}
    passed(prog, [QuantizeMixed()])
    fqn_of = {n: n.meta["fqn"] for n in prog.nodes("mixed_matmul")}
    inputs = {n: operands_of(n) for n in fqn_of}
    values: dict[str, Tensor] = {}

    def watch(node, result, args, kwargs) -> None:
        values[node.name] = result

    with Float64(), torch.no_grad():
        prog.replay(watch)
    for node, fqn in fqn_of.items():
        x, y, bias = values[inputs[node]], values[node.name], node.args[6]
        index = high if fqn.endswith(("q.weight", "k.weight", "o.weight")) else high[:0]
        expected = fake_linear(x, wanted[fqn], index, (bits, high_bits), (a_bits, high_bits))
        expected = expected if bias is None else expected + values[bias.name]
        assert relative_error(y, expected) < 1e-6
        seen[fqn] = y, expected
    assert len(seen) == len(wanted) == 7


def operands_of(node) -> str:
    """The name of the activation behind a mixed_matmul's quantized input."""
    return node.args[0].args[0].args[0].name


@pytest.mark.parametrize("case", CASES)
def test_quantize_mixed__every_linear_with_a_scheme(case: str) -> None:
    prog = assigned(case, DynamicSpec(8, 8, 1 / 8), 8, {"*": torch.tensor([0, 5])})
    expected = replayed(prog)
    weights = {weight_of(n) for n in prog.nodes("linear") if "scheme" in n.meta}
    passed(prog, [QuantizeMixed(), QuantizeWeights()])
    assert {n.meta["fqn"] for n in prog.nodes("mixed_matmul")} == weights
    assert prog.nodes("weight_only_matmul") == []
    assert 1e-4 < relative_error(replayed(prog), expected) < 0.1


def test_quantize_mixed__once() -> None:
    check_once(assigned("rms_gqa", DynamicSpec(4), 4), QuantizeMixed())


def test_quantize_mixed__leaves_other_schemes_alone() -> None:
    scheme = Scheme(WeightSpec(4))
    item = AssignScheme(QuantConfig(vision=scheme, projector=scheme, language=scheme))
    prog = passed(program("rms_gqa", item), [item, QuantizeMixed()])
    assert prog.records[-1].sites == []
    assert all(kind in operands(prog.nodes("linear")[0]) for kind in ("input", "weight"))


def test_quantize_mixed__stores_the_high_part_behind_the_low_one() -> None:
    high = torch.tensor([3, 8, 15])
    prog = assigned("rms_gqa", DynamicSpec(4, 8, 1 / 8), 4, {"blocks.0.body.q.weight": high})
    passed(prog, [QuantizeMixed()])
    fqn = "blocks.0.body.q.weight"
    solved, order = prog.solved[fqn], prog.weights[f"{fqn}.order"]
    assert order.tolist() == [k for k in range(16) if k not in high.tolist()] + high.tolist()
    assert torch.equal(unpack(prog.weights[f"{fqn}.codes_0"], 13, 4), solved.codes[:, order[:13]])
    assert torch.equal(prog.weights[f"{fqn}.codes_1"], solved.codes[:, high])
    assert prog.weights[f"{fqn}.sum"][:, 1].tolist() == solved.codes[:, high].sum(1).tolist()
    assert "13 at W4 + 3 at W8" in prog.records[-1].sites[0]
