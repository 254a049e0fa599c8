"""Relatives of nn.Linear: quantized as linears, rewritten as linears, and themselves again where they stay floats."""

import tempfile
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from often import often
from small_vlm import Small, batches, logits
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm
from torch.utils import _pytree as pytree
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

import mmqc
from mmqc import recipes
from mmqc.config import QuantConfig
from mmqc.nn.linear import HadamardLinear, QuantLinear
from mmqc.quantization.convert import Journal
from mmqc.quantization.stand_ins import stand_in, step_back

SIZE = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2}


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    return randomised(GPT2LMHeadModel(GPT2Config(n_positions=32, n_embd=32, n_layer=2, n_head=4, **SIZE)))


def falcon(bias: bool = False) -> nn.Module:
    torch.manual_seed(0)
    config = FalconConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=False, bias=bias, **SIZE)
    return randomised(FalconForCausalLM(config))


def randomised(model: nn.Module) -> nn.Module:
    for p in model.parameters():
        if p.dim() == 1:
            nn.init.normal_(p, 1.0, 0.2)
    return model.eval()


def ids(seed: int = 0) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(seed))}


MODELS = {"GPT-2": gpt2, "Falcon": falcon, "Falcon with biases": lambda: falcon(True)}
CONFIGS: dict[str, tuple[QuantConfig, bool]] = {
    "rtn": (recipes.rtn(8), False),
    "rtn, recorded": (recipes.rtn(8), True),
    "static": (recipes.rtn(8, 8), True),
    "gptq": (recipes.gptq(8), True),
    "mquant": (recipes.mquant(8, msq=False), True),
}


@pytest.mark.parametrize("config", often(CONFIGS, "rtn", "gptq", "mquant"))
@pytest.mark.parametrize("name", often(MODELS, "GPT-2", "Falcon with biases"))
def test_stand_ins__all_linears_of_the_model_and_loaded_bit_for_bit(name: str, config: str) -> None:
    model, (recipe, data) = MODELS[name](), CONFIGS[config]
    expected = logits(model, ids(1))
    report = mmqc.quantize_(model, recipe, [ids(), ids(1)] if data else None, progress=False)
    assert len(report.layers) == 8
    assert [r.fqn for r in report.refused] == ["lm_head"]
    after = logits(model, ids(1))
    assert (after - expected).norm() / expected.norm() < 0.05
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)  # type: ignore[operator]
        loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert torch.equal(logits(loaded, ids(1)), after)


@pytest.mark.parametrize("name", MODELS)
def test_stand_ins__rewritten_floats_are_of_their_own_class_again(name: str) -> None:
    model = MODELS[name]()
    expected, classes = logits(model, ids(1)), {n: type(m) for n, m in model.named_modules() if "norm" not in n and "ln" not in n}
    report = mmqc.quantize_(model, recipes.rotate(), [ids()], progress=False)
    assert report.rewrite_error > 0
    changed = {n for n, kind in classes.items() if type(model.get_submodule(n)) is not kind}
    assert changed == {n for n, m in model.named_modules() if isinstance(m, HadamardLinear)}
    assert len(changed) == 2  # what reads a non-linearity; four others a layer were rewritten
    after = logits(model, ids(1))
    assert (after - expected).norm() / expected.norm() < 1e-5
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)  # type: ignore[operator]
        loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert torch.equal(logits(loaded, ids(1)), after)


@pytest.mark.parametrize("name", MODELS)
def test_stand_ins__quantized_while_it_loads(name: str) -> None:
    model = MODELS[name]()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)  # type: ignore[operator]
        loaded = AutoModelForCausalLM.from_pretrained(folder, quantization_config=recipes.rtn(8)).eval()
    mmqc.quantize_(model, recipes.rtn(8), progress=False)
    assert sum(isinstance(m, QuantLinear) for m in loaded.modules()) == 8
    assert torch.equal(logits(loaded, ids()), logits(model, ids()))


