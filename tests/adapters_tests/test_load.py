"""An adapter of the float model on what mmqc made of that model: the float model with the adapter merged is the reference."""

import copy
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from float64 import EXACT, Float64, output_of, relative_error, to_float64
from lora_files import merged, targets, write_adapter
from models import tiny_qwen2_vl
from often import often
from small_vlm import Small, batches
from tiny_families import FAMILIES
from tolerance import assert_close
from torch import Tensor, nn

import mmqc
from mmqc import AdapterError, recipes
from mmqc.adapters.fold import fold
from mmqc.adapters.read import Layer
from mmqc.graph.change_data import from_data
from mmqc.nn.adapted_linear import AdaptedLinear, LowRank
from mmqc.nn.integer_weight import PackedLinear


def rewritten(model: nn.Module, batch: dict[str, Tensor], recipe: Any) -> nn.Module:
    model = copy.deepcopy(model)
    with Float64() if next(model.parameters()).dtype == torch.float64 else nullcontext():
        mmqc.quantize_(model, recipe, [batch], progress=False)
    return model


# Terms with a bias for every second family, and both for one.
PAIRS = [("qwen2_vl", False), *((family, i % 2 == 0) for i, family in enumerate(FAMILIES))]


@pytest.mark.parametrize(("family", "bias"), often(dict.fromkeys(PAIRS), PAIRS[1]))
def test_load_adapter__is_exact_in_rewritten_models(family: str, bias: bool, tmp_path: Path) -> None:
    model, batch = to_float64(*FAMILIES[family]())
    tensors = write_adapter(model, tmp_path, targets(model), biased=bias)
    reference = output_of(merged(model, tensors), batch)
    assert relative_error(output_of(model, batch), reference) > 0.1  # the adapter does something
    changed = rewritten(model, batch, recipes.rotate())
    before = output_of(changed, batch)
    names = mmqc.load_adapter(changed, tmp_path)
    assert sorted(names) == sorted(targets(model))
    assert relative_error(output_of(changed, batch), reference) < EXACT
    assert sorted(mmqc.unload_adapter(changed)) == sorted(names)
    assert torch.equal(output_of(changed, batch), before)
    assert not any(isinstance(m, AdaptedLinear) for m in changed.modules())


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [recipes.rotate(), recipes.rotate(online=False)])
def test_load_adapter__merges_exactly_before_and_behind_the_rewrites(recipe: Any, tmp_path: Path) -> None:
    model, batch = to_float64(*FAMILIES["internvl"]())
    reference = output_of(merged(model, write_adapter(model, tmp_path, targets(model))), batch)
    first = copy.deepcopy(model)
    mmqc.load_adapter(first, tmp_path, merge=True)
    assert relative_error(output_of(first, batch), reference) < EXACT
    assert relative_error(output_of(rewritten(first, batch, recipe), batch), reference) < EXACT
    last = rewritten(model, batch, recipe)
    mmqc.load_adapter(last, tmp_path, merge=True)
    assert relative_error(output_of(last, batch), reference) < EXACT
    assert not any(isinstance(m, AdaptedLinear) for m in last.modules())


MEASURED = {
    "awq": (recipes.awq(8, group_size=32), 0.01),
    "smoothquant": (recipes.smoothquant(8), 0.02),
    "resq": (recipes.resq(8, 8), 0.02),
    "mquant": (recipes.mquant(8), 0.02),
}


