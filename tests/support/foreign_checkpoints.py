"""Checkpoints of other projects, packed code by code from the formats' descriptions; nothing of mmqc is used here."""

import json

import pytest
import torch
import transformers
from safetensors.torch import save_file

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # AutoAWQ: the output that lies in each nibble of a word, lowest first


def signed(word):
    return word - 2**32 if word >= 2**31 else word


def pack_rows(u, bits, order=None):
    """[R, C] unsigned -> int32 [R, C*bits/32]: a row's codes fill its words."""
    per = 32 // bits
    order = order or range(per)
    rows = []
    for row in u.tolist():
        words = []
        for start in range(0, len(row), per):
            word = 0
            for place, which in enumerate(order):
                word |= row[start + which] << (bits * place)
            words.append(signed(word))
        rows.append(words)
    return torch.tensor(rows, dtype=torch.int32)


def quantized(weight, bits, group, symmetric):
    """u [K, N], z [G, N], s [G, N] half precision, and the weight [N, K] that they stand for."""
    w = weight.double().T
    g = w.reshape(-1, group, w.shape[1])
    top = 2**bits - 1
    if symmetric:
        s = (g.abs().amax(1) / (2 ** (bits - 1) - 1)).half()
        z = torch.full(s.shape, 2 ** (bits - 1), dtype=torch.int64)
    else:
        low, high = g.amin(1).clamp(max=0), g.amax(1).clamp(min=0)
        s = ((high - low) / top).half()
        z = (-low / s.double()).round().clamp(0, top).long()
    u = ((g / s.double()[:, None]).round() + z[:, None]).clamp(0, top).long()
    back = ((u - z[:, None]) * s.double()[:, None]).reshape(w.shape).T
    return u.reshape(w.shape), z, s, back.float()


def awq(u, z, s, bits):
    return {"qweight": pack_rows(u, bits, ORDER), "qzeros": pack_rows(z, bits, ORDER), "scales": s}


def gptq(u, z, s, bits, v2=False):
    k = torch.arange(u.shape[0], dtype=torch.int32)
    zeros = z if v2 else (z - 1) & (2**bits - 1)
    packed = pack_rows(u.T, bits).T.contiguous()
    return {"qweight": packed, "qzeros": pack_rows(zeros, bits), "scales": s, "g_idx": k // (u.shape[0] // s.shape[0])}


@torch.no_grad()
def write(model, directory, settings, pack, *, bits, group, symmetric, wanted):
    """Saves ``model`` with its ``wanted`` linears packed, and puts into it the weights that they stand for."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and wanted(name):
            u, z, s, back = quantized(module.weight, bits, group or module.in_features, symmetric)
            del state[f"{name}.weight"]
            state |= {f"{name}.{part}": tensor for part, tensor in pack(u, z, s, bits).items()}
            module.weight.copy_(back)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict() | {"architectures": [type(model).__name__], "quantization_config": settings}
    config["dtype"] = "float32"
    (directory / "config.json").write_text(json.dumps(config))


def loaded_by_transformers(directory, **options):
    """The model as transformers loads it, or a skipped test where it cannot: packed zero points, from 5.23 on."""
    try:
        return transformers.AutoModelForImageTextToText.from_pretrained(directory, **options)
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        pytest.skip(f"transformers {transformers.__version__} itself takes packed zero points for unpacked ones")


def save_compressed(model, folder, state, left, form, group, **settings):
    """A checkpoint as compressed-tensors writes it: ``state``, linears ``left`` as they were, one ``group`` for the others."""
    quantization = {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": form,
        "ignore": left,
        "config_groups": {"group_0": group | {"format": form}},
        **settings,
    }
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict() | {"architectures": [type(model).__name__], "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
