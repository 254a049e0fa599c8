"""The backend quantizes by itself; Inductor is left out here: what it makes of the same graphs is tested elsewhere."""

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from float64 import relative_error
from models import tiny_qwen2_vl
from tiny_families import FAMILIES
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

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


@pytest.mark.slow
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
    model, batch = tiny_qwen2_vl(depth=1)
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
        _, other = tiny_qwen2_vl(depth=1, grids=((1, 6, 4), (1, 8, 8)))
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


def compile_with(model: nn.Module, config: Any) -> Any:
    """By the backend, which quantizes."""
    return torch.compile(model, backend="mmqc", options={"config": config})


def weights_only() -> tuple[Net, Tensor, QuantConfig]:
    """A model, its input and a config in which nothing depends on the weights but their codes."""
    torch.manual_seed(0)
    return Net().eval(), torch.arange(24).reshape(2, 12), recipes.rtn(8).replace(keep=())


CHANGES: dict[str, Callable[[Net], object]] = {
    "in place": lambda m: m.down.weight.mul_(0.5),
    "one value": lambda m: m.down.weight[3, 4].add_(3),
    "data": lambda m: setattr(m.down.weight, "data", m.down.weight.data * 0.5),
    "data, twice": lambda m: [setattr(m.down.weight, "data", m.down.weight.data * 0.5) for _ in range(2)],
    "through data": lambda m: m.down.weight.data.mul_(0.5),
    "copied through data": lambda m: m.down.weight.data.copy_(m.down.weight.data.flip(0)),
    "load_state_dict": lambda m: m.load_state_dict({k: v * 0.5 for k, v in m.state_dict().items()}),
    "load_state_dict, assign": lambda m: m.load_state_dict({k: v * 0.5 for k, v in m.state_dict().items()}, assign=True),
    "new parameter": lambda m: setattr(m.down, "weight", nn.Parameter(torch.randn(32, 64))),
    "new module": lambda m: setattr(m, "down", nn.Linear(64, 32)),
    "swap_tensors": lambda m: torch.utils.swap_tensors(m.down.weight, nn.Parameter(torch.randn(32, 64))),
    "bias alone": lambda m: m.down.bias.add_(1),
    "embedding through data": lambda m: m.embed.weight.data.mul_(0.5),
    "vector": lambda m: nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(m.parameters()) * 0.5, m.parameters()),
    "optimizer": lambda m: step(m),
}


def step(model: Net) -> None:
    """One of an optimizer."""
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    torch.optim.AdamW(model.parameters(), lr=0.1).step()
    model.zero_grad()


@pytest.mark.parametrize("change", CHANGES)
def test_self_quantize__weights_that_change_are_noticed(change: str) -> None:
    model, ids, config = weights_only()
    with torch.no_grad():
        compiled = compile_with(model, config)
        for _ in range(2):
            before = compiled(input_ids=ids)
            CHANGES[change](model)
            after = compiled(input_ids=ids)
            assert relative_error(after, before) > SAME
            assert relative_error(after, quantized_output(model, ids, config)) < SAME


def test_self_quantize__parameters_replaced_in_a_row_are_noticed_and_forgotten() -> None:
    model, ids, config = weights_only()
    with torch.no_grad():
        compiled = compile_with(model, config)
        compiled(input_ids=ids)
        kept = []
        for _ in range(8):
            model.down.weight = nn.Parameter(torch.randn(32, 64))
            kept.append(StorageWeakRef(model.down.weight.untyped_storage()))
            assert relative_error(compiled(input_ids=ids), quantized_output(model, ids, config)) < SAME
    gc.collect()
    assert sum(not ref.expired() for ref in kept) == 1, "what was replaced is freed"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_self_quantize__another_dtype_is_noticed(dtype: torch.dtype) -> None:
    model, ids, config = weights_only()
    with torch.no_grad():
        compiled = compile_with(model, config)
        compiled(input_ids=ids)
        model.to(dtype)
        after = compiled(input_ids=ids)
        assert after.dtype == dtype
        assert relative_error(after, quantized_output(model, ids, config)) < (SAME if dtype == torch.float64 else FLIPPED)
        model.float()
        assert relative_error(compiled(input_ids=ids), quantized_output(model, ids, config)) < SAME


def test_self_quantize__a_model_made_in_inference_mode() -> None:
    with torch.inference_mode():
        model, ids, config = weights_only()
        compiled = compile_with(model, config)
        assert relative_error(compiled(input_ids=ids), quantized_output(model, ids, config)) < SAME
        model.down.weight.mul_(0.5)
        assert relative_error(compiled(input_ids=ids), quantized_output(model, ids, config)) < SAME


def test_self_quantize__one_graph_and_two_models() -> None:
    first, ids, config = weights_only()
    second = copy.deepcopy(first)
    with torch.no_grad():
        second.down.weight.neg_()
        calls = [compile_with(m, config) for m in (first, second)]
        for _ in range(2):
            for model, compiled in zip((first, second), calls, strict=True):
                assert relative_error(compiled(input_ids=ids), quantized_output(model, ids, config)) < SAME
                model.up.weight.data.mul_(0.5)


@pytest.mark.parametrize("shape", [(0, 6), (2, 0)])
def test_self_quantize__batches_without_rows(shape: tuple[int, int]) -> None:
    model, batch = Gated().eval(), torch.randint(0, 50, (2, 3))
    with torch.no_grad():
        for recipe in (recipes.rtn(8), recipes.rotate()):
            compiled = compile_with(model, recipe)
            assert compiled(torch.zeros(shape, dtype=torch.long)).shape == (*shape, 50)
            assert 0 < relative_error(compiled(batch), model(batch)) < FLIPPED


class Gated(nn.Module):
    """Products of activations, in which channels are looked for."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(50, 32), nn.RMSNorm(32)
        self.gate, self.up, self.down = nn.Linear(32, 48), nn.Linear(32, 48), nn.Linear(48, 32)
        self.head = nn.Linear(32, 50, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        h = self.norm(x) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.head(x + self.down(nn.functional.silu(self.gate(h)) * self.up(h)))


def test_self_quantize__parametrized_weights_are_computed_in_every_call() -> None:
    class Lora(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(32, 4)), nn.Parameter(torch.randn(4, 64))

        def forward(self, weight: Tensor) -> Tensor:
            return weight + self.a @ self.b

    model, ids, config = weights_only()
    with torch.no_grad():
        compiled = compile_with(model, config)
        compiled(input_ids=ids)
        nn.utils.parametrize.register_parametrization(model.down, "weight", Lora())
        for _ in range(2):
            assert relative_error(compiled(input_ids=ids), model(input_ids=ids)) < FLIPPED
            model.down.parametrizations.weight[0].a.data.mul_(10)
        nn.utils.parametrize.remove_parametrizations(model.down, "weight")
        assert relative_error(compiled(input_ids=ids), quantized_output(model, ids, config)) < SAME


def test_self_quantize__functional_call_brings_other_weights() -> None:
    model, ids, config = weights_only()
    with torch.no_grad():
        compiled = compile_with(model, config)
        compiled(input_ids=ids)
        for factor in (1.0, 2.0):
            others = {name: torch.randn_like(p) * factor for name, p in model.named_parameters()}
            other = copy.deepcopy(model)
            other.load_state_dict(others)
            got = torch.func.functional_call(compiled, {f"_orig_mod.{k}": v for k, v in others.items()}, (ids,))
            assert relative_error(got, quantized_output(other, ids, config)) < SAME