@pytest.mark.parametrize("name", often(MEASURED, "awq", "mquant"))
def test_fold__what_was_done_to_a_weight_is_kept_in_the_files(name: str) -> None:
    """The float weight as a term of full rank, I W, comes out as the weight that the codes stand for, to 8 bits."""
    recipe, most = MEASURED[name]
    model, batch = tiny_qwen2_vl()
    q = quantized(model, batch, recipe)
    changes = json.loads(json.dumps(q.config.quantization_config.record["changes"]))
    found = {n: m for n, m in q.named_modules() if isinstance(m, PackedLinear)}
    assert len(found) > 20
    kinds = set()
    for fqn, linear in found.items():
        steps = from_data(changes, f"{fqn}.weight")
        w = model.get_submodule(fqn).weight.detach()
        layer = fold(Layer(w, torch.eye(len(w)), None, 1.0), steps, fqn)
        assert relative_error(linear.weight, layer.up @ layer.down) < most, fqn
        kinds |= {type(getattr(step, "change", step)).__name__ for step in steps}
    assert kinds >= {"awq": {"Times"}, "resq": {"Based", "Turned"}, "mquant": {"Turned", "Moved", "Spread"}}.get(name, set())


@torch.no_grad()
def logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).logits


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module, dict[str, Tensor], Tensor]:
    """(an adapter's directory, the float model, a batch, the logits of the float model with the adapter)."""
    model, batch = tiny_qwen2_vl()
    directory = tmp_path_factory.mktemp("adapter")
    tensors = write_adapter(model, directory, targets(model))
    return directory, model, batch, logits(merged(model, tensors), batch)


def quantized(model: nn.Module, batch: dict[str, Tensor], recipe: Any = None) -> nn.Module:
    model = copy.deepcopy(model)
    mmqc.quantize_(model, recipe or recipes.mquant(8), [batch], progress=False)
    return model


