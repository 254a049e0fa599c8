import math

import pytest
import torch
from tolerance import assert_close

from mmqc.ops.hadamard_matrix import hadamard_cost, hadamard_factors, hadamard_kind, plan

CORES = (12, 20, 28, 36, 40, 44, 52, 60, 68, 76, 92, 108, 116, 140, 148, 172)
MODELS = {  # widths of residual streams, heads and MLPs of published models
    768: "H12 x H64",
    1280: "H20 x H64",
    3072: "H12 x H256",
    3584: "H28 x H128",
    5120: "H20 x H256",
    11008: "H172 x H64",
    18944: "H148 x H128",
    4304: "DHT269 x H16",
    64: "H64",
    1: "H1",
}


def dense(factors: list[torch.Tensor]) -> torch.Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    for factor in factors:
        matrix = torch.kron(matrix, factor)
    return matrix


@pytest.mark.parametrize("n", range(1, 131))
def test_hadamard_factors__orthogonal_and_flat(n: int) -> None:
    matrix = dense(hadamard_factors(n))
    assert_close(matrix @ matrix.T, torch.eye(n, dtype=torch.float64))
    assert matrix.abs().max() <= math.sqrt(2 / n) + 1e-12


@pytest.mark.parametrize(("n", "blocks"), [(24, 2), (24, 3), (40, 8)])
def test_hadamard_factors__blocks_along_the_diagonal(n: int, blocks: int) -> None:
    one = dense(hadamard_factors(n // blocks))
    assert_close(dense(hadamard_factors(n, blocks)), torch.block_diag(*[one] * blocks))
    assert hadamard_kind(n, blocks) == f"I{blocks} x {hadamard_kind(n // blocks)}"
    assert hadamard_cost(n, blocks) == blocks * hadamard_cost(n // blocks)


def test_hadamard_factors__blocks_are_equal() -> None:
    with pytest.raises(ValueError, match="a width of 24 has no 5 equal blocks"):
        hadamard_factors(24, 5)


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("power", [1, 2, 8])
def test_hadamard_factors__every_entry_is_one_over_root_n(core: int, power: int) -> None:
    n = core * power
    factors = hadamard_factors(n)
    matrix = dense(factors) * math.sqrt(n)
    assert_close(matrix.abs(), torch.ones(n, n, dtype=torch.float64))
    assert "DHT" not in hadamard_kind(n)


@pytest.mark.parametrize("n", MODELS)
def test_hadamard_kind__widths_of_models(n: int) -> None:
    assert hadamard_kind(n) == MODELS[n]
    assert math.prod(f.shape[0] for f in hadamard_factors(n)) == n


@pytest.mark.parametrize("n", [256, 128, 4096, 18944])
def test_hadamard_factors__sylvester_part_is_split(n: int) -> None:
    _, cores, power = plan(n)
    sizes = [f.shape[0] for f in hadamard_factors(n)]
    assert all(a <= 64 for a in sizes[len(cores) :])
    assert math.prod(sizes[len(cores) :]) == power


def test_hadamard_factors__under_a_meta_device_are_real() -> None:
    with torch.device("meta"):
        factors = hadamard_factors(84)
    assert all(f.device.type == "cpu" for f in factors)


def test_hadamard_factors__are_fresh_copies() -> None:
    hadamard_factors(12)[0].zero_()
    assert hadamard_factors(12)[0].abs().min() > 0


def test_plan__width_below_one() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        plan(0)
