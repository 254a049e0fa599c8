"""Programs of activations: the same function after a trip through JSON, and clear words for what is none."""

import json

import pytest
import torch
from torch.nn import functional as F

from mmqc.experts.pointwise import Pointwise, encoded


def step(op, *args, **kwargs):
    return {"op": op, "args": [encoded(a) for a in args], "kwargs": {k: encoded(v) for k, v in kwargs.items()}}


def value(index):
    return {"value": index}


def test_pointwise__computes_its_steps_after_json():
    steps = [
        step("getitem", value(0), (Ellipsis, slice(None, None, 2))),
        step("getitem", value(0), (Ellipsis, slice(1, None, 2))),
        step("gelu", value(2), approximate="tanh"),
        step("clamp", value(3), min=-0.5, max=None),
        step("mul", value(4), value(5)),
        step("add", value(6), value(1)),
    ]
    program = Pointwise(2, json.loads(json.dumps(steps)))
    u, v = torch.randn(5, 8), torch.randn(5, 4)
    assert torch.equal(program(u, v), F.gelu(u[:, ::2], approximate="tanh") * u[:, 1::2].clamp(min=-0.5) + v)
    assert str(program) == "gelu -> clamp -> mul -> add"


def test_pointwise__casts_and_chunks():
    steps = [
        step("chunk", value(0), 2, dim=-1),
        step("getitem", value(1), 1),
        step("to", value(2), torch.float64),
        step("silu", value(3)),
    ]
    u = torch.randn(3, 6)
    assert torch.equal(Pointwise(1, json.loads(json.dumps(steps)))(u), F.silu(u[:, 3:].double()))


def test_pointwise__without_steps_is_the_identity():
    u = torch.randn(2, 3)
    assert Pointwise(1, [])(u) is u


def test_pointwise__names_an_unknown_step():
    with pytest.raises(ValueError, match="unknown step 'softmax'"):
        Pointwise(1, [step("softmax", value(0), -1)])
    with pytest.raises(TypeError, match="a Tensor is an argument"):
        encoded(torch.zeros(2))
