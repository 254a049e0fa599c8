"""What docs-vqa is trained on, and with: batches whose targets are on the page, and a forward that is transformers'."""

from random import Random

import pytest
import torch
from tolerance import assert_close

from examples.docs_vqa import docs_batches, docs_forward
from mmqc.samples import handwriting
from mmqc.samples.docs import alphabet, checkpoint


@pytest.fixture(scope="module")
def batch():
    """One row of several pages, and eight questions about it."""
    return docs_batches.make(Random(0), docs_batches.BUCKETS[2], 1.0, handwriting.load_split("train"))


def test_batch__sources_hold_the_characters_of_the_answers(batch):
    cells, at = batch["cells"][0], batch["source"] >= 0
    pairs = zip(batch["source"][at].tolist(), batch["answer"][at].tolist(), strict=True)
    shown = [token in cells[source].tolist() for source, token in pairs if token != alphabet.TOKEN[" "]]
    assert len(shown) > 20
    assert sum(shown) / len(shown) > 0.9  # a token covers more than four characters now and then


def test_batch__rows_are_questions_with_their_answers(batch):
    for tokens, start, answer in zip(batch["tokens"], batch["start"], batch["answer"], strict=True):
        ids = [int(i) for i in answer if i != alphabet.PAD]
        assert ids[-1] == alphabet.END
        assert tokens[start].item() == alphabet.TOKEN["\n"]
        assert tokens[start + 1 : start + len(ids)].tolist() == ids[:-1]
    assert batch["head"][batch["visual"]].unique().tolist() == [alphabet.IMAGE]


def test_forward__is_that_of_transformers(batch):
    torch.manual_seed(0)
    model = checkpoint.new_model(checkpoint.new_config(width=128, vision_depth=1, depth=4))
    error = docs_forward.check(model, batch)
    assert_close(torch.tensor(1 + error), torch.tensor(1.0))
