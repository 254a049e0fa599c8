"""Quantize in a process of its own, to be killed: ``python killed.py <case> <folder> <result>``."""

import sys
from pathlib import Path
from typing import Any

import torch

torch.set_num_threads(1)
sys.path.insert(0, str(Path(__file__).parent))


def case(name: str) -> tuple[Any, list[dict[str, Any]], Any]:
    """(model, batches, config)."""
    import mmqc

    config = mmqc.recipes.mquant(4)
    if name == "small":
        from small_vlm import Small, batches

        return Small(), batches(), config
    sample = mmqc.samples.load("digits-vqa")
    return sample.model, sample.calibration(8), config


def quantized(name: str, folder: str | None, **more: Any) -> Any:
    import mmqc

    model, batches, config = case(name)
    mmqc.quantize_(model, config, batches, progress=False, resume_dir=folder, **more)
    return model


if __name__ == "__main__":
    from safetensors.torch import save_file

    kind, inputs = sys.argv[1].split("/")
    print("started", flush=True)
    model = quantized(kind, sys.argv[2], inputs=inputs)
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, sys.argv[3])
