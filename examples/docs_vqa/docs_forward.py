"""Qwen2-VL's forward for batches of one shape: no mask, no padding but at the rows' ends; `check` compares with transformers.

Visual tokens are `[pages, N, width]`, four patches each in the processor's order. What comes before the questions (the pages) is
read once; the questions about it are rows of their own that attend to it.
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


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last queries [n, heads, T, 64] to all keys [n, heads, P+T, 64]."""
    if q.is_cuda:
        # The kernel aligns the mask at the lower right, which torch's own front refuses to say (`aligned` asks it).
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=lower_right(q.shape[2], k.shape[2]))


def lower_right(queries: int, keys: int) -> torch.Tensor:
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


def aligned(device: str) -> bool:
    """Whether `attend` is what it says on this device."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, n, 64, generator=g).to(device, torch.bfloat16) for n in (16, 40, 40))
    wanted = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), attn_mask=lower_right(16, 40).to(device))
    return bool((attend(q, k, v).float() - wanted).abs().max() < 0.05)


def text_layer(
    layer: nn.Module, h: torch.Tensor, angles: tuple[torch.Tensor, ...], pages: int, rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The next hidden states, the first head's queries of the tails and keys of the pages.

    h [pages*P + rows*T, width]: what comes before the questions, once a page, then the questions, rows/pages to each page.
    angles: cosine and sine of the first P positions, and of the T that follow.
    """
    cos, sin, cos_after, sin_after = angles
    attention, x, n = layer.self_attn, layer.input_layernorm(h), pages * len(cos)
    before, after = (pages, len(cos), -1, 64), (rows, len(cos_after), -1, 64)

    def split(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return y[:n].view(before).transpose(1, 2), y[n:].view(after).transpose(1, 2)

    (q, q_after), (k, k_after), (v, v_after) = map(split, (attention.q_proj(x), attention.k_proj(x), attention.v_proj(x)))
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    q_after, k_after = rotate(q_after, cos_after, sin_after), rotate(k_after, cos_after, sin_after)
    groups = q.shape[1] // k.shape[1]
    first = F.scaled_dot_product_attention(q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), is_causal=True)
    keys = torch.cat([k.repeat_interleave(rows // pages, 0), k_after], 2).repeat_interleave(groups, 1)
    values = torch.cat([v.repeat_interleave(rows // pages, 0), v_after], 2).repeat_interleave(groups, 1)
    second = attend(q_after, keys, values)
    a = torch.cat([y.transpose(1, 2).reshape(-1, h.shape[1]) for y in (first, second)])
    h = h + attention.o_proj(a)
    return h + layer.mlp(layer.post_attention_layernorm(h)), q_after[:, 0], k[:, 0]


class Forward:
    """The two halves of the model; `compiled` compiles a layer of each once, for all sizes."""

    def __init__(self, model: nn.Module, compiled: bool) -> None:
        self.model, self.compiled = model, compiled
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

    def read(self, b: dict[str, torch.Tensor], seen: torch.Tensor) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
        """Last hidden states of the questions [R, T, width], and the pointers' queries [R, T, 64] and keys [pages, P, 64].

        `seen` [pages, P*V, width]; the batch's head [P], tokens [R, T], positions [3, P+T] and visual.
        """
        language, (pages, _, width), (rows, tail) = self.model.model.language_model, seen.shape, b["tokens"].shape
        embed, front = language.embed_tokens, len(b["head"])
        head = embed(b["head"]).float().expand(pages, -1, -1).index_copy(1, b["visual"], seen.float())
        h = torch.cat([head.reshape(-1, width), embed(b["tokens"]).float().view(-1, width)])
        cos, sin = (x[0].to(computed_in(h)) for x in language.rotary_emb(h, b["positions"][:, None]))
        angles = (cos[:front], sin[:front], cos[front:], sin[front:])
        pointers = []
        for i, layer in enumerate(language.layers):
            h, q, k = self.text_layer(layer, h, angles, pages, rows)
            if i in POINTERS:
                pointers.append((q, k))
        return language.norm(h[pages * front :].view(rows, tail, width)), pointers


@torch.no_grad()
def check(model: nn.Module, batch: dict[str, torch.Tensor]) -> float:
    """Largest relative difference of this forward's logits from transformers', over three rows of a batch."""
    forward = Forward(model, compiled=False)
    images = batch["images"].flatten(0, 1).float() / 127.5 - 1
    asked, worst = len(batch["tokens"]) // len(batch["images"]), 0.0
    seen = forward.see(images).view(len(batch["images"]), -1, model.config.text_config.hidden_size)
    ours = model.lm_head(forward.read(batch, seen)[0])
    for row in (0, len(ours) // 2, len(ours) - 1):
        n = int((batch["tokens"][row] != PAD).sum())
        ids, pages = torch.cat([batch["head"], batch["tokens"][row, :n]])[None], batch["images"][row // asked]
        inputs = dict(input_ids=ids, attention_mask=torch.ones_like(ids))
        inputs["mm_token_type_ids"] = torch.zeros_like(ids).index_fill(1, batch["visual"], 1)
        x = patches(pages.float() / 127.5 - 1).view(-1, 3, 1, PATCH * PATCH).expand(-1, -1, 2, -1)
        grid = torch.tensor([[1, pages.shape[1] // PATCH, pages.shape[2] // PATCH]]).expand(len(pages), -1)
        theirs = model(**inputs, pixel_values=x.reshape(len(x), -1), image_grid_thw=grid).logits[:, -n:]
        worst = max(worst, ((ours[row : row + 1, :n] - theirs).norm() / theirs.norm()).item())
    return worst
