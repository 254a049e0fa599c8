"""What a forward writes to while it is watched is put back."""

import pytest
import torch
from torch import Tensor, nn

from mmqc.front.as_it_was import as_it_was


class Writing(nn.Module):
    """Writes to a buffer and to what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("other", torch.ones(2))

    def forward(self, x: Tensor, part: Tensor, fails: bool) -> Tensor:
        self.calls += 1
        part.mul_(3)
        if fails:
            raise ValueError("in between")
        return x + self.other


@pytest.mark.parametrize("fails", [False, True])
def test_as_it_was__puts_back_what_is_written_to_and_says_what_that_was(fails: bool) -> None:
    model, x, whole = Writing(), torch.zeros(2), torch.ones(4)
    inputs = {"x": x, "part": whole[:2], "fails": fails}
    written: list[Tensor] = []
    try:
        with as_it_was(model, inputs) as written:
            model(**inputs)
    except ValueError:
        assert fails
    assert [id(tensor) for tensor in written] == [id(model.calls), id(inputs["part"])]
    assert model.calls.tolist() == [0]
    assert whole.tolist() == [1, 1, 1, 1]
