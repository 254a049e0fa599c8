"""Incoherence μ: its definition, which weights have one, and what the report says of it."""

import math

import pytest
import torch
from models import tiny_qwen2_vl
from tiny_families import FAMILIES

import mmqc
from mmqc import recipes
from mmqc.graph.record import record
from mmqc.ops.hadamard import apply_factors
from mmqc.ops.hadamard_matrix import hadamard_factors
from mmqc.quantization.incoherence import incoherence, incoherences, weight_towers

EXACT = torch.finfo(torch.float64).eps ** 0.5


def test_incoherence__of_known_matrices() -> None:
    signs = torch.randint(2, (8, 12), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
    assert incoherence(3 * signs) == pytest.approx(1, rel=EXACT)
    one = torch.zeros(8, 12)
    one[2, 3] = -5
    assert incoherence(one) == pytest.approx(math.sqrt(96), rel=EXACT)
    assert incoherence(torch.zeros(4, 4)) == 1
    assert math.isnan(incoherence(torch.empty(4, 4, device="meta")))


def test_incoherence__of_a_stack_is_the_worst() -> None:
    even, spike = torch.ones(4, 6), torch.zeros(4, 6)
    spike[0, 0] = 1
    assert incoherence(torch.stack((even, spike, even))) == pytest.approx(math.sqrt(24), rel=EXACT)


def test_incoherence__a_hadamard_spreads_a_spike() -> None:
    spike = torch.zeros(1, 64, dtype=torch.float64)
    spike[0, 5] = 1
    assert incoherence(apply_factors(spike, hadamard_factors(64))) == pytest.approx(1, rel=EXACT)


def test_incoherences__of_stacked_experts() -> None:
    model, batch = FAMILIES["mixtral"]()
    prog = record(model, {**batch, "use_cache": False})
    found = incoherences(prog)
    experts = {f: v for f, v in found.items() if prog.weights[f].dim() == 3}
    assert len(experts) == 4
    for fqn, value in experts.items():
        assert value == pytest.approx(max(incoherence(w) for w in prog.weights[fqn]), rel=EXACT)
    assert len(found) == sum(p.dim() == 2 for n, p in model.named_parameters() if "embed" not in n) + 4
    assert set(weight_towers(prog)) == set(found)


def test_report__of_rotate_has_every_linear_before_and_after() -> None:
    model, batch = tiny_qwen2_vl()
    fc2 = model.model.visual.blocks[0].mlp.fc2
    with torch.no_grad():
        fc2.weight[:, 7] *= 100
    linears = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    old = {n: incoherence(p) for n, p in model.named_parameters(remove_duplicate=False) if n in linears}
    report = mmqc.quantize_(model, recipes.rotate(), [batch], progress=False)
    assert set(report.incoherence) == set(report.towers) == linears
    new = dict(model.named_parameters(remove_duplicate=False))
    for fqn, (before, after) in report.incoherence.items():
        assert before == pytest.approx(old[fqn], rel=EXACT)
        assert after == pytest.approx(incoherence(new[fqn]), rel=EXACT)
    before, after = report.incoherence["model.visual.blocks.0.mlp.fc2.weight"]
    assert after < before / 3
    assert {t: sum(v == t for v in report.towers.values()) for t in report.towers.values()} == {
        "vision": 8,
        "projector": 2,
        "language": 15,
    }
    lines = report.summary().splitlines()
    at = next(i for i, text in enumerate(lines) if text.startswith("incoherence of 25 linear weights: median "))
    assert lines[at + 1].startswith("  largest before ")
    assert lines[at + 1].endswith("(model.visual.blocks.0.mlp.fc2.weight)")
    assert lines[at + 2].startswith("  largest after ")
    assert report.to_dict()["incoherence"][fqn] == list(report.incoherence[fqn])


def test_report__page_draws_before_against_after(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    pairs = {"a.weight": (9.0, 4.0), "b.weight": (5.0, math.nan)}
    report = mmqc.QuantReport(recipes.rotate(), incoherence=pairs, towers={"a.weight": "vision", "b.weight": "language"})
    text = report.save(tmp_path / "report.html").read_text(encoding="utf-8")
    assert text.count("<img") == 1
    assert "How evenly the weights are spread" in text
    assert "of 1 linear weight: median 9.0 -> 4.0" in report.summary()
    assert report.to_dict()["incoherence"]["b.weight"] == [5.0, None]
