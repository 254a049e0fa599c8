"""The stress sample: the base model's function in coordinates where one scale per tensor fails.

Every step is exact; `examples/digits_vqa/make_stress.py` measured where to apply it and how strongly, from calibration data.

| step                  | equation                                                     | what undoes it  |
|-----------------------|--------------------------------------------------------------|-----------------|
| fold the norms' gains | W diag(g) norm(x) = (W diag(g)) norm(x)                       |                 |
| turn the streams      | norm(Qx) = Q norm(x);  readers W Q^T, writers Q W            | rotation        |
| put new gains         | W x = (W diag(1/g)) (g x), g large on the visual tokens' axes | folding         |
| scale hidden channels | W_down diag(1/s) (act(W_gate x) * (diag(s) W_up x))          | online Hadamard |
| scale value channels  | W_o diag(1/s) A diag(s) (W_v x + b_v)                        | rotation of V/O |

Q maps a few axes, which hold most of the visual tokens' energy and little of the text tokens', onto single channels.
In the vision tower Q fixes the vector of ones, so that it also commutes with LayerNorm's mean. A turned stream cannot
share its embedding with a head that absorbed the final norm's gain: the stress model's embeddings are not tied.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from mmqc.samples.checkpoint import FOLDER

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import Qwen2VLForConditionalGeneration

RECIPE = FOLDER / "stress.safetensors"
# Where the concentrated axes go; any distinct channels would do.
CHANNELS = (37, 90, 151, 222)


def load_recipe() -> dict[str, Tensor]:
    """The stored axes, gains and scales (see `stress`)."""
    from safetensors.torch import load_file

    return load_file(RECIPE)


def turn(axes: Tensor, fix_ones: bool) -> Tensor:
    """Orthogonal Q [D, D] that maps row i of `axes` [K, D] to channel `CHANNELS[i]`: a product of K reflections.

    With `fix_ones`, Q 1 = 1, and an axis goes to the unit vector of its channel less that vector's mean.
    """
    d = axes.shape[1]
    q = torch.eye(d, dtype=torch.float64)
    targets: list[Tensor] = []
    for axis, channel in zip(axes.double(), CHANNELS, strict=False):
        target = torch.zeros(d, dtype=torch.float64)
        target[channel] = 1
        if fix_ones:
            axis, target = axis - axis.mean(), target - target.mean()
        a = q @ axis
        for t in targets:
            a, target = a - (a @ t) * t, target - (target @ t) * t
        a, target = a / a.norm(), target / target.norm()
        v = (a - target) / (a - target).norm()
        q = q - 2 * torch.outer(v, v @ q)
        targets.append(target)
    return q


def fold_gain(norm: nn.Module, readers: Sequence[nn.Linear], repeat: int = 1) -> None:
    """Move a norm's gain and bias into the linears that read it; `repeat` for the merger, which reads four tokens."""
    for linear in readers:
        if (bias := getattr(norm, "bias", None)) is not None:
            linear.bias += linear.weight @ bias.repeat(repeat)
        linear.weight *= norm.weight.repeat(repeat)
    norm.weight.fill_(1)
    if getattr(norm, "bias", None) is not None:
        norm.bias.zero_()


def put_gain(norm: nn.Module, readers: Sequence[nn.Linear], gain: Tensor, repeat: int = 1) -> None:
    """Give a norm of unit gain the gain `gain` on `CHANNELS`, and its readers the inverse."""
    full = torch.ones_like(norm.weight)
    full[list(CHANNELS[: len(gain)])] = gain.to(full)
    norm.weight.copy_(full)
    for linear in readers:
        linear.weight /= full.repeat(repeat)


def norms(model: Qwen2VLForConditionalGeneration) -> tuple[list, list]:
    """(norm, its readers, how many tokens a reader reads) for the vision tower and for the decoder."""
    visual, language = model.model.visual, model.model.language_model
    seen: list = []
    for b in visual.blocks:
        seen += [(b.norm1, [b.attn.qkv], 1), (b.norm2, [b.mlp.fc1], 1)]
    seen.append((visual.merger.ln_q, [visual.merger.mlp[0]], visual.spatial_merge_size**2))
    read: list = []
    for layer in language.layers:
        a, mlp = layer.self_attn, layer.mlp
        read.append((layer.input_layernorm, [a.q_proj, a.k_proj, a.v_proj], 1))
        read.append((layer.post_attention_layernorm, [mlp.gate_proj, mlp.up_proj], 1))
    return seen, read


def writers(model: Qwen2VLForConditionalGeneration) -> tuple[list, list]:
    """The linears that write to the vision stream and to the decoder's stream, without patch embedding and embedding."""
    visual, language = model.model.visual, model.model.language_model
    seen = [linear for b in visual.blocks for linear in (b.attn.proj, b.mlp.fc2)]
    read = [linear for layer in language.layers for linear in (layer.self_attn.o_proj, layer.mlp.down_proj)]
    return seen, [*read, visual.merger.mlp[2]]


