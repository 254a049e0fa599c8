import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from blocks import MODELS, VOCAB, WIDTH, RMSNorm, ids
from float64 import EXACT, output_of, passed, recorded, relative_error, replayed
from models import randomise
from often import often
from tiny_families import FAMILIES
from torch import Tensor, nn

import mmqc
from mmqc import recipes
from mmqc.graph.program import READ
from mmqc.graph.record import RecordError, record
from mmqc.pipeline import exact_passes


@pytest.mark.parametrize("family", FAMILIES)
def test_record__replay_is_bit_equal(family: str) -> None:
    model, batch = FAMILIES[family]()
    model(**batch, use_cache=False)  # some models put hooks of their own in place at their first call
    hooks = {name: (len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in model.named_modules()}
    prog = record(model, {**batch, "use_cache": False})
    with torch.no_grad():
        assert torch.equal(prog.replay()[0], model(**batch, use_cache=False).logits)
        assert torch.equal(prog.replay()[0], prog.replay()[0])
    assert hooks == {name: (len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in model.named_modules()}
    names = {n for n, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())}
    assert {n for n in prog.weights if not n.startswith("_constant_")} <= names


@pytest.mark.parametrize("family", often(FAMILIES, "qwen2_vl", "internvl"))
def test_record__exact_passes_keep_the_family_exact(family: str) -> None:
    model, batch = FAMILIES[family]()
    prog = recorded(model, {**batch, "use_cache": False})
    expected = output_of(*(model, {**_wide(batch), "use_cache": False}))
    assert relative_error(replayed(prog), expected) == 0
    passed(prog, exact_passes(recipes.rotate()))
    assert relative_error(replayed(prog), expected) < EXACT
    rotated = {s.split(":")[0] for r in prog.records if r.name == "fuse_rotation" for s in r.sites}
    assert rotated >= {f"space of {width}" for width in STREAMS[family]}


STREAMS = {
    "qwen2_vl": (64, 96),
    "llava": (64,),
    "internvl": (64,),
    "gemma3_text": (),
    "olmo2": (),
    "mixtral": (),
    "gpt_neox": (64,),
}


def _wide(batch: dict[str, Any]) -> dict[str, Any]:
    return {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}


@pytest.mark.parametrize("case", MODELS)
def test_record__hand_written_models(case: str) -> None:
    model, batch = MODELS[case]()
    prog = record(model, batch)
    with torch.no_grad():
        assert torch.equal(prog.replay()[0], model(**batch))


class Small(nn.Module):
    """Things that a forward may do to tensors."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.a, self.b = how, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.table = torch.arange(float(WIDTH), dtype=torch.float64)
        self.hidden = [torch.randn(WIDTH)]

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.how == "views":
            h[:, :2] += 1
            h[0].mul_(2)
            h.view(-1)[3:5] = 7
            h[:, 1, :] = self.b(h)[:, 0]
        elif self.how == "views_read_before":
            part = h[:, 1:]
            h.add_(self.b(x))
            h = h[:, :-1] + part
        elif self.how == "data":
            n = int(h.abs().max().item() * 0) + 2
            h = torch.cat([h[:, i] for i in torch.arange(n).tolist()], -1)
        elif self.how == "structures":
            first, second = torch.chunk(h, 2, dim=-1)
            values, index = torch.topk(second, k=3, dim=-1)
            h = torch.cat((first, values + index), -1).mT.mT
        elif self.how == "inplace_flag":
            nn.functional.relu(h, inplace=True)
            torch.mul(h, self.b(h), out=h)
        elif self.how == "attribute":
            h = h + self.table
        elif self.how == "scalar":
            h = h * torch.tensor(0.5) + torch.finfo(h.dtype).eps
        elif self.how == "nowhere":
            h = self.b(h + self.hidden[0])
        return h


@pytest.mark.parametrize("how", ["views", "views_read_before", "data", "structures", "inplace_flag", "attribute", "scalar"])
def test_record__whatever_a_forward_does(how: str) -> None:
    model, x = Small(how), torch.randn(3, 4, WIDTH)
    prog = record(model, {"x": x.clone()})
    with torch.no_grad():
        expected = model(x.clone())
        for _ in range(2):
            assert torch.equal(prog.replay()[0], expected)


@pytest.mark.parametrize("how", ["views", "views_read_before", "structures", "inplace_flag", "attribute", "scalar"])
def test_record__whatever_a_forward_does_stays_exact(how: str) -> None:
    prog = recorded(Small(how), {"x": torch.randn(3, 4, WIDTH)})
    expected = replayed(prog)
    passed(prog, exact_passes(recipes.rotate()))
    assert relative_error(replayed(prog), expected) < EXACT


def test_record__tensor_from_nowhere_names_module_call_and_shape() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Small("nowhere")

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    model = Outer()
    with pytest.raises(RecordError, match=r"float tensor of shape \(16,\) enters add in inner from nowhere: neither"):
        record(model, {"x": torch.randn(2, 3, WIDTH)})
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def test_record__inputs_are_kept_as_they_were() -> None:
    class InPlace(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.add_(1)

    prog = record(InPlace(), {"x": torch.zeros(2, 2)})
    assert prog.inputs[0].eq(0).all()
    assert prog.replay()[0].eq(1).all()
    assert prog.replay()[0].eq(1).all()


def test_record__shared_tensors_go_by_the_running_modules_name() -> None:
    model, batch = MODELS["vlm"]()
    prog = record(model, batch)
    assert prog.tied == dict.fromkeys(("text.embed.weight", "text.head.weight"), ("text.embed.weight", "text.head.weight")) or (
        set(prog.tied) == {"text.embed.weight", "text.head.weight"}
    )
    assert prog.hosts["layer_norm"] == {n for n, m in model.named_modules() if isinstance(m, nn.LayerNorm)}


def test_record__nodes_know_their_module() -> None:
    model, batch = MODELS["rms_gqa"]()
    prog = record(model, batch)
    assert {n.meta["module"] for n in prog.nodes("linear")} == {n for n, m in model.named_modules() if isinstance(m, nn.Linear)}


class Looks(nn.Module):
    """A stream that ``look`` may take values out of; what it answers decides."""

    def __init__(self, look: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.look, self.embed, self.norm = look, nn.Embedding(VOCAB, WIDTH), RMSNorm()
        self.linear, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        x = x * 3 if self.look(x) else x
        return self.head(self.norm(x + self.linear(self.norm(x))))


LOOKS: dict[str, Callable[[Tensor], object]] = {
    "bool": lambda x: bool(x[0, -1, 0] > 0.5),
    "branch": lambda x: (x > 2.5).any(),
    "item": lambda x: x[0, -1, 0].item() > 0.5,
    "float": lambda x: float(x.mean()) > 0.01,
    "int": lambda x: int(x[0, 0, 0] * 3) == 1,
    "tolist": lambda x: x[0, -1].tolist()[0] > 0.5,
    "numpy": lambda x: x[0, -1].numpy()[0] > 0.5,
    "argmax": lambda x: x[0, -1].argmax().item() % 2 == 0,
    "equal": lambda x: torch.equal(x[0, 0], x[0, 1]),
    "contains": lambda x: 0.5 in x,
    "norm": lambda x: x.norm().item() > 10,
    "rows of a mask": lambda x: len(x[0, :, 0][x[0, :, 0] > 0.5]) > 2,
    "nonzero": lambda x: (x[0, -1, :1] > 0.5).nonzero().numel() > 0,
    "where": lambda x: torch.where(x[0, :, 0] > 0.5)[0].numel() > 2,
    "argwhere": lambda x: torch.argwhere(x[0, :, 0] > 0.5).size(0) > 2,
    "masked_select": lambda x: torch.masked_select(x[0, :, 0], x[0, :, 0] > 0.5).shape[0] > 2,
    "unique": lambda x: len(torch.unique(x[0, :2, 0] > 0.5)) > 1,
    "format": lambda x: f"{x[0, -1, 0]:.1f}" > "0.5",
    "repr": lambda x: "-" in repr(x[0, -1, :1]),
}


@pytest.mark.parametrize("how", LOOKS)
def test_record__what_python_looks_at_is_read(how: str) -> None:
    """A branch that calibration does not take is taken, or not, as the float model does."""
    model = randomise(Looks(LOOKS[how])).double()
    plain = copy.deepcopy(model)
    report = mmqc.quantize_(model, recipes.rotate(), [ids()], progress=False)
    assert any("Python looks at" in r.reason or "does not commute" in r.reason for r in report.refused)
    for seed in range(20):
        assert relative_error(output_of(model, ids(seed=seed)), output_of(plain, ids(seed=seed))) < EXACT


def test_record__what_python_may_ask_without_looking_pins_nothing() -> None:
    asks = lambda x: x.dim() == x.stride(0) == len(x) or (x.is_contiguous() and x.dtype is None) or x.numel() < 2  # noqa: E731
    prog = record(randomise(Looks(asks)), ids())
    assert not any(READ in n.meta for n in prog.graph.nodes)
    prog = record(randomise(Looks(lambda x: torch.arange(3).sum().item() > 9)), ids())
    assert not any(READ in n.meta for n in prog.graph.nodes), "no float went into it"


@pytest.mark.parametrize("kind", ["forward", "pre"])
def test_record__a_hook_that_looks_sees_what_it_saw(kind: str) -> None:
    model, seen = randomise(Looks(lambda x: False)).double(), []
    if kind == "forward":
        model.norm.register_forward_hook(lambda m, args, output: seen.append(output))
    else:
        model.linear.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    expected = output_of(model, ids())
    before = [t.clone() for t in seen]
    report = mmqc.quantize_(model, recipes.rotate(), [ids()], progress=False)
    seen.clear()
    assert relative_error(output_of(model, ids()), expected) < EXACT
    for now, was in zip(seen, before, strict=True):
        torch.testing.assert_close(now, was)
    assert any("hook of" in r.reason for r in report.refused)


@pytest.mark.filterwarnings("error")
def test_record__an_error_of_a_hook_in_front_comes_out_alone() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    def refuse(module: nn.Module, args: Any) -> None:
        raise KeyError("mine")

    handle = model[0].register_forward_pre_hook(refuse)
    with pytest.raises(KeyError, match="mine"):
        record(model, {"input": torch.randn(2, WIDTH)})
    handle.remove()
    record(model, {"input": torch.randn(2, WIDTH)})


class Chooses(nn.Module):
    """Takes one of two linears by a value that it looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if x[0, 0, 0].item() > 0 else self.b(x)


class Twice(nn.Module):
    """The same choice twice: which linear is the first and which the second is another thing in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.choose, self.head = nn.Embedding(VOCAB, WIDTH), Chooses(), nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.choose(self.choose(self.embed(input_ids))))


@pytest.mark.parametrize("seed", range(4))
def test_record__what_a_deciding_module_sees_stays_as_it_is(seed: int) -> None:
    """Every linear was reached, but not in every place."""
    model = randomise(Twice(), seed).double()
    plain = copy.deepcopy(model)
    mmqc.quantize_(model, recipes.rotate(), [ids()], progress=False)
    for other in range(20):
        assert relative_error(output_of(model, ids(seed=other)), output_of(plain, ids(seed=other))) < EXACT


class Sinusoidal(nn.Module):
    """Positions from a table that no checkpoint has, as Kosmos-2's, in front of linears."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layer = nn.Sequential(RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
        self.register_buffer("table", torch.randn(32, WIDTH), persistent=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids) + self.table[: input_ids.shape[1]]
        return self.head(x + self.layer(x))


def test_record__a_table_that_no_checkpoint_has_is_not_rewritten() -> None:
    """It would be made anew where the model is loaded, and not fit what was rewritten around it."""
    model, batch = Sinusoidal().double().eval(), ids()
    table, expected = model.table.clone(), model(**batch)
    mmqc.quantize_(model, recipes.rotate(), calibration=[batch], progress=False)
    assert torch.equal(model.table, table)
    assert relative_error(model(**batch), expected) < EXACT
    fresh = Sinusoidal().double()
    fresh.register_buffer("table", table, persistent=False)
    fresh.load_state_dict(model.state_dict(), strict=False)
    assert relative_error(fresh(**batch), expected) < EXACT


class Holes(nn.Module):
    """Takes the tokens that a mask leaves, which has a float's shape and is written into, as UDOP's patches under words."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.layer(self.embed(input_ids))
        left = torch.full_like(x[..., 0], True).bool()
        left[:, :2] = False
        left[0, 4:][:1] = False
        return self.head(x[left])


def test_record__a_mask_that_is_made_of_a_float_and_written_into() -> None:
    model, batch = Holes().double().eval(), ids()
    expected = model(**batch)
    before = model.layer.weight.clone()
    mmqc.quantize_(model, recipes.rotate(), calibration=[batch], progress=False)
    assert not torch.equal(model.layer.weight, before)
    assert relative_error(model(**batch), expected) < EXACT


class Overwriting(nn.Module):
    """Whose ``generate`` writes into the ids that it is given, as BLIP's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)

    def can_generate(self) -> bool:
        return True

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Tensor:
        return self.head(self.embed(input_ids))

    def generate(self, input_ids: Tensor, **options: Any) -> Any:
        input_ids[:, 0] = 1
        return SimpleNamespace(logits=(self(input_ids)[:, -1],))


def test_record__a_batch_stays_as_it_is_where_generate_writes_into_it() -> None:
    model, batch = Overwriting(), ids()
    before = batch["input_ids"].clone()
    prog = record(model, batch, decode=True)
    assert not prog.notes
    assert torch.equal(batch["input_ids"], before)
    prog.replay(values=False)
    assert torch.equal(prog.replay()[0], model(before))