def test_stand_ins__a_kept_one_is_what_it_was() -> None:
    model = gpt2()
    before = {n: (id(m), dict(m.named_parameters(recurse=False))) for n, m in model.named_modules() if n.endswith("c_attn")}
    values = {n: p.detach().clone() for n, p in model.named_parameters()}
    mmqc.quantize_(model, recipes.rtn(8).replace(keep=("*.c_attn", "lm_head")), [ids()], progress=False)
    assert before
    for name, (identity, parameters) in before.items():
        module = model.get_submodule(name)
        assert id(module) == identity
        assert dict(module.named_parameters(recurse=False)) == parameters
        assert torch.equal(module.weight, values[f"{name}.weight"])  # type: ignore[arg-type]
        assert "in_features" not in vars(module)


def test_stand_ins__undone_by_a_failure() -> None:
    model = gpt2()
    before = {n: (id(p), p.shape, p.detach().clone()) for n, p in model.named_parameters()}
    modules = [id(m) for m in model.modules()]
    for leaves in (False, True):
        with suppress(KeyboardInterrupt), Journal(model) as journal:
            found = stand_in(model, journal)
            assert len(found.relatives) == 8
            if leaves:
                step_back(model, journal, found, ())
            raise KeyboardInterrupt
        assert [id(m) for m in model.modules()] == modules
        for name, p in model.named_parameters():
            assert (id(p), p.shape) == before[name][:2]
            assert torch.equal(p, before[name][2])


COMPUTED: dict[str, Callable[[nn.Linear], Any]] = {
    "pruned": lambda m: prune.l1_unstructured(m, "weight", 0.5),
    "weight-normed": weight_norm,
    "spectrally normed": spectral_norm,
    "parametrized": parametrizations.weight_norm,
}


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("how", COMPUTED)
def test_stand_ins__computed_weights_are_quantized_as_they_stand_and_the_report_says_so(how: str, calibrated: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)).eval()
    COMPUTED[how](model[0])
    seen: list[int] = []
    model[0].register_forward_hook(lambda m, a, o: seen.append(1))
    x = torch.randn(4, 16)
    expected = model(x)
    report = mmqc.quantize_(model, recipes.rtn(8).replace(keep=()), [{"input": x}] if calibrated else None, progress=False)
    assert [layer.fqn for layer in report.layers] == ["0", "2"]
    assert how in report.layers[0].note
    assert type(model[0]) is QuantLinear
    del seen[:]
    assert (model(x) - expected).norm() / expected.norm() < 0.02
    assert seen == [1]


@pytest.mark.parametrize("calibrated", [False, True])
def test_stand_ins__a_kept_pruned_linear_goes_on_being_pruned(calibrated: bool) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    prune.l1_unstructured(model[0], "weight", 0.5)
    x, first = torch.randn(4, 16), model[0]
    mmqc.quantize_(model, recipes.rtn(8).replace(keep=("0",)), [{"input": x}] if calibrated else None, progress=False)
    assert model[0] is first
    assert prune.is_pruned(model[0])
    with torch.no_grad():
        model[0].weight_orig.mul_(2)
    assert torch.allclose(model[0](x), nn.functional.linear(x, model[0].weight_orig * model[0].weight_mask, model[0].bias))


PLACES = [name for name, m in Small().named_modules() if name and not isinstance(m, nn.ModuleList)]


