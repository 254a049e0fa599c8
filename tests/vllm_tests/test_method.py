"""vLLM's own parallel linears with mmqc's method, at one rank and two, against our modules in a model of ours (``make test-vllm``).

Their parameters are made by mmqc's config for vLLM and filled by vLLM's loaders.
"""

import copy
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torchao.quantization.granularity import PerGroup
from vllm_linears import inputs, token_ids
from vllm_process import PYTHONS, needs_vllm, run

import mmqc
from mmqc import recipes
from mmqc.engines.names import joined, renamed, split_by_rows
from mmqc.engines.table import read_table
from mmqc.nn.linear import HadamardLinear, QuantLinear
from mmqc.nn.mixed_linear import MixedLinear
from mmqc.nn.modality import attached
from mmqc.nn.online_hadamard import OnlineHadamard
from mmqc.nn.token_linear import TokenLinear
from mmqc.ops.pack import pack
from mmqc.solvers import Quantized

LEAST_SQNR = 15.0  # of a sum over two ranks next to the whole linear, in bfloat16, 4-bit inputs by rank and token among them


def _grouped(config, size):
    towers = {t: replace(s, weight=replace(s.weight, granularity=PerGroup(size))) for t, s in config.schemes.items()}
    return config.replace(**towers)


STATIC8 = recipes.rtn(8, activation_bits=8)
RECIPES = {
    "W8A8 static": STATIC8,
    "W8A8 by modality": recipes.mquant(8, rotate=False, solver="rtn"),
    "W4A8 static": recipes.rtn(4, activation_bits=8),
    "W4A16 groups": recipes.rtn(4, group_size=64),
    "W4A16 groups asym": recipes.awq(4, group_size=64, symmetric=False, solver="rtn"),
    "W2A16 groups, zero between codes": recipes.rtn(2, group_size=64, symmetric=False, solver="mse_clip", zero_point="float"),
    "W3A16": recipes.rtn(3),
    "W8A8 by token": STATIC8.with_token_scales(),
    "W8A8-fp8 static": STATIC8.with_float8(),
    "W8A8-fp8 by token": STATIC8.with_token_scales().with_float8(),
    "W4A8-fp8 groups by token": _grouped(recipes.rtn(4, activation_bits=8).with_token_scales().with_float8(), 64),
    "integer scales": recipes.integer_scale(group_size=64),
    "mquant": recipes.mquant(4, solver="rtn"),
    "mquant in blocks": recipes.mquant(4, solver="rtn", tensor_parallel=2),
    "quarot": recipes.quarot(4, kv_bits=None, solver="rtn"),
    "resq": recipes.resq(4, kv_bits=None, solver="rtn"),
    "Hadamards": recipes.rotate(),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """By recipe: our model in bfloat16, and the directory it was saved to."""
    sample, made = mmqc.samples.load("digits-vqa"), {}
    batches = [{k: v.bfloat16() if v.is_floating_point() else v for k, v in b.items()} for b in sample.calibration(2)]
    for name, recipe in RECIPES.items():
        model = copy.deepcopy(sample.model).to(torch.bfloat16)
        for part in (model.config, model.config.text_config, model.config.vision_config):
            part.dtype = torch.bfloat16
        mmqc.quantize_(model, recipe, batches, progress=False)
        folder = tmp_path_factory.mktemp("native")
        model.save_pretrained(folder)
        made[name] = model, str(folder)
    return made


@pytest.fixture(scope="module", params=[(python, ranks) for python in PYTHONS or ["none"] for ranks in (1, 2)], ids=str)
def computed(request, saved, tmp_path_factory):
    """By recipe: what the ranks of one vLLM computed, and how many they are."""
    python, ranks = request.param
    where = tmp_path_factory.mktemp("computed")
    folders = [folder for _, folder in saved.values()]
    outs = [where / f"{rank}.pt" for rank in range(ranks)]
    run(python, *(["vllm_linears.py", ranks, rank, where / "store", outs[rank], *folders] for rank in range(ranks)))
    shards = [torch.load(out) for out in outs]
    return {name: [shard[folder] for shard in shards] for name, (_, folder) in saved.items()}


@needs_vllm
@pytest.mark.parametrize("name", RECIPES)
def test_linears__of_the_engine_compute_what_ours_do_to_the_bit(name, computed, saved):
    model, shards = saved[name][0], computed[name]
    names, ranks = read_table("0.33")["models"][type(model).__name__], len(shards)
    ours = {renamed(n, names): m for n, m in model.named_modules() if isinstance(m, OnlineHadamard) and hasattr(m, "out_features")}
    checked = 0
    with torch.no_grad(), _among_images(model):
        for whole, of in joined(ours, names).items():
            if whole not in shards[0]:
                continue
            linears = [ours[part] for part in of]
            for rank, shard in enumerate(shards):
                want = _by_rows(linears[0], rank, ranks) if _splits(whole) else _by_outputs(whole, linears, rank, ranks)
                assert torch.equal(shard[whole]["y"], want), (whole, rank, _least(shard[whole]["y"], want))
                checked += 1
            if _splits(whole):
                _same_sum(whole, linears[0], shards)
    assert checked >= 5 * ranks


def _splits(whole):
    return split_by_rows(whole) or whole.endswith("merger.mlp.2")


def _among_images(model):
    """As within a call of the model that has the engine's tokens."""
    context = attached(model)
    if context is None:
        return nullcontext()
    ids = token_ids(list(context.visual_token_ids))
    return context.during(torch.isin(ids, torch.tensor(context.visual_token_ids)))


def _by_outputs(whole, linears, rank, ranks):
    """Rows of a rank, part by part: of heads, where a tower stores q, k and v in one."""
    outputs = [linear(inputs(linear.in_features)) for linear in linears]
    if whole.endswith(".qkv"):
        outputs = list(outputs[0].chunk(3, -1))
    return torch.cat([y.chunk(ranks, -1)[rank] for y in outputs], -1)


def _by_rows(linear, rank, ranks):
    """What a linear of the rank's columns computes; the first adds the bias."""
    x = inputs(linear.in_features)
    if ranks == 1:
        return linear(x)
    x, bias = linear.rotated(x), linear.bias if rank == 0 else None
    if isinstance(linear, MixedLinear):
        return _mixed(linear, x, bias, rank, ranks)
    if isinstance(linear, HadamardLinear):
        return torch.nn.functional.linear(x.chunk(ranks, -1)[rank], linear.weight.chunk(ranks, 1)[rank], bias)
    codes, grouped = linear.codes().chunk(ranks, 1)[rank], bool(linear.group_size)
    if isinstance(linear, TokenLinear):
        solved = Quantized(codes, _columns(linear.weight_scale, rank, ranks), group_size=linear.group_size)
        options = {"weight_bits": linear.weight_bits, "bias": bias, "float8": linear.float8, "dtype": torch.bfloat16}
        return TokenLinear.from_parts(solved, **options)(x.chunk(ranks, -1)[rank])
    assert isinstance(linear, QuantLinear)
    other = QuantLinear.from_spec(
        {**linear.to_spec(), "in": linear.in_features // ranks, "hadamard": False, "bias": bias is not None}
    )
    parts = {"qweight": codes if linear.storage_bits == 8 else pack(codes, linear.storage_bits), "bias": bias}
    for own in ("weight_scale", "weight_zero", "group_scale"):
        tensor = getattr(linear, own)
        parts[own] = _columns(tensor, rank, ranks) if grouped and tensor is not None else tensor
    parts["input_scale"] = linear.input_scale
    other._fill({**parts, "outlier_index": None, "outlier_weight": None})
    other.modality = linear.modality
    own_x = x.chunk(ranks, -1)[rank]
    if linear.outlier_index is None:
        return other(own_x)
    kept = [i for i, k in enumerate(linear.outlier_index.tolist()) if k // own_x.shape[-1] == rank]
    if kept:
        other.outlier_index = linear.outlier_index[kept] - rank * own_x.shape[-1]
        other.outlier_weight = linear.outlier_weight[:, kept].contiguous()
    return other(own_x)


def _columns(tensor, rank, ranks):
    return tensor.chunk(ranks, 1)[rank] if tensor.dim() == 2 else tensor


def _mixed(linear, x, bias, rank, ranks):
    """A rank's share of every part of the channels."""
    x = x if linear.order is None else x.index_select(-1, linear.order)
    pick = [part.chunk(ranks)[rank] for part in torch.arange(x.shape[-1]).split(linear.widths)]
    codes = [linear.codes()[:, own] for own in pick]
    stored = [c if bits == 8 else pack(c, bits) for c, bits in zip(codes, linear.stored, strict=True)]
    totals = torch.stack([c.sum(1, dtype=torch.int32) for c in codes], 1)
    widths = [len(own) for own in pick]
    options = {"widths": widths, "stored": linear.stored, "activation": linear.activation, "weight_bits": linear.weight_bits}
    other = MixedLinear.from_stored(stored, linear.weight_scale, totals, **options, dtype=torch.bfloat16)
    other.bias = bias
    return other(x[..., torch.cat(pick)])


def _same_sum(whole, linear, shards):
    """The engine's layer returns the sum over its ranks, which is the whole linear's but for the rounding of scales and sums."""
    total = shards[0][whole]["y"]
    for shard in shards[1:]:
        total = total + shard[whole]["y"]
    for shard in shards:
        assert torch.equal(shard[whole]["out"], total), whole
    assert _least(total, linear(inputs(linear.in_features))) > LEAST_SQNR, whole


def _least(y, want):
    noise = (y.double() - want.double()).square().sum()
    return float(10 * torch.log10(want.double().square().sum() / noise)) if noise else float("inf")
