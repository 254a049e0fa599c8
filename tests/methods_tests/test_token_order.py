"""Modality order through torch.compile against sequence order: float32 models without scales, tagged by hand."""

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from models import IMAGE, VIDEO, VISION_END, VISION_START, randomise, tiny_qwen2_vl
from often import often
from quantized_vlm import quantized_vlm
from torch import Tensor, fx, nn
from transformers import AutoModelForImageTextToText, DynamicCache, Gemma3Config, PaliGemmaConfig

from mmqc.compiler.options import CompileOptions
from mmqc.compiler.run_time import rewrite_at_run_time
from mmqc.graph.program import PassRecord
from mmqc.nn.modality import ModalityContext

BOUND = 1e-5  # relative, on the logits
TEXT = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 108,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION = {
    "hidden_size": 64,
    "intermediate_size": 108,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def tagged(model: nn.Module, decoder: nn.Module, ids: tuple[int, ...]) -> nn.Module:
    """The model with the visual mask in its decoder's graph."""
    context = ModalityContext.attach(model, ids)

    def tag(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if context.visual is None:
            return args, kwargs
        return args, {**kwargs, "inputs_embeds": torch.ops.mmqc.tag_modality(kwargs["inputs_embeds"], context.visual)}

    decoder.register_forward_pre_hook(tag, with_kwargs=True)
    return model


@functools.cache
def qwen(grids: tuple = ((1, 4, 6), (1, 8, 4))) -> tuple[nn.Module, dict[str, Any]]:
    model, batch = tiny_qwen2_vl(grids=grids, depth=1)
    return tagged(model, model.model.language_model, (IMAGE, VIDEO)), batch


@functools.cache
def gemma() -> tuple[nn.Module, dict[str, Any]]:
    layers = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
    config = Gemma3Config(
        text_config={**TEXT, **layers},
        vision_config=VISION,
        image_token_index=IMAGE,
        mm_tokens_per_image=4,
        boi_token_index=VISION_START,
        eoi_token_index=VISION_END,
    )
    return bidirectional(config, 4)


@functools.cache
def paligemma() -> tuple[nn.Module, dict[str, Any]]:
    text = {**TEXT, "model_type": "gemma", "num_key_value_heads": 1}
    config = PaliGemmaConfig(text_config=text, vision_config=VISION, image_token_index=IMAGE, projection_dim=64)
    return bidirectional(config, 16)


def bidirectional(config: Any, tokens: int) -> tuple[nn.Module, dict[str, Any]]:
    """A model whose image tokens see each other, and 'image text' beside padding."""
    torch.manual_seed(0)
    model = randomise(AutoModelForImageTextToText.from_config(config).float().eval())
    words = torch.randint(10, 400, (2, 9), generator=torch.Generator().manual_seed(3))
    ids = torch.cat((words[:, :2], torch.full((2, tokens), IMAGE), words[:, 2:]), 1)
    ids[1, -3:] = 0
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    kinds = (ids == IMAGE).long()
    batch = {"input_ids": ids, "attention_mask": (ids != 0).long(), "token_type_ids": kinds, "pixel_values": pixels}
    return tagged(model, model.model.language_model, (IMAGE,)), batch


ATTENTIONS = ("gather", "unified")
OF_ONE_QUERY = ("fold_query_groups", "split_attention")


class Compiled:
    """A model under modality order, traced once for both ways of attention; ``records`` are those of all graphs, by the way."""

    def __init__(self, model: nn.Module) -> None:
        self.records: dict[str, list[PassRecord]] = {attention: [] for attention in ATTENTIONS}
        self.model, self.attention = model, ATTENTIONS[0]
        self.traced: Callable[..., Any] = torch.compile(model, backend=self.backend)

    def backend(self, gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        made: dict[str, Callable[..., Any]] = {}
        for attention in ATTENTIONS:
            request = CompileOptions.read(None, {"token_order": "modality", "attention_order": attention})
            changed, records, *_ = rewrite_at_run_time(copy.deepcopy(gm), inputs, request)
            self.records[attention] += records
            made[attention] = changed.forward
        return lambda *args: made[self.attention](*args)

    def call(self, attention: str) -> Callable[..., Any]:
        """The model, compiled with this way of attention."""

        def run(**batch: Any) -> Any:
            self.attention = attention
            return self.traced(**batch)

        return run

    def sites(self, name: str, attention: str) -> list[str]:
        return [s for r in self.records[attention] if r.name == name for s in r.sites]


def without_first(batch: dict[str, Any], n: int) -> dict[str, Any]:
    """The batch without its first text tokens."""
    cut = {k: v[:, n:] for k, v in batch.items() if k in ("input_ids", "attention_mask", "mm_token_type_ids")}
    return {**batch, **cut}


def padded(left: bool) -> tuple[nn.Module, dict[str, Any]]:
    """Two sequences of different lengths and layouts, three images in all."""
    model, batch = qwen(((1, 4, 6), (1, 8, 4), (1, 4, 4)))
    ids = batch["input_ids"][0]
    ends = (ids == VISION_END).nonzero().flatten().tolist()
    rows = [ids[: ends[1] + 3], ids[ends[1] + 2 :]]
    width = max(map(len, rows))
    pad = lambda r: torch.cat((torch.zeros(width - len(r), dtype=r.dtype), r)[:: 1 if left else -1])  # noqa: E731
    both = torch.stack([pad(r) for r in rows])
    kinds = (both == IMAGE).int()
    return model, {**batch, "input_ids": both, "attention_mask": (both != 0).long(), "mm_token_type_ids": kinds}


def video() -> tuple[nn.Module, dict[str, Any]]:
    model, batch = qwen(((2, 4, 6),))
    pixels, grid = batch["pixel_values"], batch["image_grid_thw"]
    ids = torch.where(batch["input_ids"] == IMAGE, VIDEO, batch["input_ids"])
    kinds = (ids == VIDEO).int() * 2
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": kinds}
    return model, {**given, "pixel_values_videos": pixels, "video_grid_thw": grid}


CASES: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "one image": lambda: qwen(((1, 4, 6),)),
    "several images": qwen,
    "image first": lambda: (qwen()[0], without_first(qwen()[1], 7)),
    "image last": lambda: (
        m := qwen(((1, 4, 6),)),
        (
            m[0],
            without_first(m[1], 0)
            | {k: v[:, :-5] for k, v in m[1].items() if k in ("input_ids", "attention_mask", "mm_token_type_ids")},
        ),
    )[1],
    "video": video,
    "left padding": lambda: padded(True),
    "right padding": lambda: padded(False),
    "sliding window and bidirectional images": gemma,
    "bidirectional prefix": paligemma,
}


OFTEN = ("several images",)


@pytest.mark.parametrize("case", often(CASES, *OFTEN))
@torch.no_grad()
def test_token_order__logits(case: str) -> None:
    model, batch = CASES[case]()
    compiled = Compiled(model)
    keep = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    expected = model(**batch).logits[keep]
    for attention in ATTENTIONS:
        got = compiled.call(attention)(**batch).logits[keep]
        assert ((got - expected).norm() / expected.norm()).item() < BOUND, attention
        assert len(compiled.sites("reorder_tokens", attention)) == 1
        masks = [r for r in compiled.records[attention] if r.name == "rewrite_mask"]
        assert sum(r.n_sites + len(r.misses) for r in masks) == (2 if attention == "unified" else 1)


@pytest.mark.parametrize("length", often((1, 10), 10))
def test_token_order__text_only_and_one_token_are_left_alone(length: int) -> None:
    model, _ = qwen()
    compiled = Compiled(model)
    ids = torch.arange(20, 20 + length)[None]
    with torch.no_grad():
        got, expected = (call(input_ids=ids, use_cache=False).logits for call in (compiled.call("gather"), model))
    assert torch.equal(got, expected)
    assert [record for record in compiled.records["gather"] if record.name not in OF_ONE_QUERY] == []


@pytest.mark.slow
def test_token_order__second_image_on_a_cache() -> None:
    model, batch = qwen()
    cut = int((batch["input_ids"][0] == VISION_END).nonzero()[0]) + 3
    patches = int(batch["image_grid_thw"][0].prod())
    compiled = Compiled(model)

    def turns(call: Callable[..., Any]) -> Tensor:
        cache, logits = DynamicCache(), []
        for part, pixels, image in ((slice(0, cut), slice(0, patches), 0), (slice(cut, None), slice(patches, None), 1)):
            logits.append(
                call(
                    input_ids=batch["input_ids"][:, part],
                    attention_mask=batch["attention_mask"][:, : part.stop],
                    mm_token_type_ids=batch["mm_token_type_ids"][:, part],
                    pixel_values=batch["pixel_values"][pixels],
                    image_grid_thw=batch["image_grid_thw"][image : image + 1],
                    past_key_values=cache,
                    position_ids=torch.arange(part.start, part.stop or len(batch["input_ids"][0])).expand(3, 1, -1),
                ).logits
            )
        return torch.cat(logits, 1)

    with torch.no_grad():
        expected = turns(model)
        for attention in ATTENTIONS:
            got = turns(compiled.call(attention))
            assert ((got - expected).norm() / expected.norm()).item() < BOUND, attention
            assert len(compiled.sites("reorder_tokens", attention)) >= 2


@pytest.mark.slow
def test_token_order__quantized_model_generates_the_same_tokens() -> None:
    model, batch = quantized_vlm(depth=1)
    compiled = Compiled(model)
    for how in ({}, {"num_beams": 2}, {"cache_implementation": "static"}):
        expected = model.generate(**batch, max_new_tokens=4, do_sample=False, **how)
        model.compile(backend=compiled.backend)
        for compiled.attention in ATTENTIONS:
            got = model.generate(**batch, max_new_tokens=4, do_sample=False, **how)
            assert torch.equal(got, expected), (how, compiled.attention)
        model._compiled_call_impl = None
    for attention in ATTENTIONS:
        assert len(compiled.sites("reorder_tokens", attention)) >= 2
