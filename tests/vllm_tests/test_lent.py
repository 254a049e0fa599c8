"""mmqc's linear_kernel and encoder_attention in vLLM's own layers, for checkpoints of other projects (``make test-vllm``)."""

import sys
from types import SimpleNamespace

import pytest
import torch
from foreign_checkpoints import awq, gptq, pack_rows, quantized
from tolerance import assert_close
from vllm_process import PYTHONS, needs_vllm, run

import mmqc.vllm
from mmqc.kernels.matmul.weight_only_matmul import weight_only_matmul
from mmqc.nn.token_linear import TokenLinear
from mmqc.ops.pack import unpack
from mmqc.solvers import Quantized
from mmqc.vllm.lent import lent
from mmqc.vllm.specs import PluginError

K, N, ROWS = 256, 128, 3
TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}


def compressed(u, z, s, bits):
    """As compressed-tensors packs: [N, K b/32], scales [N, G], zero points [N b/32, G]."""
    words = {"weight_packed": pack_rows(u.T, bits), "weight_scale": s.T.contiguous(), "weight_shape": torch.tensor(u.T.shape)}
    asymmetric = bool((z != 2 ** (bits - 1)).any())
    return words | ({"weight_zero_point": pack_rows(z, bits).T.contiguous()} if asymmetric else {})


def settings(pack, bits, group, symmetric, inputs=None):
    """What config.json says of it."""
    if pack is not compressed:
        size = {"bits": bits, "group_size": group or -1}
        if pack is awq:
            return {"quant_method": "awq", "zero_point": not symmetric, "version": "gemm", **size}
        return {"quant_method": "gptq", "sym": symmetric, "desc_act": False, **size}
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group" if group else "channel"}
    weights |= {"group_size": group} if group else {}
    one = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "format": "pack-quantized"}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": [], "config_groups": {"group_0": one}}


FORMS = {  # packed by, bits, group, symmetric, inputs, parts that vLLM joins
    "compressed 4 groups": (compressed, 4, 64, True, None, 1),
    "compressed 4 groups asym": (compressed, 4, 64, False, None, 1),
    "compressed 8 channel": (compressed, 8, 0, True, None, 1),
    "compressed 8 groups asym": (compressed, 8, 64, False, None, 1),
    "compressed 2 groups": (compressed, 2, 64, True, None, 1),
    "compressed joined": (compressed, 4, 64, False, None, 2),
    "compressed 4 by token": (compressed, 4, 64, True, TOKEN, 1),
    "awq": (awq, 4, 64, False, None, 1),
    "awq joined": (awq, 4, 64, False, None, 2),
    "gptq 4": (gptq, 4, 64, True, None, 1),
    "gptq 8 channel": (gptq, 8, 0, True, None, 1),
}
NAMES = {compressed: ("weight_packed", "weight_scale", "weight_zero_point"), awq: ("qweight", "scales", "qzeros")}
NAMES[gptq] = NAMES[awq]


@pytest.fixture(scope="module")
def given():
    """The checkpoints' tensors and what they stand for, and heads of 80 channels in images of four sizes."""
    torch.manual_seed(0)
    linears, truth = {}, {}
    for name, (pack, bits, group, symmetric, inputs, parts) in FORMS.items():
        solved = [quantized(torch.randn(N, K), bits, group or K, symmetric) for _ in range(parts)]
        linears[name] = {
            "config": settings(pack, bits, group, symmetric, inputs),
            "tensors": [pack(u, z, s, bits) for u, z, s, _ in solved],
            "outputs": [N] * parts,
            "x": torch.randn(ROWS, K).half(),
        }
        truth[name] = [torch.cat(of, -1) for of in zip(*((u, z, s) for u, z, s, _ in solved), strict=True)]
    q, k, v = (torch.randn(1, 24, heads, 80) for heads in (4, 2, 2))
    return {"linears": linears, "q": q, "k": k, "v": v, "ends": torch.tensor([0, 5, 6, 16, 24], dtype=torch.int32)}, truth


@pytest.fixture(scope="module", params=PYTHONS or ["none"])
def found(request, given, tmp_path_factory):
    """What one vLLM made of it."""
    where = tmp_path_factory.mktemp("lent")
    torch.save(given[0], where / "given.pt")
    outs = [where / f"{i}.pt" for i in range(3)]  # of one rank, and of the first and the second of two
    jobs = [(1, 0), (2, 0), (2, 1)]
    named = [["vllm_lent.py", *job, where / f"store{job[0]}", where / "given.pt", out] for job, out in zip(jobs, outs, strict=True)]
    run(request.param, *named)
    whole, *halves = map(torch.load, outs)
    return whole | {"halves": [half["linears"] for half in halves]}


