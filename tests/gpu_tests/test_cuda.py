"""The sample on a CUDA device: quantized there, run there, compiled there."""

import copy

import pytest
import torch
from float64 import relative_error
from tolerance import assert_close
from torch import Tensor, nn
from transformers import GenerationConfig

import mmqc
from mmqc.nn.linear import QuantLinear
from mmqc.ops.define import plain_torch
from mmqc.ops.pack import pack

pytestmark = pytest.mark.gpu

# Sums in another order flip a code here and there, and the layers behind it round other numbers: two correct runs part by
# about as much as 8 bits cost (0.012 on this model, docs/explanation/numerics.md), never by more than twice that.
PARTED = 0.025


def batches(n: int, device: str) -> list[dict[str, Tensor]]:
    return [{k: v.to(device) for k, v in b.items()} for b in mmqc.samples.load("digits-vqa").calibration(n)]


def quantized(device: str, bits: int = 8) -> nn.Module:
    model = mmqc.samples.load("digits-vqa").model.to(device)
    solver = "rtn" if bits == 8 else "gptq"
    config = mmqc.recipes.mquant(bits, solver=solver)
    mmqc.quantize_(model, config, calibration=batches(8, device), progress=False)
    return model


@torch.no_grad()
def answer(model: nn.Module, device: str) -> Tensor:
    return model(**batches(1, device)[0]).logits.float().cpu()


def test_cuda__codes_are_those_of_the_cpu() -> None:
    cpu, cuda = quantized("cpu"), quantized("cuda")
    theirs = dict(cuda.named_modules())
    for name, linear in cpu.named_modules():
        if isinstance(linear, QuantLinear):
            # weights are derived in float64, where two devices differ by less than any rounding boundary is wide
            assert (linear.codes() != theirs[name].codes().cpu()).float().mean() < 1e-5
    assert relative_error(answer(cuda, "cuda"), answer(cpu, "cpu")) < PARTED


@pytest.mark.parametrize("bits", [8, 4])
def test_cuda__compiled_answers_like_eager(bits: int) -> None:
    model = quantized("cuda", bits)
    expected = answer(model, "cuda")
    fast = copy.deepcopy(model)
    fast.compile(backend="mmqc")
    assert relative_error(answer(fast, "cuda"), expected) < PARTED


def test_cuda__explain_names_kernels_and_no_fallback() -> None:
    explanation = mmqc.explain(quantized("cuda"), batches(1, "cuda")[0])
    assert explanation.quantized_graphs > 0
    # the sample is in float32, for whose transforms there is no kernel
    assert all(op.startswith("hadamard") and "torch.float32" in reason for _, op, reason in explanation.fallbacks)
    assert any("scaled_matmul_kernel" in kernel for kernel in explanation.kernels)


def test_cuda__generate_through_the_backend() -> None:
    model = quantized("cuda")
    prompt = {k: v.cuda() for k, v in mmqc.samples.load("digits-vqa").prompts(1)[0].items()}
    expected = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    model.compile(backend="mmqc")
    assert torch.equal(model.generate(**prompt, max_new_tokens=8, do_sample=False), expected)


@pytest.mark.parametrize("prefill", ["compiled", "graphs", "eager"])
@pytest.mark.parametrize("stop", [False, True])
def test_cuda__compiled_loop_gives_the_same_tokens(prefill: str, stop: bool) -> None:
    """With the stop check one step late, and with a sequence that ends before its length is used up."""
    model = quantized("cuda")
    config = GenerationConfig(max_new_tokens=32, do_sample=False, cache_implementation="static", pad_token_id=0)
    config.disable_compile = True
    found = []
    for prompt in mmqc.samples.load("digits-vqa").prompts(16):  # the longest answer
        prompt = {k: v.cuda() for k, v in prompt.items()}
        found.append((model.generate(**prompt, generation_config=config), prompt))
    lengths = [tokens.shape[1] - prompt["input_ids"].shape[1] for tokens, prompt in found]
    answer = max(n for n in lengths if n < 32)
    expected, prompt = found[lengths.index(answer)]
    assert answer > 4
    if not stop:
        config.max_new_tokens = answer - 2
        expected = expected[:, :-2]
    config.disable_compile = False
    for _ in range(3):  # the graphs are recorded, then replayed
        got = model.generate(**prompt, generation_config=config, custom_generate=mmqc.compiled_loop, prefill=prefill)
        assert torch.equal(got, expected)


def test_cuda__bfloat16_runs_in_kernels_alone() -> None:
    """In half precision the transforms have kernels too, and several linears share one."""
    explanation = mmqc.explain(quantized("cuda").bfloat16(), batches(1, "cuda")[0])
    assert explanation.fallbacks == []
    kernels = set(explanation.kernels)
    assert {"mmqc scaled_matmul_kernel", "mmqc hadamard_quantize_kernel"} <= kernels
    assert not any("mmqc." in kernel for kernel in kernels)  # no Python op is left


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [5, 3000])
def test_cuda__references_give_what_kernels_give(rows: int, bits: int) -> None:
    x, w = torch.randint(-128, 128, (rows, 512), dtype=torch.int8), torch.randint(-8, 8, (768, 512), dtype=torch.int8)
    given = [x, pack(w, 4) if bits == 4 else w, torch.tensor([0.01]), torch.rand(768) * 0.01, torch.rand(768)]
    given = [t.cuda() for t in given]
    kernel = torch.ops.mmqc.scaled_matmul(*given, None, bits, torch.float32)
    with plain_torch():
        plain = torch.ops.mmqc.scaled_matmul(*given, None, bits, torch.float32)
    assert_close(kernel, plain)