@pytest.mark.slow
def test_load_adapter__on_a_quantized_model_saved_and_loaded(adapter, tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    directory, model, batch, reference = adapter
    q = quantized(model, batch)
    alone = logits(q, batch)
    mmqc.load_adapter(q, directory)
    out = logits(q, batch)
    assert relative_error(out, reference) < 0.1 * relative_error(alone, reference)
    q.save_pretrained(tmp_path / "adapted")
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "adapted")
    assert torch.equal(logits(again, batch), out)
    assert type(again.get_submodule(targets(model)[0]).base) is type(q.get_submodule(targets(model)[0]).base)
    mmqc.unload_adapter(again)
    assert torch.equal(logits(again, batch), alone)
    mmqc.load_adapter(again, directory)  # what the rewrites did came with the files
    assert torch.equal(logits(again, batch), out)
    half = AutoModelForImageTextToText.from_pretrained(tmp_path / "adapted", dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert relative_error(logits(half, batch), out) < 0.1


@pytest.mark.slow
def test_load_adapter__compiled_and_in_generate(adapter) -> None:
    directory, model, batch, _ = adapter
    q = quantized(model, batch)
    compiled = torch.compile(q, backend="mmqc")
    with torch.no_grad():
        before = compiled(**batch).logits
    mmqc.load_adapter(q, directory)
    out = logits(q, batch)
    with torch.no_grad():
        assert_close(compiled(**batch).logits, out)  # compiled anew: the linears are others
    assert relative_error(before, out) > 0.1
    options = {"max_new_tokens": 4, "do_sample": False}
    ids = q.generate(**batch, **options)
    assert torch.equal(q.generate(**batch, **options, custom_generate=mmqc.compiled_loop, cache_implementation="static"), ids)


def test_load_adapter__several_add_up_and_go_one_by_one(adapter, tmp_path: Path) -> None:
    directory, model, batch, _ = adapter
    names = targets(model)[:2]
    second = write_adapter(model, tmp_path, names, lora_alpha=3)
    both = rewritten(model, batch, recipes.rotate())
    mmqc.load_adapter(both, directory)
    one = logits(both, batch)
    assert sorted(mmqc.load_adapter(both, tmp_path, name="second")) == sorted(names)
    with pytest.raises(AdapterError, match=r"has an adapter 'second' already: unload it"):
        mmqc.load_adapter(both, tmp_path, name="second")
    reference = merged(merged(model, write_adapter(model, tmp_path / "first", targets(model))), second, 1.0)
    assert relative_error(logits(both, batch), logits(reference, batch)) < 1e-4
    mmqc.unload_adapter(both, "second")
    assert torch.equal(logits(both, batch), one)
    with pytest.raises(AdapterError, match=r"no adapter 'second' is on this model; there is default"):
        mmqc.unload_adapter(both, "second")


def test_fold_adapter__writes_what_peft_loads(adapter, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    directory, model, batch, _ = adapter
    q = quantized(model, batch)
    out = mmqc.fold_adapter(q, directory, tmp_path / "folded")
    lora = peft.PeftModel.from_pretrained(copy.deepcopy(q), out)
    mmqc.load_adapter(q, directory)
    assert_close(logits(lora, batch), logits(q, batch))
    with pytest.raises(AdapterError, match=r"is in an mmqc model's basis already"):
        mmqc.load_adapter(q, out, name="twice")
    with pytest.raises(AdapterError, match=r"write the folded one elsewhere"):
        mmqc.fold_adapter(q, directory, directory)


def test_load_adapter__of_a_model_without_rewrites_or_of_several_ranks(tmp_path: Path) -> None:
    model, batch = tiny_qwen2_vl()
    names = targets(model)
    tensors = write_adapter(model, tmp_path, names, use_rslora=True, lora_alpha=2, alpha_pattern={names[0].split(".")[-1]: 4})
    q = quantized(model, batch, recipes.rtn(8))
    alone = copy.deepcopy(q)
    mmqc.load_adapter(q, tmp_path)
    x = torch.randn(2, model.get_submodule(names[0]).in_features)
    for name in (names[0], names[1]):
        term = q.get_submodule(name).terms["default"]
        alpha = 4 if name.split(".")[-1] == names[0].split(".")[-1] else 2
        a, b = (tensors[f"base_model.model.{name}.lora_{f}.weight"] for f in "AB")
        x = torch.randn(2, a.shape[1])
        assert_close(term(x), alpha / 3**0.5 * x @ a.T @ b.T)
        assert_close(q.get_submodule(name)(x), alone.get_submodule(name)(x) + term(x))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "IA3"}, "only LORA"),
    ({"bias": "all"}, "biases of the base model were trained"),
    ({"init_lora_weights": "pissa_niter_4"}, "changed the base weights"),
    ({"use_dora": True}, "use_dora = True: more than low-rank terms"),
    ({"modules_to_save": ["lm_head"]}, r"modules_to_save = \['lm_head'\]"),
    ({"target_parameters": ["gate_up_proj"]}, "target_parameters"),
    ({"corda_config": None, "arrow_config": {"top_k": 3}}, "arrow_config"),
]


@pytest.mark.parametrize(("config", "why"), REFUSED)
def test_load_adapter__refuses_more_than_low_rank_terms(adapter, tmp_path: Path, config: dict[str, Any], why: str) -> None:
    _, model, batch, _ = adapter
    write_adapter(model, tmp_path, targets(model)[:1], **config)
    with pytest.raises(AdapterError, match=why):
        mmqc.load_adapter(rewritten(model, batch, recipes.rtn(8)), tmp_path)


