"""mmqc's linear kernel and attention beside vLLM's own, in vLLM's own layers, on one GPU.  **Not run yet**: no GPU had vLLM.

    python -m benchmarks.engines.lent --out out/lent.json

Linears of Qwen2-VL-7B's language model in 4 bits, groups of 128, as compressed-tensors stores them, for 1 to 4,096 rows; heads of
its tower (16 of 80 channels), one image and many.  Microseconds, the median of a CUDA graph's replays with a cold L2 for linears,
and of calls for the attention, which vLLM runs eagerly; ``differ`` is the largest difference over the largest value.

    linears     vllm: the kernel that vLLM takes by itself (Machete on Hopper)      mmqc: with {"mmqc": ["linears"]}
    attention   vllm: its FlashAttention                                           mmqc: with {"mmqc": ["attention"]}
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

WIDTHS = {"qkv": (3584, 4608), "o": (3584, 3584), "gate and up": (3584, 37888), "down": (18944, 3584)}
ROWS = (1, 16, 64, 256, 1024, 4096)
SEGMENTS = {
    "one of 25,600": [25600],
    "16 of 1,024": [1024] * 16,
    "100 of 64": [64] * 100,
    "six": [400, 1600, 8000, 3600, 900, 6400],
}
HEADS, CHANNELS = 16, 80
FLUSHED = 64 * 2**20  # bytes, more than the L2 of an H100
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
GROUP = {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": None, "format": "pack-quantized"}
CONFIG = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": [], "config_groups": {"group_0": GROUP}}


@contextmanager
def lending(*parts: str) -> Iterator[None]:
    """Within it layers are built as by a server with that ``additional_config``."""
    from types import SimpleNamespace

    from vllm.config import VllmConfig, set_current_vllm_config

    config: Any = VllmConfig(additional_config={"mmqc": list(parts)})
    config.model_config = SimpleNamespace(dtype=torch.bfloat16, quantization_config=None, multimodal_config=None)
    with set_current_vllm_config(config):
        yield


def microseconds(call: Callable[[], Any], graph: bool, repeats: int = 20) -> float:
    """The median of so many calls."""
    for _ in range(3):
        call()
    replay = call
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            call()
        replay = captured.replay
    flush = torch.empty(FLUSHED, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(repeats):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1000 * start.elapsed_time(end))
    return statistics.median(times)


def linear(inputs: int, outputs: int) -> Any:
    """vLLM's, with codes and scales that a seed gives."""
    from vllm.model_executor.layers.linear import ReplicatedLinear
    from vllm.model_executor.layers.quantization import get_quantization_config

    quantization = get_quantization_config("compressed-tensors").from_config(dict(CONFIG))
    options = {"bias": False, "params_dtype": torch.bfloat16, "quant_config": quantization, "prefix": "layer"}
    with torch.device("cuda"):
        layer: Any = ReplicatedLinear(inputs, outputs, **options)
    g = torch.Generator("cuda").manual_seed(0)
    layer.weight_packed.data.random_(-(2**31), 2**31, generator=g)
    layer.weight_scale.data.uniform_(0.5, 1.0, generator=g).mul_(inputs**-0.5 / 8)
    layer.scheme.process_weights_after_loading(layer)
    return layer


def differ(y: Tensor, other: Tensor) -> float:
    """The largest difference over the largest value."""
    return float((y.double() - other.double()).abs().max() / other.double().abs().max())


def linears() -> Iterator[dict[str, Any]]:
    """One row for each linear and number of rows."""
    for name, (inputs, outputs) in WIDTHS.items():
        layers = {}
        for whose, parts in (("vllm", ()), ("mmqc", ("linears",))):
            with lending(*parts):
                layers[whose] = linear(inputs, outputs)
        kernels = {whose: type(layer.scheme.kernel).__name__ for whose, layer in layers.items()}
        for rows in ROWS:
            x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
            times = {whose: microseconds(partial(layer, x), graph=True) for whose, layer in layers.items()}
            yield {"linear": name, "rows": rows, "kernels": kernels, **times, "differ": differ(*(m(x)[0] for m in layers.values()))}


def attentions() -> Iterator[dict[str, Any]]:
    """One row for each division into images."""
    from vllm.model_executor.layers.attention.mm_encoder_attention import MMEncoderAttention

    layers: dict[str, Any] = {}
    torch.set_default_dtype(torch.bfloat16)
    for whose, parts in (("vllm", ()), ("mmqc", ("attention",))):
        with lending(*parts):
            layers[whose] = MMEncoderAttention(HEADS, CHANNELS, prefix=whose)
    torch.set_default_dtype(torch.float32)
    for name, lengths in SEGMENTS.items():
        rows = sum(lengths)
        q, k, v = torch.randn(1, rows, 3, HEADS, CHANNELS, device="cuda", dtype=torch.bfloat16).unbind(2)
        ends = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
        longest = torch.tensor(max(lengths))
        given = q.contiguous(), k.contiguous(), v, ends, longest  # the values lie as the product of q, k and v left them
        times = {whose: microseconds(partial(layer, *given), graph=False) for whose, layer in layers.items()}
        why = layers["mmqc"].reason
        yield {"segments": name, "why not": why, **times, "differ": differ(*(layer(*given) for layer in layers.values()))}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    import vllm
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    import mmqc.vllm

    mmqc.vllm.register()
    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{folder}/store", 0, "nccl")
        initialize_model_parallel(1)
    found: dict[str, Any] = {"vllm": vllm.__version__, "torch": torch.__version__, "gpu": torch.cuda.get_device_name()}
    with torch.no_grad():
        for part in (linears, attentions):
            found[part.__name__] = []
            for row in part():
                print(json.dumps(row), flush=True)
                found[part.__name__].append(row)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
