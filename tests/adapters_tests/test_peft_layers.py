import copy
import functools
from typing import Any

import pytest
import torch
from models import tiny_qwen2_vl
from often import often
from tolerance import assert_close
from torch import Tensor, nn
from torch.nn import functional as F

import mmqc
from mmqc import recipes
from mmqc.adapters.errors import AdapterError
from mmqc.nn.integer_weight import PackedLinear
from mmqc.nn.linear import HadamardLinear, QuantLinear
from mmqc.ops.straight_through import gradient_of
from mmqc.solvers.quantized import Quantized

peft = pytest.importorskip("peft")

RECIPES: dict[str, Any] = {
    **{f"rtn{bits}": recipes.rtn(bits, group_size=32) for bits in (2, 3, 4, 8)},
    "rtn by channel": recipes.rtn(8),
    "W8A8": recipes.rtn(8, 8),
    "awq": recipes.awq(4, group_size=32),
    "mquant": recipes.mquant(4),
    "float8": recipes.mquant(8).with_float8(),
    "W4A8 float8": recipes.mquant(4).with_float8(),
    "integer scale": recipes.integer_scale(4, 8, group_size=32, amplifier=1024),
    "resq": recipes.resq(),
    "quik": recipes.quik(),
    "rotate": recipes.rotate(),
}


