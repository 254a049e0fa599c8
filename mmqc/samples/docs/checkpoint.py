"""The model of docs-vqa: transformers' own Qwen2-VL, 19 million parameters, in files of at most 15 MB.

As in the digits sample, head_dim 64, grouped queries (6 to 2), M-RoPE in three sections and tied embeddings.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mmqc.samples import checkpoint as digits
from mmqc.samples.docs import alphabet as ids
from mmqc.samples.docs.place import SampleMissingError

if TYPE_CHECKING:
    import torch
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

LARGEST = 15_000_000  # bytes of a file


def new_config(width: int = 384, vision_depth: int = 4, depth: int = 6) -> Qwen2VLConfig:
    """The configuration that the training script starts from; others than the defaults are for tests."""
    return digits.qwen2_vl(ids, width=width, inner=width * 8 // 3, vision_depth=vision_depth, depth=depth, positions=4096)


def new_model(config: Qwen2VLConfig | None = None) -> Qwen2VLForConditionalGeneration:
    """An untrained model in float32."""
    return digits.new_model(config or new_config())


def save(model: Qwen2VLForConditionalGeneration, folder: Path) -> None:
    """Write the model in bfloat16, as `from_pretrained` reads it: several files of at most `LARGEST` bytes and an index."""
    import json

    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    weights = {n: w.detach().cpu().to(torch.bfloat16).contiguous() for n, w in model.state_dict().items()}
    weights.pop("lm_head.weight")  # the embedding's
    files: list[dict[str, torch.Tensor]] = [{}]
    for name, weight in weights.items():
        if files[-1] and sum(w.nbytes for w in files[-1].values()) + weight.nbytes > LARGEST:
            files.append({})
        files[-1][name] = weight
    for old in folder.glob("model-*.safetensors"):
        old.unlink()
    names = {}
    for i, held in enumerate(files, 1):
        file = f"model-{i:05d}-of-{len(files):05d}.safetensors"
        save_file(held, folder / file, metadata={"format": "pt"})
        names |= dict.fromkeys(held, file)
    index = dict(metadata=dict(total_size=sum(w.nbytes for w in weights.values())), weight_map=names)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)


def load(folder: Path) -> Qwen2VLForConditionalGeneration:
    """The stored model in float32, ready for inference.

    Raises:
        SampleMissingError: the folder holds no weights.
    """
    import torch
    from safetensors.torch import load_file
    from transformers import GenerationConfig, Qwen2VLConfig, Qwen2VLForConditionalGeneration

    weights = {}
    for file in sorted(folder.glob("model-*.safetensors")):
        weights |= load_file(file)
    if not weights:
        raise SampleMissingError(f"{folder} holds no model-*.safetensors: copy them there from mmqc's repository")
    model = Qwen2VLForConditionalGeneration.from_pretrained(
        None, config=Qwen2VLConfig.from_pretrained(folder), state_dict=weights, dtype=torch.float32
    )
    model.generation_config = GenerationConfig.from_pretrained(folder)
    model.config.name_or_path = model.name_or_path = str(folder)
    return model.eval()
