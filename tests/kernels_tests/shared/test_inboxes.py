"""Which groups share memory, and who says that they do not."""

from __future__ import annotations

import pytest
import torch
from one_process import inboxes

from mmqc.kernels.shared.inboxes import Opened


def test_open__a_group_on_cpus_shares_no_memory_and_says_so(group):
    opened = Opened()
    assert opened.why_not(group.group_name, torch.ones(1, 8)) == "no memory is shared for rows of 8"
    assert opened.open(group, [8, 16], torch.device("cpu")) == "its ranks are not on GPUs of NVIDIA's"
    assert opened.why_not(group.group_name, torch.ones(1, 8)) == "its ranks are not on GPUs of NVIDIA's"
    assert not opened.boxes


@pytest.mark.parametrize(
    ("size", "dtype", "why"),
    [
        ((1, 3, 32), torch.float16, None),
        ((2, 2, 32), torch.bfloat16, "4 rows of 32, more than 3"),
        ((1, 32), torch.float32, "not torch.float32"),
        ((1, 16), torch.float16, "for rows of 16"),
    ],
)
def test_why_not__few_rows_of_a_known_width(size, dtype, why):
    opened = Opened()
    opened.boxes["tp", 32] = inboxes(3, 32)[0]
    said = opened.why_not("tp", torch.ones(size, dtype=dtype))
    assert said == why if why is None else why in str(said)


@pytest.mark.parametrize(("rows", "why"), [(2, None), (5, "5 rows of 32, more than 3")])
def test_why_not__a_number_of_rows_that_varies_is_judged_by_the_first(rows, why):
    opened, said = Opened(), []
    opened.boxes["tp", 32] = inboxes(3, 32)[0]

    def look(gm, inputs):
        (product,) = (n.meta["example_value"] for n in gm.graph.nodes if n.op == "call_function")
        assert isinstance(product.shape[0], torch.SymInt)
        said.append(opened.why_not("tp", product))
        return gm.forward

    x = torch.ones(rows, 32).half()
    torch._dynamo.mark_dynamic(x, 0)
    torch.compile(lambda x: x * 2, backend=look)(x)
    assert said == [None] if why is None else why in said[0]
