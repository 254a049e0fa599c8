"""``quantize_`` on a GPU: one block at a time there gives what the whole model there gives, and needs less memory."""

import copy
from typing import Any

import pytest
import torch
from models import tiny_qwen2_vl
from torch import nn
from torchao.quantization.granularity import PerGroup

import mmqc
from mmqc import recipes
from mmqc.config import WeightSpec
from mmqc.ops import gptq_block as op
from mmqc.ops import power_clip as clip_op
from mmqc.quantization.progress import OutOfMemoryError
from mmqc.quantization.units import LEARNED
from mmqc.solvers import solve

pytestmark = pytest.mark.gpu


def codes(model: nn.Module) -> dict[str, torch.Tensor]:
    return {k: v.cpu() for k, v in model.state_dict().items()}


@pytest.mark.parametrize("inputs", ["float", "quantized", "asymmetric"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantize__offloaded_equals_resident(inputs: Any, dtype: torch.dtype) -> None:
    model, batch = tiny_qwen2_vl()
    batch = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}
    model = model.to(dtype)
    there = copy.deepcopy(model).cuda()
    mmqc.quantize_(there, recipes.mquant(4), [batch], progress=False, inputs=inputs)
    mmqc.quantize_(model, recipes.mquant(4), [batch], progress=False, inputs=inputs, device="cuda")
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"cpu"}
    one, two = codes(model), codes(there)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[k], two[k]) for k in one)


@pytest.mark.parametrize("loss", ["layer", "block"])
def test_quantize__awq_offloaded_equals_resident(loss: Any) -> None:
    model, batch = tiny_qwen2_vl()
    there, config = copy.deepcopy(model).cuda(), recipes.awq(3, 32, loss=loss)
    resident = mmqc.quantize_(there, config, [batch], progress=False)
    offloaded = mmqc.quantize_(model, config, [batch], progress=False, device="cuda")
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"cpu"}
    sites = [{s for p in r.passes if p.name == "fold_channel_scale" for s in p.sites} for r in (resident, offloaded)]
    assert sites[0] == sites[1]
    one, two = codes(model), codes(there)
    assert all(torch.equal(one[k], two[k]) for k in one)


def test_quantize__weights_alone_are_rounded_on_the_device() -> None:
    model, _ = tiny_qwen2_vl()
    there = copy.deepcopy(model).cuda()
    mmqc.quantize_(model, recipes.rtn(4), progress=False, device="cuda")
    mmqc.quantize_(there, recipes.rtn(4), progress=False)
    one, two = codes(model), codes(there)
    assert all(torch.equal(one[k], two[k]) for k in two)
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"cpu"}


def test_quantize__a_failed_call_leaves_everything_where_it_was() -> None:
    model, batch = tiny_qwen2_vl()
    model = model.cuda()
    before = {k: (v.data_ptr() != 0, v.device, v.cpu().clone()) for k, v in model.state_dict().items()}
    identity = {k: id(p) for k, p in model.named_parameters()}
    calls = []

    def fail(module: nn.Module, args: Any) -> None:
        calls.append(1)
        if len(calls) > 5:  # when the block before it is quantized already
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB")

    handle = model.get_submodule("model.language_model.layers.1").register_forward_pre_hook(fail)
    with pytest.raises(OutOfMemoryError, match="device="):
        mmqc.quantize_(model, recipes.rtn(8, 8), [batch], progress=False)
    handle.remove()
    after = model.state_dict()
    assert {k: id(p) for k, p in model.named_parameters()} == identity
    assert all(after[k].device == device and torch.equal(after[k].cpu(), v) for k, (_, device, v) in before.items())


@pytest.mark.parametrize("asymmetric", [False, True, "between"])
@pytest.mark.parametrize("shape", [(128, 3584), (128, 100), (17, 33)])
def test_gptq_block__on_cuda_agrees_with_the_reference(shape: tuple[int, int], asymmetric: bool | str) -> None:
    size, n = shape
    g = torch.Generator().manual_seed(size)
    w, scale = torch.randn(size, n, generator=g).cuda(), (torch.rand(size, n, generator=g) / 4 + 0.25).cuda()
    u = (torch.triu(torch.randn(size, size, generator=g) * 0.05, 1) + torch.eye(size)).cuda()
    zero = torch.randint(-3, 4, (size, n), generator=g).float().cuda() if asymmetric else None
    zero = zero + torch.rand(size, n, generator=g).half().float().cuda() if zero is not None and asymmetric == "between" else zero
    found = torch.ops.mmqc.gptq_block(w, u, scale, zero, 4)
    expected = op.reference(w, u, scale, zero, 4)
    assert (found[0] != expected[0]).any(0).float().mean() <= 0.01  # one code on a boundary changes all behind it


@pytest.mark.parametrize("solver", ["rtn", "mse_clip", "awq_clip", "gptq"])
@pytest.mark.parametrize("kind", ["int", "float"])
def test_solve__asymmetric_on_cuda_loses_what_it_loses_on_the_cpu(solver: Any, kind: Any) -> None:
    g = torch.Generator().manual_seed(2)
    w, x = torch.randn(96, 256, generator=g), torch.randn(512, 256, generator=g, dtype=torch.float64)
    spec, h = WeightSpec(2, PerGroup(32), solver, symmetric=False, zero_point=kind), x.T @ x
    here, there = solve(w, spec, h), solve(w.cuda(), spec, h.cuda()).to(torch.device("cpu"))
    assert here.zero is not None
    assert there.zero is not None
    assert there.zero.dtype == here.zero.dtype
    lost = [float(((d := (q.dequantize() - w).double()) @ h * d).sum()) for q in (here, there)]
    assert lost[1] == pytest.approx(lost[0], rel=0.03)


@pytest.mark.parametrize("costly", [False, True])
@pytest.mark.parametrize("shape", [(64, 1, 3584), (40, 56, 64)])
def test_power_clip__on_cuda_agrees_with_the_reference(shape: tuple[int, int, int], costly: bool) -> None:
    g = torch.Generator().manual_seed(1)
    w = torch.randn(shape, generator=g).cuda()
    scale, cost = w.abs().amax(-1, keepdim=True) / 7, torch.rand(shape[1:], generator=g).cuda() if costly else None
    given = (w, scale, None, cost, [1 - i / 100 for i in range(80)], 2.4, 4)
    assert (torch.ops.mmqc.power_clip(*given) != clip_op.reference(*given)).float().mean() <= 0.01  # clips that are alike


def test_learned__the_kernels_learn_what_the_references_do() -> None:
    model, batch = tiny_qwen2_vl()
    ratios = []
    for device in ("cpu", "cuda"):
        there = copy.deepcopy(model).to(device)
        report = mmqc.quantize_(there, recipes.learned(2, 8, steps=24), [batch] * 4, progress=False)
        ratios.append([float(r.note.split(" x ")[1].split()[0]) for r in report.layers if LEARNED in r.note])
    assert max(ratios[0]) < 1
    assert ratios[1] == pytest.approx(ratios[0], rel=0.05)  # sums in another order