def test_load_adapter__refuses_by_name_and_changes_nothing(adapter, tmp_path: Path) -> None:
    directory, model, batch, _ = adapter
    q, name = quantized(model, batch), targets(model)[0]
    state = {n: t.clone() for n, t in q.state_dict().items()}

    def refused(match: str, of: nn.Module = q, where: Path = tmp_path, **options: Any) -> None:
        with pytest.raises(AdapterError, match=match):
            mmqc.load_adapter(of, where, **options)

    refused(r"has no adapter_config.json: name the directory")
    refused(r"is a float model: pass merge=True", of=model, where=directory)
    refused(r"cannot be merged: its weight is quantized", where=directory, merge=True)
    refused(r"a letter, then letters", where=directory, name="a.b")
    tensors = write_adapter(model, tmp_path, [name])
    from safetensors.torch import save_file

    def edited(change: Any) -> None:
        save_file(change(dict(tensors)), tmp_path / "adapter_model.safetensors")

    edited(lambda t: {k.replace(name, f"elsewhere.{name}"): v for k, v in t.items()})
    refused(rf"is for elsewhere.{name}, but \w+ has .*: was it trained on another one")
    edited(lambda t: {k: v[:, :-1].contiguous() if "lora_A" in k else v for k, v in t.items()})
    refused(rf"{name}: the adapter is for a weight .*, not .*: was it trained on another model")
    edited(lambda t: {k: v * float("nan") for k, v in t.items()})
    refused(rf"{name} holds NaN or infinity")
    edited(lambda t: {k.replace("lora_A.weight", "lora_magnitude_vector.weight"): v for k, v in t.items()})
    refused(rf"{name}.lora_magnitude_vector.weight is no low-rank term")
    embedding = next(n for n, m in q.named_modules() if isinstance(m, nn.Embedding))
    edited(lambda t: {k.replace(name, embedding): v for k, v in t.items()})
    refused(rf"{embedding} is a Embedding: adapters of linears alone")
    assert all(torch.equal(t, state[n]) for n, t in q.state_dict().items())
    assert q.state_dict().keys() == state.keys()


def test_load_adapter__refuses_models_whose_history_is_not_known(adapter) -> None:
    directory, model, batch, _ = adapter
    q = quantized(model, batch)
    changes = q.config.quantization_config.record.pop("changes")
    with pytest.raises(AdapterError, match=r"saved without what the rewrites did to it: quantize the float model"):
        mmqc.load_adapter(q, directory)
    name = f"{targets(model)[0]}.weight"
    q.config.quantization_config.record["changes"] = {**changes, "weights": {**changes["weights"], name: [["unknown", "W + 1"]]}}
    with pytest.raises(AdapterError, match=r"cannot be folded: its weight was changed by 'W \+ 1'"):
        mmqc.load_adapter(q, directory)
    q.config.quantization_config.record = {"passes": [], "read": "awq"}
    with pytest.raises(AdapterError, match=r"read from a checkpoint of awq"):
        mmqc.load_adapter(q, directory)
    q.config.quantization_config.record = {"passes": [], "unseen": [targets(model)[0].rpartition(".")[0]], "changes": changes}
    with pytest.raises(AdapterError, match=r"no calibration batch reached"):
        mmqc.load_adapter(q, directory)
    small = Small()
    mmqc.quantize_(small, recipes.rtn(8), batches(), progress=False)
    write_adapter(Small(), directory / "small", targets(Small()))
    small.config.quantization_config = None
    with pytest.raises(AdapterError, match=r"is a float model|no model of transformers"):
        mmqc.load_adapter(small, directory / "small", merge=True)


def test_quantize__refuses_a_model_with_an_adapter_beside_it(adapter) -> None:
    directory, model, batch, _ = adapter
    changed = rewritten(model, batch, recipes.rotate())
    mmqc.load_adapter(changed, directory)
    with pytest.raises(ValueError, match=r"has an adapter beside it"):
        mmqc.quantize_(changed, recipes.rtn(8), progress=False)


def test_adapted_linear__answers_for_its_base() -> None:
    base = nn.Linear(4, 6)
    adapted = AdaptedLinear(base, {"a": LowRank(torch.randn(2, 4), torch.randn(6, 2), None)})
    assert (adapted.in_features, adapted.out_features) == (4, 6)
    assert adapted.weight is base.weight
    assert adapted.bias is base.bias
    assert json.loads(json.dumps({k: str(v) for k, v in adapted.to_spec().items()}))["names"] == "['a']"
    copied = copy.deepcopy(adapted)
    x = torch.randn(3, 4)
    assert torch.equal(copied(x), adapted(x))
    assert not any(isinstance(m, PackedLinear) for m in copied.modules())
