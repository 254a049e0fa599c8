"""Random residual networks: the exact passes may refuse; they may never be wrong."""

import torch
from float64 import EXACT, output_of, passed, recorded, relative_error, replayed
from hypothesis import HealthCheck, given, settings
from random_models import VOCAB, Network, networks

from mmqc import recipes
from mmqc.pipeline import exact_passes

IDS = {"input_ids": torch.arange(12).reshape(2, 6) % VOCAB}


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(networks())
def test_exact_passes__random_network_computes_the_same(network: Network) -> None:
    prog = recorded(network, IDS)
    expected = output_of(network, IDS)
    assert relative_error(replayed(prog), expected) == 0
    passed(prog, exact_passes(recipes.rotate()))
    assert relative_error(replayed(prog), expected) < EXACT
