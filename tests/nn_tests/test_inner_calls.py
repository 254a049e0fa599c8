"""Parts of a model that its ``generate`` calls by themselves with token ids: rows are those of the ids, not the prompt's."""

import copy

import pytest
import torch
from torch import Tensor, nn

from mmqc.nn.modality import ModalityContext, attached, detach

IDS = torch.tensor([[1, 7, 7, 2], [8, 3, 3, 9]])
VISUAL = torch.tensor([[False, True, True, False], [True, False, False, False]])
BLOCK = torch.tensor([[7, 1, 1], [2, 2, 8]])


class Linear(nn.Module):
    """Returns what a linear would see."""

    context: ModalityContext

    def forward(self, x: Tensor) -> Tensor | None:
        return self.context.rows(x)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = Linear()

    def forward(self, input_ids: Tensor, encoder_hidden_states: Tensor | None = None, fails: bool = False) -> Tensor | None:
        if fails:
            raise ZeroDivisionError
        return self.linear(torch.zeros(*input_ids.shape, 4))


class Model(nn.Module):
    """As DiffusionGemma, whose encoder reads the prompt and then each block of the answer."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.encoder.linear.context = ModalityContext.attach(self, (7, 8))

    def forward(self, input_ids: Tensor, inside: Tensor | None = None) -> Tensor | None:
        return self.encoder(input_ids if inside is None else inside)

    def generate(self, input_ids: Tensor) -> list[Tensor | None]:
        return [self.encoder(input_ids), self.encoder(input_ids=BLOCK), self.encoder(torch.cat((BLOCK, BLOCK), 1))]


def test_inner_calls__have_the_mask_of_their_own_ids() -> None:
    prompt, block, longer = Model().generate(IDS)
    assert torch.equal(prompt, VISUAL)
    assert torch.equal(block, (BLOCK == 7) | (BLOCK == 8))
    assert torch.equal(longer, block.repeat(1, 2))


def test_inner_calls__within_a_call_the_model_s_ids_decide() -> None:
    assert torch.equal(Model()(IDS, inside=torch.zeros_like(IDS)), VISUAL)


def test_inner_calls__end_with_the_call_and_with_an_error() -> None:
    model = Model()
    model.encoder(BLOCK)
    with pytest.raises(RuntimeError, match="outside a call"):
        model.encoder.linear(torch.zeros(2, 3, 4))
    with pytest.raises(ZeroDivisionError):
        model.encoder(BLOCK, fails=True)
    with pytest.raises(RuntimeError, match="outside a call"):
        model.encoder.linear(torch.zeros(2, 3, 4))


def test_inner_calls__that_read_an_encoder_s_states_are_not_told_by_ids() -> None:
    model = Model()
    with pytest.raises(RuntimeError, match="outside a call"):
        model.encoder(BLOCK, encoder_hidden_states=torch.zeros(2, 4, 4))


def test_inner_calls__copies_have_their_own_and_detach_takes_them_away() -> None:
    model = Model()
    again = copy.deepcopy(model)
    hooks = again.encoder._forward_pre_hooks.values()
    assert [hook.__self__.context for hook in hooks] == [attached(again)]
    assert attached(again) is not attached(model)
    assert attached(model.encoder) is None
    detach(model)
    assert not model.encoder._forward_pre_hooks
    assert not model.encoder._forward_hooks
