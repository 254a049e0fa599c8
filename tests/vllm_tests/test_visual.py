"""Rows of images, noted where ids become embeddings."""

import pytest
import torch
from torch import nn

from mmqc.vllm.specs import PluginError
from mmqc.vllm.visual import VisualRows


def test_rows__are_those_of_the_ids_that_were_embedded_last():
    rows, embedding = VisualRows(8, (4, 5)), nn.Embedding(16, 2)
    rows.watch(embedding, 16)
    embedding(torch.tensor([4, 1, 5, 3]))
    assert rows.rows(torch.zeros(4, 3)).tolist() == [True, False, True, False]
    embedding(torch.tensor([1, 4]))
    assert rows.rows(torch.zeros(2, 3)).tolist() == [False, True]
    assert rows.rows(torch.zeros(2, 1, 3)).shape == (2, 1)


def test_rows__are_one_buffer_that_is_in_no_checkpoint():
    """A graph that was captured reads the same memory in every step, and rows that it was padded to are there."""
    rows, embedding = VisualRows(8, (4,)), nn.Embedding(16, 2)
    before = rows.mask.data_ptr()
    rows.watch(embedding, 16)
    embedding(torch.tensor([4, 4, 4]))
    assert rows.mask.data_ptr() == before == rows.rows(torch.zeros(8, 1)).data_ptr()
    assert not rows.state_dict()


def test_rows__more_than_there_is_room_for_are_refused():
    rows, embedding = VisualRows(2, (4,)), nn.Embedding(16, 2)
    rows.watch(embedding, 16)
    with pytest.raises(PluginError, match=r"a step of 3 tokens.*max-num-batched-tokens"):
        embedding(torch.tensor([4, 1, 1]))
    with pytest.raises(PluginError, match="a step of 3 tokens"):
        rows.rows(torch.zeros(3, 1))


def test_watch__ids_that_are_hidden_from_the_embedding_are_refused():
    rows = VisualRows(2, (4, 16))
    with pytest.raises(PluginError, match="token 16 stands for an input"):
        rows.watch(nn.Embedding(16, 2), 16)
    with pytest.raises(PluginError, match="token 20 stands for an input"):
        VisualRows(2, (4,)).watch(nn.Embedding(16, 2), 16, others=[3, 20])
    assert not rows.noted


def test_rows__are_traced_by_torch_compile():
    """The decoder's graph reads the buffer, whatever it held when it was traced."""
    rows = VisualRows(8, (4,))
    pick = torch.compile(lambda x: torch.where(rows.rows(x)[:, None], x, -x), backend="eager", fullgraph=True)
    x = torch.ones(3, 1)
    assert pick(x).flatten().tolist() == [-1, -1, -1]
    rows.note(rows, (torch.tensor([1, 4, 1]),), {})
    assert pick(x).flatten().tolist() == [-1, 1, -1]
