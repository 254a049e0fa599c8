"""Signal, noise and clipped inputs of a quantized linear, by modality, against the same computed by hand."""

import math

import pytest
import torch
from torch import nn

from mmqc.calibration.measure import Loss, Meter
from mmqc.calibration.observe import Call, observe
from mmqc.nn.linear import QuantLinear
from mmqc.nn.modality import ModalityContext
from mmqc.solvers.quantized import Quantized


@torch.no_grad()
def test_meter__compares_outputs_and_counts_what_is_clipped() -> None:
    linear, context = nn.Linear(8, 4), ModalityContext()
    scale = linear.weight.abs().amax(1) / 7
    codes = (linear.weight / scale[:, None]).round().to(torch.int8)
    solved = Quantized(codes, scale)
    parts = {"bias": linear.bias, "input_scale": torch.tensor([0.01]), "weight_bits": 4, "activation_bits": 8}
    quantized = QuantLinear.from_parts(solved, **parts)
    x = torch.randn(1, 6, 8)
    context.visual = torch.tensor([[1, 1, 0, 0, 0, 0]]).bool()
    with observe(nn.ModuleDict({"up": linear}), {Call("up"): Meter(linear, quantized, True, context)}) as meters:
        for _ in range(2):
            linear(x)
    loss = meters[Call("up")].loss
    wanted, got = linear(x)[0].double(), quantized(x)[0].double()
    for name, rows in (("visual", slice(2)), ("text", slice(2, None))):
        assert loss.signal[name] == pytest.approx(2 * float(wanted[rows].square().sum()))
        assert loss.noise[name] == pytest.approx(2 * float((got - wanted)[rows].square().sum()), rel=1e-5)
        beyond = (x[0, rows] / 0.01).round().clamp(-128, 127) != (x[0, rows] / 0.01).round()
        assert loss.saturated()[name] == pytest.approx(float(beyond.double().mean()))
    assert 0 < loss.saturated()["text"] < 1


def test_loss__decibels_and_relative() -> None:
    loss = Loss({"text": 100.0, "visual": 1.0, "mixed": 0.0}, {"text": 1.0, "visual": 0.0, "mixed": 0.0})
    assert loss.sqnr() == {"text": pytest.approx(20.0), "visual": math.inf}
    assert loss.relative() == pytest.approx(1 / 101)
    assert Loss().relative() == 0.0
