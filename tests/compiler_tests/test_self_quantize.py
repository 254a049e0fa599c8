"""The backend quantizes by itself; Inductor is left out here: what it makes of the same graphs is tested elsewhere."""

import copy
from typing import Any

import pytest
import torch
from float64 import relative_error
from models import tiny_qwen2_vl
from tiny_families import FAMILIES
from torch import Tensor, nn

import mmqc
import mmqc.backend
from mmqc import recipes
from mmqc.backend import collect_records
from mmqc.compiler import self_quantize
from mmqc.config import ActivationSpec, QuantConfig, Scheme, WeightSpec
from mmqc.graph.program import Program

SAME = 1e-4  # both round the same numbers
# Explicit rotations add up in another order: one code in some thousand lands on the other side of a tie, and the layers
# behind it round other numbers.  8 bits themselves cost 0.04 here.
FLIPPED = 0.03

pytestmark = pytest.mark.usefixtures("without_inductor")


@torch.no_grad()
def logits(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    return model(**batch).logits


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_self_quantize__equals_quantize_in_other_families(family: str) -> None:
    model, batch = FAMILIES[family]()
    model, quantized = copy.deepcopy(model), copy.deepcopy(model)
    report = mmqc.quantize_(quantized, recipes.mquant(8, solver="rtn"), [batch], progress=False)
    compiled = torch.compile(model, backend="mmqc", options={"config": report.config})
    assert relative_error(logits(compiled, batch), logits(quantized, batch)) < SAME
    assert relative_error(logits(compiled, batch), logits(quantized, batch)) < SAME  # the hooks run from the second call on


@pytest.mark.parametrize(("name", "bar"), [("rtn", SAME), pytest.param("mquant", FLIPPED, marks=pytest.mark.slow)])
def test_self_quantize__equals_quantize(name: str, bar: float, monkeypatch: pytest.MonkeyPatch) -> None:
    programs: list[Program] = []
    rewrite = self_quantize._rewrite
    monkeypatch.setattr(self_quantize, "_rewrite", lambda c, s: (programs.append(c.program), rewrite(c, s))[1])
    config = recipes.rtn(8, activation_bits=8) if name == "rtn" else recipes.mquant(8, solver="rtn")
    model, batch = tiny_qwen2_vl()
    quantized = copy.deepcopy(model)
    report = mmqc.quantize_(quantized, config, [batch], progress=False)
    plain = logits(model, batch)
    with collect_records() as records:
        compiled = torch.compile(model, backend="mmqc", options={"config": report.config})
        actual = logits(compiled, batch)
    expected = logits(quantized, batch)
    check_same_weights(programs, quantized, report)
    assert relative_error(actual, expected) < bar < relative_error(expected, plain)
    assert sum(r.ops.get("scaled_matmul", 0) for r in records) >= len(report.layers) // 2  # blocks share their graph
    assert all(p.n_sites or p.misses or p.ms for r in records for p in r.passes)
    if name == "mquant":
        _, other = tiny_qwen2_vl(grids=((1, 6, 4), (1, 8, 8)))
        assert relative_error(logits(compiled, other), logits(quantized, other)) < bar


def check_same_weights(programs: list[Program], quantized: nn.Module, report: mmqc.QuantReport) -> None:
    """Codes, scales and suppressed columns are those of quantize_, to the last bit."""
    nodes = {n.meta["fqn"]: (p, n) for p in programs for n in p.nodes("scaled_matmul")}
    assert {fqn.removesuffix(".weight") for fqn in nodes} == {layer.fqn for layer in report.layers}
    for fqn, (prog, _) in nodes.items():
        linear = quantized.get_submodule(fqn.removesuffix(".weight"))
        assert torch.equal(prog.solved[fqn].codes, linear.codes())
        for part in ("weight_scale", "input_scale", "outlier_index", "outlier_weight"):
            known = {"weight_scale": "scale", "outlier_index": "outliers"}.get(part, part)
            here, there = prog.weights.get(f"{fqn}.{known}"), getattr(linear, part)
            assert (here is None and there is None) or torch.equal(here, there)


class Net(nn.Module):
    """An embedding and two linears, for what needs no real model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(50, 32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Tensor:
        x = self.embed(input_ids)
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def net() -> tuple[Net, Tensor, QuantConfig]:
    """A model, its input and the config that quantize_ found for it."""
    torch.manual_seed(0)
    model, ids = Net().eval(), torch.arange(24).reshape(2, 12)
    report = mmqc.quantize_(copy.deepcopy(model), recipes.rtn(8, 8).replace(keep=()), [{"input_ids": ids}], progress=False)
    return model, ids, report.config


@torch.no_grad()
def compiled_output(model: nn.Module, ids: Tensor, config: Any) -> Tensor:
    return torch.compile(model, backend="mmqc", options={"config": config})(input_ids=ids)


@torch.no_grad()
def quantized_output(model: nn.Module, ids: Tensor, config: QuantConfig) -> Tensor:
    copied = copy.deepcopy(model)
    mmqc.quantize_(copied, config.replace(statistics=None), [{"input_ids": ids}], progress=False)
    return copied(input_ids=ids)


def test_self_quantize__small_model_and_config_as_json() -> None:
    model, ids, config = net()
    expected = quantized_output(model, ids, config)
    assert relative_error(compiled_output(model, ids, config), expected) < SAME
    torch._dynamo.reset()
    assert relative_error(compiled_output(model, ids, config.to_dict()), expected) < SAME


def test_self_quantize__model_itself_is_left_as_it_is() -> None:
    model, ids, config = net()
    before = copy.deepcopy(model.state_dict())
    compiled_output(model, ids, config)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert {type(m) for m in model.modules()} == {Net, nn.Embedding, nn.Linear}


def test_self_quantize__weights_written_to_in_place_are_derived_anew() -> None:
    model, ids, config = net()
    with torch.no_grad():
        compiled = torch.compile(model, backend="mmqc", options={"config": config})
        first = compiled(input_ids=ids)
        model.down.weight.mul_(0.5)
        second = compiled(input_ids=ids)
        assert relative_error(second, first) > SAME
        assert relative_error(second, quantized_output(model, ids, config)) < SAME


def test_self_quantize__weight_only_needs_no_statistics() -> None:
    model, ids, _ = net()
    config = QuantConfig(language=Scheme(WeightSpec(4)), keep=())
    assert relative_error(compiled_output(model, ids, config), quantized_output(model, ids, config)) < SAME


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        (Scheme(WeightSpec(8), ActivationSpec()), "needs calibration and it holds no statistics"),
        (Scheme(WeightSpec(4, solver="gptq")), "needs calibration and it holds no statistics"),
    ],
)
def test_self_quantize__refuses_a_config_that_needs_data(scheme: Scheme, message: str) -> None:
    model, ids, _ = net()
    with pytest.raises(Exception, match=message) as raised:
        compiled_output(model, ids, QuantConfig(language=scheme, keep=()))
    assert "report.config" in str(raised.value)


def test_self_quantize__refuses_gptq_even_with_statistics() -> None:
    model, ids, config = net()
    gptq = config.replace(language=Scheme(WeightSpec(4, solver="gptq"), ActivationSpec()))
    with pytest.raises(Exception, match="gptq needs the calibration data"):
        compiled_output(model, ids, gptq)


def test_self_quantize__refuses_a_function() -> None:
    def double(x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, x)

    with pytest.raises(Exception, match=r"needs a torch\.nn\.Module"):
        torch.compile(double, backend="mmqc", options={"config": recipes.rtn(8)})(torch.randn(4, 4))


def test_self_quantize__two_models_do_not_share_their_weights() -> None:
    first, ids, config = net()
    second = copy.deepcopy(first)
    with torch.no_grad():
        second.down.weight.neg_()
    for model in (first, second):
        assert relative_error(compiled_output(model, ids, config), quantized_output(model, ids, config)) < SAME
