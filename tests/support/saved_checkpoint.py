"""A small quantized model as files, and ways to damage them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from models import tiny_qwen2_vl
from safetensors.torch import load_file, save_file

import mmqc
from mmqc import recipes


def saved(directory: Path, **options: Any) -> tuple[Any, dict[str, Any]]:
    """The tiny Qwen2-VL in 4 bits, saved there; the model and its inputs."""
    model, inputs = tiny_qwen2_vl()
    mmqc.quantize_(model, recipes.rtn(4, group_size=8), progress=False)
    mmqc.save_pretrained(model, directory, **options)
    return model, inputs


def edit_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes a JSON file in place."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def edit_tensors(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes the tensors of a file in place."""
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def flip(path: Path, bit: int) -> None:
    """Changes one bit of a file."""
    raw = bytearray(path.read_bytes())
    raw[bit // 8] ^= 1 << bit % 8
    path.write_bytes(raw)