@functools.cache
def made(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    model, batch = tiny_qwen2_vl()
    mmqc.quantize_(model, RECIPES[name], [batch], progress=False)
    return model, batch


def quantized(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    model, batch = made(name)
    return copy.deepcopy(model), batch


class Dequantized(nn.Linear):
    """The float linear that an integer one stands for: its gradients; its value is what the codes gave for these inputs."""

    def __init__(self, of: PackedLinear) -> None:
        super().__init__(of.in_features, of.out_features, bias=of.bias is not None)
        self.of = [of]
        self.weight = nn.Parameter(of.weight.float(), requires_grad=False)
        if of.bias is not None:
            self.bias = nn.Parameter(of.bias.float(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            rounded = self.of[0](x)
        return gradient_of(rounded, F.linear(x, self.weight, self.bias))


def dequantized(model: nn.Module) -> nn.Module:
    model = copy.deepcopy(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, PackedLinear):
            model.set_submodule(name, Dequantized(module))
    return model


def adapted(model: nn.Module, **more: Any) -> Any:
    """With adapters on every linear, B not zero."""
    torch.manual_seed(0)
    model = peft.get_peft_model(model, peft.LoraConfig(**{"target_modules": "all-linear", "r": 4, "lora_alpha": 8, **more}))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
    return model


def gradients(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    out = model(**batch, use_cache=False).logits
    loss = F.cross_entropy(out[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", often(RECIPES, "mquant"))
def test_gradients__are_the_dequantized_models(name: str) -> None:
    model, batch = quantized(name)
    reference = dequantized(model)
    got, want = gradients(adapted(model), batch), gradients(adapted(reference), batch)
    linears = [n for n, m in model.named_modules() if isinstance(m, PackedLinear | HadamardLinear | nn.Linear) and "lora" not in n]
    assert len(got) >= 2 * (len(linears) - 1)  # A and B of all but the head
    assert want.keys() == got.keys()
    for key, grad in want.items():
        assert grad.abs().max() > 0, key
        assert_close(got[key], grad)


@pytest.mark.parametrize("bits", range(2, 9))
def test_gradients__of_one_linear_of_any_bits(bits: int) -> None:
    torch.manual_seed(bits)
    codes = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (6, 10), dtype=torch.int8)
    linear = QuantLinear.from_parts(Quantized(codes, torch.rand(6) + 0.5), weight_bits=bits, bias=torch.randn(6))
    parts = (linear, Dequantized(linear))
    models = [adapted(nn.Sequential(part, nn.LayerNorm(6)), target_modules=["0"]) for part in parts]
    x, upstream = torch.randn(3, 10), torch.randn(3, 6)
    got, want = (torch.autograd.grad(m(x), [p for p in m.parameters() if p.requires_grad], upstream) for m in models)
    assert len(got) == 2
    for a, b in zip(got, want, strict=True):
        assert b.abs().max() > 0
        assert_close(a, b)


def test_all_linear__is_every_linear_but_the_head() -> None:
    model, _ = quantized("mquant")
    linears = {n for n, m in model.named_modules() if isinstance(m, PackedLinear | nn.Linear) and n != "lm_head"}
    lora = adapted(model)
    assert {n for n, m in lora.get_base_model().named_modules() if hasattr(m, "lora_A")} == linears
    second = peft.LoraConfig(target_modules="all-linear", r=2)
    lora.add_adapter("second", second)
    wrapped = {n for n, m in lora.get_base_model().named_modules() if "second" in getattr(m, "lora_A", {})}
    assert wrapped == linears  # the base layers within the first adapter's are no targets of their own


def test_all_linear__of_a_float_model_is_pefts_own() -> None:
    model = adapted(tiny_qwen2_vl()[0])
    assert {type(m).__module__ for m in model.modules() if hasattr(m, "lora_A")} == {"peft.tuners.lora.layer"}


def test_merge__into_codes_is_refused_and_into_a_hadamard_linear_exact() -> None:
    model, batch = quantized("mquant")
    with pytest.raises(AdapterError, match=r"cannot be merged into the codes of QuantLinear.*before quantize_"):
        adapted(model).merge_and_unload()
    model, batch = quantized("rotate")
    assert any(isinstance(m, HadamardLinear) for m in model.modules())
    lora = adapted(model).eval()
    with torch.no_grad():
        before = lora(**batch).logits
        plain = lora.merge_and_unload()
        assert_close(plain(**batch).logits, before)
    assert not any(hasattr(m, "lora_A") for m in plain.modules())


@pytest.mark.parametrize("options", [{"use_dora": True}, {"init_lora_weights": "pissa"}, {"init_lora_weights": "olora"}])
def test_variants__that_need_the_base_weight_are_refused(options: dict[str, Any]) -> None:
    model, _ = quantized("mquant")
    with pytest.raises(ValueError, match=r"variant combination|changes the weight under the adapter"):
        adapted(model, **options)


def test_adapter__is_saved_and_loaded_again(tmp_path) -> None:
    model, batch = quantized("mquant")
    lora = adapted(model).eval()
    with torch.no_grad():
        want = lora(**batch).logits
        lora.save_pretrained(tmp_path)
        again = peft.PeftModel.from_pretrained(quantized("mquant")[0], tmp_path)
        assert torch.equal(again(**batch).logits, want)
        with again.disable_adapter():
            assert torch.equal(again(**batch).logits, quantized("mquant")[0](**batch).logits)


class Rows(torch.utils.data.Dataset):
    """The same batch over and over, as ``Trainer`` wants it."""

    def __init__(self, batch: dict[str, Tensor]) -> None:
        self.batch = {**batch, "labels": batch["input_ids"]}

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.batch


@pytest.mark.parametrize("name", often(("rtn4", "mquant", "resq"), "mquant"))
def test_trainer__ten_steps(name: str, tmp_path) -> None:
    from transformers import Trainer, TrainingArguments

    model, batch = quantized(name)
    codes = {n: b.clone() for n, b in model.named_buffers()}
    lora = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", r=4))
    arguments = TrainingArguments(
        tmp_path, max_steps=10, per_device_train_batch_size=1, learning_rate=1e-2, report_to=[], use_cpu=True, logging_steps=1
    )
    trainer = Trainer(lora, arguments, train_dataset=Rows(batch), data_collator=lambda rows: rows[0])
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(losses) == 10
    assert losses[-1] < 0.9 * losses[0]
    assert all(torch.equal(b, codes[n.replace("base_layer.", "")]) for n, b in lora.get_base_model().named_buffers())


def test_sft_trainer__ten_steps(tmp_path) -> None:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    torch.manual_seed(0)
    model, _ = quantized("mquant")
    text = [{"input_ids": row.tolist()} for row in torch.randint(10, 60, (8, 12))]
    arguments = trl.SFTConfig(
        tmp_path,
        max_steps=10,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        logging_steps=1,
        bf16=False,
    )
    trainer = trl.SFTTrainer(
        model,
        arguments,
        train_dataset=datasets.Dataset.from_list(text),
        processing_class=tokenizer(),
        peft_config=peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4),
    )
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(losses) == 10
    assert losses[-1] < losses[0]


class Router(nn.Linear):
    """As Llama4's: peft would add to the pair."""

    def forward(self, x: Tensor) -> Any:
        scores = super().forward(x)
        return scores.sigmoid(), scores


def test_peft__all_linear_leaves_out_what_returns_more_than_a_linear() -> None:
    model, _ = quantized("rtn8")
    model.router = Router(8, 4)
    with pytest.warns(UserWarning, match=r"no adapter for router, a Router: "):
        lora = adapted(model)
    assert type(lora.base_model.model.router) is Router
    assert any("lora_A" in name for name, _ in lora.named_parameters())


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(512)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, "w0")), pad_token="w0", eos_token="w2")
