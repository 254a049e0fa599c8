import pytest
import torch

from mmqc.ops.finite_field import jacobsthal_matrix, prime_power


@pytest.mark.parametrize(
    ("q", "expected"), [(11, (11, 1)), (27, (3, 3)), (25, (5, 2)), (343, (7, 3)), (15, None), (2, None), (1, None), (8, None)]
)
def test_prime_power__known(q: int, expected: tuple[int, int] | None) -> None:
    assert prime_power(q) == expected


@pytest.mark.parametrize("q", [3, 5, 7, 9, 25, 27, 49, 81, 121, 125, 243])
def test_jacobsthal_matrix__is_one(q: int) -> None:
    Q = jacobsthal_matrix(q)
    ones = torch.ones(q, q, dtype=torch.float64)
    assert torch.equal(Q @ Q.T, q * torch.eye(q, dtype=torch.float64) - ones)
    assert torch.equal(Q.sum(1), torch.zeros(q, dtype=torch.float64))
    assert torch.equal(Q.T, Q if q % 4 == 1 else -Q)


def test_jacobsthal_matrix__not_a_prime_power() -> None:
    with pytest.raises(ValueError, match="not an odd prime power"):
        jacobsthal_matrix(15)
