"""Random residual networks: the exact passes may refuse; they may never be wrong."""

import torch
from float64 import EXACT, output_of, passed, recorded, relative_error, replayed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_models import VOCAB, Network, networks
from torch import Tensor, nn

import mmqc
from mmqc import recipes
from mmqc.pipeline import exact_passes

IDS = {"input_ids": torch.arange(12).reshape(2, 6) % VOCAB}


@settings(max_examples=30, derandomize=True, suppress_health_check=list(HealthCheck))
@given(networks(), st.booleans())
def test_exact_passes__random_network_computes_the_same(network: Network, everywhere: bool) -> None:
    prog = recorded(network, IDS)
    expected = output_of(network, IDS)
    assert relative_error(replayed(prog), expected) == 0
    passed(prog, exact_passes(recipes.rotate(everywhere=everywhere)))
    assert relative_error(replayed(prog), expected) < EXACT


class Called(nn.Module):
    """A network with a transformers model's way to be called."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def forward(self, input_ids: Tensor, use_cache: bool = True) -> Tensor:
        return self.network(input_ids)


@settings(max_examples=15, derandomize=True, suppress_health_check=list(HealthCheck))
@given(networks(), st.booleans())
def test_exact_passes__random_network_written_back_computes_the_same(network: Network, everywhere: bool) -> None:
    model = Called(network).double()
    batches = [IDS, {"input_ids": (7 * IDS["input_ids"] + 3) % VOCAB}]
    expected = [output_of(model, batch) for batch in batches]
    mmqc.quantize_(model, recipes.rotate(everywhere=everywhere), [IDS], progress=False)
    for batch, before in zip(batches, expected, strict=True):
        assert relative_error(output_of(model, batch), before) < EXACT