def turn_streams(model: Qwen2VLForConditionalGeneration, q_vision: Tensor, q_text: Tensor) -> None:
    """Both residual streams x become Qx. The norms that read them must have unit gain."""
    sites, ends = norms(model), writers(model)
    for q, readers, outs in zip((q_vision, q_text), sites, ends, strict=True):
        for _norm, linears, repeat in readers:
            for linear in linears:
                parts = linear.weight.view(linear.out_features, repeat, -1)
                linear.weight.copy_((parts @ q.T).reshape(linear.weight.shape))
        for linear in outs:
            linear.weight.copy_(q @ linear.weight)
            if linear.bias is not None:
                linear.bias.copy_(q @ linear.bias)
    patches = model.model.visual.patch_embed.proj.weight
    patches.copy_((q_vision @ patches.flatten(1)).view_as(patches))
    for table in (model.model.language_model.embed_tokens.weight, model.lm_head.weight):
        table.copy_(table @ q_text.T)


def scale_hidden(model: Qwen2VLForConditionalGeneration, channels: Tensor, scales: Tensor) -> None:
    """Scale hidden channels of the decoder's gated MLPs: `channels`, `scales` [layers, K]."""
    for layer, index, s in zip(model.model.language_model.layers, channels, scales.double(), strict=True):
        layer.mlp.up_proj.weight[index] *= s[:, None]
        layer.mlp.down_proj.weight[:, index] /= s


def scale_values(model: Qwen2VLForConditionalGeneration, recipe: Mapping[str, Tensor]) -> None:
    """Scale one value channel of each head, in both towers; with grouped queries a value head serves several heads."""
    visual, language = model.model.visual, model.model.language_model
    for block, channels, scales in zip(
        visual.blocks, recipe["vision.value_channels"], recipe["vision.value_scales"].double(), strict=True
    ):
        rows = block.attn.qkv.weight.shape[0] // 3 * 2 + channels
        block.attn.qkv.weight[rows] *= scales[:, None]
        block.attn.qkv.bias[rows] *= scales
        block.attn.proj.weight[:, channels] /= scales
    for layer, channels, scales in zip(
        language.layers, recipe["text.value_channels"], recipe["text.value_scales"].double(), strict=True
    ):
        a = layer.self_attn
        a.v_proj.weight[channels] *= scales[:, None]
        a.v_proj.bias[channels] *= scales
        head, inside = channels // a.head_dim, channels % a.head_dim
        for i in range(a.num_key_value_groups):
            columns = (head * a.num_key_value_groups + i) * a.head_dim + inside
            a.o_proj.weight[:, columns] /= scales


def untie(model: Qwen2VLForConditionalGeneration) -> Qwen2VLForConditionalGeneration:
    """A float64 copy whose head has its own weight."""
    config = copy.deepcopy(model.config)
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = False
    out = type(model)(config).double().eval()
    out.load_state_dict({**model.state_dict(), "lm_head.weight": model.lm_head.weight})
    out.generation_config = copy.deepcopy(model.generation_config)
    return out


@torch.no_grad()
def turned(model: Qwen2VLForConditionalGeneration, recipe: Mapping[str, Tensor]) -> Qwen2VLForConditionalGeneration:
    """The first two steps: a float64 copy with folded gains and turned streams."""
    out = untie(model)
    for norm, readers, repeat in (site for sites in norms(out) for site in sites):
        fold_gain(norm, readers, repeat)
    fold_gain(out.model.language_model.norm, [out.lm_head])
    turn_streams(out, turn(recipe["vision.axes"], fix_ones=True), turn(recipe["text.axes"], fix_ones=False))
    return out


@torch.no_grad()
def stress(model: Qwen2VLForConditionalGeneration, recipe: Mapping[str, Tensor] | None = None) -> Qwen2VLForConditionalGeneration:
    """A float64 copy of `model` that computes the same and is hard to quantize.

    Args:
        model: The base model.
        recipe: `{vision,text}.axes` [K, D]; `{vision,text}.gains` [norms, K]; `text.hidden_channels` and
            `text.hidden_scales` [layers, K]; `{vision,text}.value_channels` and `.value_scales` [layers, heads].
            The stored recipe where None.
    """
    recipe = load_recipe() if recipe is None else recipe
    out = turned(model, recipe)
    for sites, gains in zip(norms(out), (recipe["vision.gains"], recipe["text.gains"]), strict=True):
        for (norm, readers, repeat), gain in zip(sites, gains, strict=True):
            put_gain(norm, readers, gain, repeat)
    scale_hidden(out, recipe["text.hidden_channels"], recipe["text.hidden_scales"])
    scale_values(out, recipe)
    return out
