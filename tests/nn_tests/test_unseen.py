import copy

import pytest
import torch
from blocks import VOCAB, WIDTH, RMSNorm, ids
from float64 import EXACT, output_of, relative_error, to_float64
from models import randomise, tiny_qwen2_vl
from torch import Tensor, nn

import mmqc
from mmqc.nn.unseen import Reached, UnseenError, unseen, unsure_weights


class Routed(nn.Module):
    """A list of linears of which the forward takes those that ``used`` names, in parallel or one after the other."""

    def __init__(self, used: tuple[int, ...], chained: bool = False) -> None:
        super().__init__()
        self.used, self.chained = used, chained
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.norm, self.last = RMSNorm(), RMSNorm()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for i in self.used:
            x = x + self.experts[i](self.norm(x))
        return self.head(self.last(x))


def quantized(used: tuple[int, ...]) -> tuple[nn.Module, mmqc.QuantReport]:
    model = randomise(Routed(used)).double()
    expected = output_of(model, ids())
    report = mmqc.quantize_(model, mmqc.recipes.rotate(), [ids()], progress=False)
    assert relative_error(output_of(model, ids()), expected) < EXACT
    return model, report


def test_unseen__stream_of_an_expert_that_was_not_reached_is_left_alone() -> None:
    before = randomise(Routed((0, 2))).double()
    model, report = quantized((0, 2))
    reasons = {r.fqn: r.reason for r in report.refused}
    assert "no recorded batch reached experts.1" in reasons["experts.0.weight"]
    model.used = before.used = (0, 1, 2, 3)
    assert relative_error(output_of(model, ids()), output_of(before, ids())) < EXACT


def test_unseen__last_of_a_list_refuses_to_run() -> None:
    model, report = quantized((0, 1))
    unreached = {r.fqn for r in report.refused if "no recorded batch" in r.reason}
    assert unreached == {"experts.2", "experts.3"}
    model.used = (0, 1, 2)
    with pytest.raises(UnseenError, match=r"experts\.2 ran, but no batch .* reached it"):
        output_of(model, ids())


def test_unseen__names() -> None:
    model = Routed((0,))

    def reached(*experts: int) -> Reached:
        parts = [model.embed, model.norm, model.last, model.head, *(model.experts[i] for i in experts)]
        return Reached.by([f"experts.{i}" for i in experts], [p for part in parts for p in part.parameters()])

    assert unseen(model, reached(0, 1)) == ["experts.2", "experts.3"]
    assert unsure_weights(model, reached(0, 1)) == {}
    assert set(unsure_weights(model, reached(1))) == {"experts.1.weight", "experts.1.bias"}
    assert unseen(model, reached(1)) == []
    assert unsure_weights(model, reached(0, 1, 2, 3)) == {}


class Branches(nn.Module):
    """Ways into and out of a rotated stream that only ``how`` opens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head, self.norm, self.inner = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB), RMSNorm(), Inner()
        self.writer, self.bend, self.dropout = nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout()
        self.token, self.tokens = nn.Parameter(torch.ones(WIDTH)), nn.ParameterList([nn.Parameter(torch.ones(WIDTH))])
        self.named = nn.ModuleDict({"used": nn.Linear(WIDTH, WIDTH), "other": nn.Linear(WIDTH, WIDTH)})

    def forward(self, input_ids: Tensor, how: str = "") -> Tensor:
        x = self.embed(input_ids)
        x = x + self.named["used"](self.norm(x))
        if how in ("writer", "bend", "dropout"):
            x = x + getattr(self, how)(x)
        elif how == "named.other":
            x = x + self.named["other"](x)
        elif how:
            x = x + (self.token if how == "token" else self.tokens[0])
        return self.head(self.norm(x + self.inner(x)))


class Inner(nn.Module):
    """What nothing but its own linears can see: 24 channels."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.extra = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.nn.functional.gelu(self.up(x)))