def test_lent__is_nothing_by_default_but_attention_to_models_of_ours():
    assert lent({}) == ()
    assert lent({}, own=True) == ("attention",)
    assert lent({"mmqc": []}, own=True) == []
    assert lent({"mmqc": ["linears"]}, own=True) == ["linears"]
    for wrong in ("linears", ["linears", "norms"], {"linears": 1}):
        with pytest.raises(PluginError, match=r"--additional-config: 'mmqc' = .* is no part of it"):
            lent({"mmqc": wrong})


def test_register__names_what_another_vllm_has_no_place_for(monkeypatch, caplog):
    """That vLLM goes on: it serves models that are not mmqc's."""
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.99"))
    monkeypatch.setattr(mmqc.vllm, "_registered", [])
    monkeypatch.setattr("mmqc.checkpoint.hf_named.name_methods", lambda: None)  # for good, in a process of vLLM's
    mmqc.vllm.register()
    mmqc.vllm.register()
    assert len(caplog.records) == len(mmqc.vllm.PARTS)
    assert "mmqc: vLLM 0.99 has no place for checkpoints of mmqc's" in caplog.text
    assert "mmqc knows 0.32 and 0.33" in caplog.text


@needs_vllm
@pytest.mark.parametrize("name", FORMS)
def test_linears__of_other_projects_are_mmqcs_with_their_codes(name, found, given):
    pack, bits, group, symmetric, inputs, _ = FORMS[name]
    layer, x, (u, z, s) = found["linears"][name], given[0]["linears"][name]["x"], given[1][name]
    assert layer["kernel"] == "MmqcLinearKernel"
    words, scales, zeros = NAMES[pack]
    codes, scale = unpack(layer[words], K, bits), s.T if group else s[0]
    assert torch.equal(codes, (u - 2 ** (bits - 1)).T.to(torch.int8))
    assert torch.equal(layer[scales], scale.float() if inputs else scale)
    if not symmetric:
        assert torch.equal(layer[zeros], (z - 2 ** (bits - 1)).T.to(torch.int8))
    if inputs:
        solved = Quantized(codes, scale.float(), group_size=group)
        assert torch.equal(layer["y"], TokenLinear.from_parts(solved, weight_bits=bits, dtype=torch.float16)(x))
        return
    weight = (u - z.repeat_interleave(K // len(z), 0)) * s.double().repeat_interleave(K // len(s), 0)
    assert_close(layer["y"], (x.double() @ weight).half())
    zero = None if symmetric else layer[zeros]  # the kernel itself, in Triton's interpreter
    assert_close(weight_only_matmul(x, layer[words], layer[scales], group_size=group, zero=zero, bits=bits), layer["y"])


@needs_vllm
@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form[-1] == 1])
def test_linears__whose_inputs_ranks_split_add_up(name, found):
    pack, bits, *_ = FORMS[name]
    whole, halves = found["linears"][name], [half[name] for half in found["halves"]]
    codes = [unpack(half[NAMES[pack][0]], K // 2, bits) for half in halves]
    assert torch.equal(torch.cat(codes, 1), unpack(whole[NAMES[pack][0]], K, bits))
    if "by token" not in name:  # whose scales are those of the channels that a rank has
        assert_close(sum(half["y"].double() for half in halves), whole["y"], torch.float16)


@needs_vllm
def test_linears__are_vllms_unless_the_server_lends_them(found):
    assert found["without"] == "MacheteLinearKernel"
    assert """--additional-config '{"mmqc": ["linears"]}'""" in found["refused"]["asked"]
    assert "'kernels' is no part of it" in found["unknown"]


@needs_vllm
def test_linears__that_have_no_place_are_refused_with_a_reason(found):
    why = found["refused"]
    assert why["taken"] is None
    assert "groups of 64 do not divide 288" in why["groups"]
    assert "36 input channels fill no whole words" in why["words"]
    assert "uint3b4" in why["bits"]
    assert "float8" in why["inputs"]


@needs_vllm
def test_attention__is_that_of_the_engines_class_within_every_image(found):
    y = found["attention"]
    assert (y["class"], y["reason"]) == ("SegmentEncoderAttention", None)
    for ours, engines in (("op", "native"), ("whole", "whole native"), ("many", "native"), ("batch", "batch native")):
        assert_close(y[ours], y[engines])
    assert torch.equal(y["flat"], y["op"].flatten(2))


@needs_vllm
def test_attention__kernel_is_for_many_rows_of_long_segments(found):
    ends = [0, 5, 6, 16, 24]
    few, short, many, batch = found["attention"]["calls"]
    assert few == short == ("vllm", (1, 24, 4, 80), 3)
    assert many == ("mmqc", (1, 4, 24, 80), ends)
    assert batch == ("mmqc", (1, 4, 24, 80), [0, 12, 24])


@needs_vllm
def test_attention__is_vllms_where_the_kernel_has_no_place(found):
    y = found["attention"]
    assert y["own"] is None
    assert "not asked" in y["not asked"]
    assert "float32" in y["float32"]
    assert "not 136" in y["heads"]