SEEN = {"rotate": recipes.rotate(), "mquant": recipes.mquant(8, msq=False, solver="rtn"), "smoothquant": recipes.smoothquant(8, 8)}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", SEEN.values(), ids=SEEN)
def test_record_linears__hooks_see_what_they_saw(recipe: QuantConfig) -> None:
    """On each module in turn a hook that only reads: a linear, a norm, an embedding, a block, a tower."""
    for place in PLACES:
        model, seen = Small(), []
        model.get_submodule(place).register_forward_hook(lambda m, a, k, o, seen=seen: seen.append((a, k, o)), with_kwargs=True)
        with torch.no_grad():
            model(**batches()[0])
            if not seen:
                assert place == "model.text", place  # its forward is not called, its modules are
                continue
            before = pytree.tree_leaves(seen.pop())
            mmqc.quantize_(model, recipe, batches(), progress=False)
            del seen[:]
            model(**batches()[0])
        after = pytree.tree_leaves(seen.pop())
        tensors = [(a, b) for a, b in zip(after, before, strict=True) if isinstance(b, torch.Tensor) and b.is_floating_point()]
        bar = 0.1 if recipe.schemes else 1e-5
        worst = max(((a - b).norm() / b.norm() for a, b in tensors), default=0)
        assert worst < bar, place


def test_record_linears__the_refusal_names_the_module_of_the_hook() -> None:
    model = Small()
    model.model.text.blocks[0].register_forward_hook(lambda *args: None)
    report = mmqc.quantize_(model, recipes.rotate(), batches(), progress=False)
    assert any(
        r.fqn == "model.text.blocks.0.body.q.weight" and "hook of model.text.blocks.0 sees it" in r.reason for r in report.refused
    )
    assert not model.model.text.blocks[1]._forward_hooks
    assert len(model.model.text.blocks[0]._forward_hooks) == 1


def test_record_linears__a_hook_that_changes_values_is_part_of_the_model() -> None:
    model = Small()
    model.model.text.blocks[0].body.o.register_forward_hook(lambda m, a, o: o.roll(1, -1))
    model.model.text.blocks[1].norm.register_forward_pre_hook(lambda m, a: (a[0].clamp(-1, 1),))
    expected = logits(model, batches()[0])
    mmqc.quantize_(model, recipes.rotate(), batches(), progress=False)
    after = logits(model, batches()[0])
    assert (after - expected).norm() / expected.norm() < 1e-5


def whisper() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    widths = {"d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_mel_bins": 8, "max_source_positions": 16}
    tokens = {"pad_token_id": 0, "decoder_start_token_id": 1, "max_target_positions": 32}
    return WhisperForConditionalGeneration(WhisperConfig(**sizes, **widths, **tokens, **SIZE)).eval()


def test_record_linears__whispers_head_is_kept_with_data_as_without() -> None:
    batch = {"input_features": torch.randn(1, 8, 32), "decoder_input_ids": torch.tensor([[3, 4, 5]])}
    done = []
    for data in (None, [batch]):
        report = mmqc.quantize_(whisper(), recipes.rtn(8), data, progress=False)
        assert [r.fqn for r in report.refused if r.fqn] == ["proj_out"]
        done.append({layer.fqn for layer in report.layers})
    assert done[0] == done[1]
    assert len(done[0]) == 16


class Encoder(nn.Module):
    """torch's own encoder layer, which has a fast path that no recording shows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 16), nn.Linear(16, 20)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.embed(ids)))


@pytest.mark.parametrize("recipe", [recipes.rotate(), recipes.mquant(8, msq=False), recipes.rtn(8, 8)])
def test_record_linears__torchs_encoder_layers_stay_as_they_are(recipe: QuantConfig) -> None:
    torch.manual_seed(0)
    model, ids = Encoder().eval(), torch.arange(12).view(2, 6)
    before = {n: p.detach().clone() for n, p in model.layer.named_parameters()}
    with torch.no_grad():
        expected = model(ids)
        report = mmqc.quantize_(model, recipe.replace(keep=()), [{"ids": ids}], progress=False)
        after = model(ids)
    assert all(torch.equal(p, before[n]) for n, p in model.layer.named_parameters())
    assert (after - expected).norm() / expected.norm() < 0.02
    reasons = {r.fqn: r.reason for r in report.refused}
    wanted = {f"layer.{n}" for n in ("self_attn.out_proj", "linear1", "linear2")} if recipe.schemes else set()
    assert {n for n, why in reasons.items() if "in one fused operation" in why} >= wanted