@pytest.mark.parametrize("how", ["writer", "bend", "named.other", "token", "tokens.0"])
def test_unseen__what_no_batch_reached_refuses_to_run(how: str) -> None:
    model = randomise(Branches()).double()
    expected = output_of(model, ids())
    report = mmqc.quantize_(model, mmqc.recipes.rotate(), [ids()], progress=False)
    assert relative_error(output_of(model, ids()), expected) < EXACT
    barred = {r.fqn for r in report.refused if "raises if it runs" in r.reason}
    assert barred == {"writer", "bend", "named.other", "token", "tokens.0", "inner.extra"}
    for copied in (model, copy.deepcopy(model)):
        with pytest.raises(UnseenError, match=rf"{how} .*no batch that this model was quantized with reached it"):
            output_of(copied, {**ids(), "how": how})
    output_of(model, {**ids(), "how": "dropout"})  # the identity
    model.load_state_dict({k: v.float() for k, v in model.state_dict().items()}, assign=True)
    assert isinstance(model, Branches)
    assert {"token", "tokens.0"} <= dict(model.named_parameters()).keys()


def test_unseen__what_sees_no_changed_space_may_run() -> None:
    """AWQ's factors stay inside the decoder's layers: a tower that writes into the residual stream goes on."""
    model, batch = to_float64(*tiny_qwen2_vl())
    text = {"input_ids": batch["input_ids"].clamp(max=20), "attention_mask": torch.ones_like(batch["input_ids"])}
    expected = output_of(model, batch)
    report = mmqc.quantize_(model, mmqc.recipes.awq(8, solver="rtn"), [text], progress=False)
    assert any("visual" in r.fqn and "no recorded batch" in r.reason for r in report.refused)
    assert relative_error(output_of(model, batch), expected) < 0.05


@pytest.mark.parametrize("recipe", [mmqc.recipes.rotate(), mmqc.recipes.mquant(8, msq=False, solver="rtn"), mmqc.recipes.resq(8)])
def test_unseen__text_alone_bars_images_from_a_rotated_stream(recipe: mmqc.QuantConfig) -> None:
    model, batch = to_float64(*tiny_qwen2_vl())
    text = {"input_ids": batch["input_ids"].clamp(max=20), "attention_mask": torch.ones_like(batch["input_ids"])}
    mmqc.quantize_(model, recipe, [text], progress=False)
    output_of(model, text)
    with pytest.raises(UnseenError, match="visual ran, but no batch"):
        output_of(model, batch)


def test_unseen__a_second_batch_reaches_what_the_first_does_not() -> None:
    class ByLength(Routed):
        def forward(self, input_ids: Tensor) -> Tensor:
            self.used = (0, 1, 2, 3) if input_ids.shape[1] == 3 else (0, 2)
            return super().forward(input_ids)

    model = randomise(ByLength((0,))).double()
    batches = [{"input_ids": torch.arange(n)[None]} for n in (4, 3)]
    expected = [output_of(model, b) for b in batches]
    report = mmqc.quantize_(model, mmqc.recipes.rotate(), batches, progress=False)
    assert not any("no recorded batch" in r.reason for r in report.refused)
    for batch, before in zip(batches, expected, strict=True):
        assert relative_error(output_of(model, batch), before) < EXACT


def test_unseen__is_refused_after_loading_too(tmp_path) -> None:
    """Quantized with text alone, saved, loaded: an image meets a rotated stream."""
    model, inputs = tiny_qwen2_vl()
    text = {"input_ids": torch.arange(5, 15)[None], "attention_mask": torch.ones(1, 10, dtype=torch.long)}
    mmqc.quantize_(model, mmqc.recipes.rotate(), [text], progress=False)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(again(**text).logits, model(**text).logits)
    for one in (model, again):
        with pytest.raises(UnseenError, match=r"model\.visual ran, but no batch"):
            one(**inputs)
