"""What tiny models of the families are made of: a list of builders, configurations of parts, random weights, batches.

Where a builder has ``**dict(...)``, settings that belong together share a line.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

Batch = dict[str, Any]
Case = tuple[nn.Module, Batch]

VOCAB = 512
IMAGE, VIDEO, START, END, AUDIO = 500, 501, 502, 503, 504  # tokens with a meaning; words are below 400
PATCH = 8  # pixels
GRIDS = ((1, 4, 6), (1, 8, 4))  # of patches: frames, rows, columns
FAMILIES: dict[str, Callable[[], Case]] = {}


def family(build: Callable[[], Case]) -> Callable[[], Case]:
    """Enters a builder under its name."""
    FAMILIES[build.__name__] = build
    return build


# --- configurations ---------------------------------------------------------------------------------------------------


def text(kind: str | None = None, /, **more: Any) -> dict[str, Any]:
    """A decoder of two layers; ``kind`` is its model type, where the configuration around it has no type of its own."""
    sizes = dict(hidden_size=64, intermediate_size=172, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    tokens = dict(vocab_size=VOCAB, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    sizes |= tokens | dict(max_position_embeddings=512) | (dict(model_type=kind) if kind else {})
    return sizes | copy.deepcopy(more)  # transformers writes into the dictionaries that it is given


def tower(kind: str | None = None, /, **more: Any) -> dict[str, Any]:
    """A vision tower of two layers, as ``text`` is a decoder."""
    sizes = dict(hidden_size=64, intermediate_size=108, num_hidden_layers=2, num_attention_heads=4)
    return sizes | (dict(model_type=kind) if kind else {}) | copy.deepcopy(more)


def clip(**more: Any) -> dict[str, Any]:
    return tower(
        "clip_vision_model", **{"projection_dim": 32, "image_size": 32, "patch_size": PATCH, "num_hidden_layers": 3, **more}
    )


def siglip(**more: Any) -> dict[str, Any]:
    return tower("siglip_vision_model", **{"image_size": 32, "patch_size": PATCH, "vision_use_head": False, **more})


def config(kind: str, /, **more: Any) -> Any:
    """A configuration as an object, for whoever takes no dictionary."""
    return transformers.AutoConfig.for_model(kind, **more)


def of_type(parts: dict[str, Any]) -> Any:
    """The object of a dictionary that names its model type."""
    rest = dict(parts)
    return config(rest.pop("model_type"), **rest)


# --- weights ----------------------------------------------------------------------------------------------------------


def drawn(module: nn.Module, value: Tensor, g: torch.Generator) -> Tensor:
    """What a parameter of ``module`` is in a test: nothing that a rewrite moves is one or zero.

    Matrices and tables keep the size of what they are multiplied by; what starts as ones or zeros (gains, biases, gates) is moved
    by half of one at most.
    """
    noise = torch.randn(value.shape, generator=g)
    if isinstance(module, nn.Embedding):
        if module.padding_idx is not None:
            noise[module.padding_idx] = 0  # as some families make it when they are loaded
        return 0.3 * noise
    if value.dim() > 1:
        mixes = isinstance(module, nn.Linear | nn.modules.conv._ConvNd)
        return noise * (value[0].numel() ** -0.5 if mixes else (2 / sum(value.shape[-2:])) ** 0.5)
    around = value.mean().round() if isinstance(value, nn.Parameter) else value
    return around + (torch.rand(value.shape, generator=g) - 0.5) * (1.0 if isinstance(value, nn.Parameter) else 0.1)


@torch.no_grad()
def randomise(model: nn.Module) -> nn.Module:
    """Random parameters, and buffers of a checkpoint that are ones or zeros before somebody trains the model."""
    g = torch.Generator().manual_seed(4321)
    kept, done = model.state_dict(keep_vars=True), set[int]()
    owners: dict[int, nn.Module] = {}
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            owners.setdefault(id(tensor), module)  # of a table and a head that are one, the table
    for tensor in kept.values():
        constant = tensor.numel() > 0 and bool((tensor == tensor.flatten()[:1]).all())
        if id(tensor) not in done and tensor.is_floating_point() and (isinstance(tensor, nn.Parameter) or constant):
            tensor.copy_(drawn(owners[id(tensor)], tensor, g))
        done.add(id(tensor))
    return model


def built(settings: Any, maker: Any = transformers.AutoModelForImageTextToText, start: int | None = None) -> nn.Module:
    """A model of this configuration, in eval mode, that generates as many tokens as it is asked for, after a ``start``."""
    torch.manual_seed(0)
    model = maker.from_config(settings) if hasattr(maker, "from_config") else maker(settings)
    randomise(model.float().eval())
    if not model.can_generate():
        return model
    generation = model.generation_config
    generation.eos_token_id = generation.bos_token_id = generation.max_length = None
    generation.pad_token_id = 0
    if start is not None:
        generation.decoder_start_token_id = start
    return model


# --- batches ----------------------------------------------------------------------------------------------------------


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def prompt(
    lengths: Iterable[int],
    *,
    image: int = IMAGE,
    around: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
    words: tuple[int, ...] = (7, 5, 6, 4),
    types: str = "",
) -> Batch:
    """Token ids 'words image words image words' with so many tokens an image, each between the tokens ``around``.

    ``types`` is what the model calls a tensor that says which tokens are an image's, if it wants one.
    """
    g = torch.Generator().manual_seed(2)
    said = lambda n: torch.randint(10, 400, (n,), generator=g).tolist()  # noqa: E731
    ids = said(words[0])
    for i, length in enumerate(lengths):
        ids += [*around[0], *[image] * length, *around[1], *said(words[min(i + 1, len(words) - 1)])]
    row = torch.tensor([ids])
    return {"input_ids": row, "attention_mask": torch.ones_like(row), **({types: (row == image).long()} if types else {})}


def with_images(lengths: Iterable[int], size: int = 32, **more: Any) -> Batch:
    """A prompt and a square image for each length."""
    lengths = list(lengths)
    return {**prompt(lengths, **more), "pixel_values": noise(len(lengths), 3, size, size)}


def with_grids(channels: int, *, types: str = "mm_token_type_ids", merge: int = 2) -> Batch:
    """A prompt, and images as rows of ``channels`` numbers a patch, of which ``merge`` x ``merge`` are a token."""
    grids = torch.tensor(GRIDS)
    patches = grids.prod(-1)
    batch = prompt((patches // merge**2).tolist(), around=((START,), (END,)), types=types)
    return {**batch, "pixel_values": noise(int(patches.sum()), channels), "image_grid_thw": grids}


def positions(rows: int, columns: int, length: int) -> list[list[int]]:
    """Column and row of each patch, and of as many patches of padding as ``length`` leaves room for."""
    return [[x, y] for y in range(rows) for x in range(columns)] + [[-1, -1]] * (length - rows * columns)


@torch.no_grad()
def feature_lengths(model: Any, **images: Any) -> list[int]:
    """How many tokens the model itself makes of each image."""
    found = model.model.get_image_features(**images)
    return [x.numel() // x.shape[-1] for x in getattr(found, "pooler_output", found)]
