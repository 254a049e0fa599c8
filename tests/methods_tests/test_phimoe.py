"""Phi-3.5-MoE: its router masks scores by ``scatter`` with a number, and a LayerNorm feeds router and experts."""

import pytest
import torch
from float64 import EXACT, output_of, passed, recorded, relative_error, replayed
from models import randomise
from torch import nn
from transformers import PhimoeConfig, PhimoeForCausalLM

import mmqc
from mmqc.graph.record import record
from mmqc.graph.spaces.spaces import Spaces
from mmqc.pipeline import exact_passes

BATCH = {"input_ids": torch.arange(24).reshape(2, 12)}


def phimoe() -> nn.Module:
    config = PhimoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        max_position_embeddings=64,
        original_max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return randomise(PhimoeForCausalLM(config)).eval()


@pytest.mark.parametrize("recipe", [mmqc.recipes.rotate(), mmqc.recipes.mquant()], ids=["rotate", "mquant"])
def test_phimoe__exact_passes_in_float64(recipe: mmqc.QuantConfig) -> None:
    model = phimoe()
    prog = recorded(model, BATCH)
    expected = output_of(model, BATCH)
    passed(prog, exact_passes(recipe))
    assert prog.changed
    assert relative_error(replayed(prog), expected) < EXACT


def test_phimoe__quantized_with_its_experts() -> None:
    model = phimoe()
    report = mmqc.quantize_(model, mmqc.recipes.rtn(8), [BATCH], progress=False)
    assert sum(layer.role == "experts" for layer in report.layers) == 4
    assert report.rewrite_error == 0


class Masked(nn.Module):
    """A stream of 8 channels; channel 5 of what is added to it is overwritten by ``value``."""

    def __init__(self, value: float, keyword: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)
        self.value, self.keyword = value, keyword

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        index = torch.full((len(x), 1), 5)
        h = h.scatter(-1, index, value=self.value) if self.keyword else torch.scatter(h, -1, index, self.value)
        return self.down(h)


@pytest.mark.parametrize("keyword", [False, True])
@pytest.mark.parametrize("value", [float("-inf"), 2.5, 3, 0.0])
def test_scatter_of_a_number__is_a_constant_of_its_own(value: float, keyword: bool) -> None:
    spaces = Spaces.of(record(Masked(value, keyword), {"x": torch.randn(3, 4)}))
    read = {int(c) for s in spaces for t in s.readers if t.fqn == "down.weight" for c in t.groups.flatten()}
    assert 5 not in read if value else True
    assert read & {0, 1, 2, 3, 4, 6, 7}
