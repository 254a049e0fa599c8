"""The grids of blocks of 4-bit floats: the widest one is what other projects take, the search never loses to it."""

import pytest
import torch
from compressed_tensors.quantization.utils.mxfp_utils import generate_mx_scales
from torchao.quantization.granularity import PerGroup

from mmqc.config import ConfigError, WeightSpec
from mmqc.ops.float4 import read_scale
from mmqc.solvers import solve
from mmqc.solvers.float4_grid import Float4Grid
from mmqc.solvers.grid import grouped
from mmqc.solvers.widest import widest
from mmqc.specs import BLOCKS


def weight(n=40, k=100):
    g = torch.Generator().manual_seed(1)
    w = torch.randn(n, k, generator=g) * torch.rand(n, 1, generator=g).mul(6).exp()
    w[3], w[5, 2] = 0, 900.0
    return w


def spec(form, solver="rtn", **options):
    return WeightSpec(4, PerGroup(BLOCKS[form]), solver, type=form, **options)


def test_widest__of_mxfp4_is_compressed_tensors():
    groups = grouped(torch.cat([weight(), torch.tensor([1.75, 1.7499, 3.5, 7.0]).repeat(1, 25)]), 32)
    largest = groups.abs().amax(-1)
    some = largest > 0
    ours = Float4Grid.widest(groups, "mxfp4").scale[..., 0]
    assert torch.equal(2 * ours[some], torch.exp2(generate_mx_scales(largest[some].float()) - 127))


def test_widest__of_nvfp4_reaches_every_weight_and_leaves_room():
    w = weight()
    grid = Float4Grid.widest(grouped(w, 16), "nvfp4")
    assert 448 * 4 / w.abs().max() / 2 < grid.divisor <= 448 * 4 / w.abs().max()
    assert grid.divisor.log2() % 1 == 0
    wide = grid.scale > 0.5 * 2**-6 / grid.divisor  # below, float8's steps are all alike
    peaks = (grouped(w, 16).abs().amax(-1, keepdim=True) / grid.scale)[wide]
    assert peaks.max() <= 12 * (1 + 1 / 16)  # half of float8's step
    assert torch.equal(grid.shrunk(torch.tensor(1.5)).representable(grid.scale), grid.scale)


@pytest.mark.parametrize("form", BLOCKS)
@pytest.mark.parametrize("solver", ["rtn", "mse_clip", "awq_clip", "gptq"])
def test_solve__stores_what_it_computes_with_and_beats_the_widest_grid(form, solver):
    w, x = weight(), torch.randn(300, 100, dtype=torch.float64) * torch.rand(100, dtype=torch.float64)
    h = x.T @ x
    q = solve(w, spec(form, solver), h, skip=torch.tensor([7]))
    again = 0.5 * read_scale(q.stored_scale(), form)
    assert torch.equal(again if q.divisor is None else again / q.divisor, q.scale)
    assert {*q.codes.abs().unique().tolist()} <= {0, 1, 2, 3, 4, 6, 8, 12}
    assert not q.codes[:, 7].any()
    assert not q.codes[3].any()
    plain, w = widest(w.index_fill(1, torch.tensor([7]), 0), spec(form)), w.index_fill(1, torch.tensor([7]), 0)
    error = [(w - found).double() for found in (q.dequantize(), plain)]
    by_output = solver in ("awq_clip", "gptq")
    losses = [((e @ h) * e).sum() if by_output else e.abs().pow(2.4 if solver == "mse_clip" else 2).sum() for e in error]
    assert losses[0] < (0.97 if form == "nvfp4" else 1) * losses[1]


def test_gptq__rows_that_are_solved_apart_have_one_divisor(monkeypatch):
    w, h = weight(), torch.eye(100, dtype=torch.float64)
    whole = solve(w, spec("nvfp4", "gptq"), h)
    monkeypatch.setattr("mmqc.solvers.sweep.STACK", 9 * 100 * 4 * 3)  # of three sweeps, 9 rows at a time
    parts = solve(w, spec("nvfp4", "gptq"), h)
    assert torch.equal(whole.divisor, parts.divisor)
    assert torch.equal(whole.codes, parts.codes)


def test_spec__says_what_it_cannot_be():
    for wrong in ({"granularity": PerGroup(128)}, {"bits": 8}, {"symmetric": False}, {"solver": "learned"}, {"amplifier": 64}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            WeightSpec(**{"bits": 4, "granularity": PerGroup(16), "type": "nvfp4", **wrong})
