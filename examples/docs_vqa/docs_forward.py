"""Qwen2-VL's forward for batches of one shape: no mask, no padding but at the rows' ends; `check` compares with transformers.

Visual tokens are `[pages, N, width]`, four patches each in the processor's order; a row of the decoder holds its pages' tokens
at the same places as every other row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from mmqc.samples.docs.alphabet import MERGE, PAD, PATCH

POINTERS = (2, 3)  # decoder layers whose first head is shown where the character just read stands, and the next one


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def computed_in(x: torch.Tensor) -> torch.dtype:
    """What linears compute in: autocast's type where that is on."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def patches(images: torch.Tensor) -> torch.Tensor:
    """Pages in -1..1 [n, H, W, 3] to patches [n, N, 3*8*8], the four of a visual token next to each other."""
    n, height, width, _ = images.shape
    x = images.view(n, height // PATCH // MERGE, MERGE, PATCH, width // PATCH // MERGE, MERGE, PATCH, 3)
    return x.permute(0, 1, 4, 2, 5, 7, 3, 6).reshape(n, -1, 3 * PATCH * PATCH)


def vision_block(block: nn.Module, h: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    size, n, width = h.shape
    q, k, v = block.attn.qkv(block.norm1(h)).view(size, n, 3, width // 64, 64).permute(2, 0, 3, 1, 4).unbind(0)
    a = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v)
    h = h + block.attn.proj(a.transpose(1, 2).reshape(size, n, width))
    return h + block.mlp(block.norm2(h))


def text_layer(
    layer: nn.Module, h: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The next hidden states, and the first head's queries and keys."""
    size, n, width = h.shape
    attention, x = layer.self_attn, layer.input_layernorm(h)
    q = rotate(attention.q_proj(x).view(size, n, -1, 64).transpose(1, 2), cos, sin)
    k = rotate(attention.k_proj(x).view(size, n, -1, 64).transpose(1, 2), cos, sin)
    v = attention.v_proj(x).view(size, n, -1, 64).transpose(1, 2)
    groups = q.shape[1] // k.shape[1]
    keys, values = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    a = F.scaled_dot_product_attention(q, keys, values, is_causal=True)
    h = h + attention.o_proj(a.transpose(1, 2).reshape(size, n, width))
    return h + layer.mlp(layer.post_attention_layernorm(h)), q[:, 0], k[:, 0]


class Forward:
    """The two halves of the model; `compiled` compiles a layer of each once, for all sizes."""

    def __init__(self, model: nn.Module, compiled: bool) -> None:
        self.model = model
        if compiled:
            self.vision_block = torch.compile(vision_block, dynamic=True)
            self.text_layer = torch.compile(text_layer, dynamic=True)
        else:
            self.vision_block, self.text_layer = vision_block, text_layer

    def see(self, images: torch.Tensor) -> torch.Tensor:
        """Pages in -1..1 [n, H, W, 3] to visual tokens [n, N/4, width]."""
        visual, (n, height, width, _) = self.model.model.visual, images.shape
        rows, columns = height // PATCH, width // PATCH
        rows_, columns_ = (torch.arange(n, device=images.device, dtype=torch.float32) for n in (rows, columns))
        place = torch.stack(torch.meshgrid(rows_, columns_, indexing="ij"), -1)
        place = place.view(rows // MERGE, MERGE, columns // MERGE, MERGE, 2).transpose(1, 2).reshape(-1, 2)
        angle = (place[:, :, None] * visual.rotary_pos_emb.inv_freq).flatten(1)
        angle = torch.cat([angle, angle], -1)
        # A still image fills both frames of the temporal patch.
        h = F.linear(patches(images), visual.patch_embed.proj.weight.sum(2).flatten(1)).float()
        dtype = computed_in(h)
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
        for block in visual.blocks:
            h = self.vision_block(block, h, cos, sin)
        return visual.merger.mlp(visual.merger.ln_q(h).view(n, h.shape[1] // 4, -1))

    def read(
        self, tokens: torch.Tensor, positions: torch.Tensor, visual: torch.Tensor, seen: torch.Tensor
    ) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
        """Last hidden states [R, T, width] and the pointers' queries and keys; `seen` [R, P*V, width]."""
        language = self.model.model.language_model
        h = language.embed_tokens(tokens).float().index_copy(1, visual, seen.float())
        cos, sin = language.rotary_emb(h, positions[:, None])
        dtype = computed_in(h)
        cos, sin = cos[:, None].to(dtype), sin[:, None].to(dtype)
        pointers = []
        for i, layer in enumerate(language.layers):
            h, q, k = self.text_layer(layer, h, cos, sin)
            if i in POINTERS:
                pointers.append((q, k))
        return language.norm(h), pointers


@torch.no_grad()
def check(model: nn.Module, batch: dict[str, torch.Tensor]) -> float:
    """Largest relative difference of this forward's logits from transformers', over three rows of a batch."""
    forward = Forward(model, compiled=False)
    images = batch["images"].flatten(0, 1).float() / 127.5 - 1
    asked = len(batch["tokens"]) // len(batch["images"])
    seen = forward.see(images).view(len(batch["images"]), -1, model.config.text_config.hidden_size)
    hidden, _ = forward.read(batch["tokens"], batch["positions"], batch["visual"], seen.repeat_interleave(asked, 0))
    ours, worst = model.lm_head(hidden), 0.0
    for row in (0, len(ours) // 2, len(ours) - 1):
        n = int((batch["tokens"][row] != PAD).sum())
        ids, pages = batch["tokens"][row : row + 1, :n], batch["images"][row // asked]
        inputs = dict(input_ids=ids, attention_mask=torch.ones_like(ids))
        inputs["mm_token_type_ids"] = torch.zeros_like(ids).index_fill(1, batch["visual"], 1)
        x = patches(pages.float() / 127.5 - 1).view(-1, 3, 1, PATCH * PATCH).expand(-1, -1, 2, -1)
        grid = torch.tensor([[1, pages.shape[1] // PATCH, pages.shape[2] // PATCH]]).expand(len(pages), -1)
        theirs = model(**inputs, pixel_values=x.reshape(len(x), -1), image_grid_thw=grid).logits
        worst = max(worst, ((ours[row : row + 1, :n] - theirs).norm() / theirs.norm()).item())
    return worst
