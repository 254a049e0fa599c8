"""Small hand-written models: one per way in which transformers' models read, write, share and merge residual streams.

``MODELS[name]()`` gives (model, batch); all are two linears deep or so, 16 channels wide, with random gains and biases.
"""

from collections.abc import Callable
from typing import Any

import torch
from models import randomise
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, VOCAB, IMAGE = 16, 40, 39
Case = tuple[nn.Module, dict[str, Any]]


class RMSNorm(nn.Module):
    """Spelled out as in transformers: gain w behind the cast, or Gemma's 1 + w in front of it."""

    def __init__(self, width: int = WIDTH, plus_one: bool = False) -> None:
        super().__init__()
        self.weight, self.plus_one = nn.Parameter(torch.ones(width)), plus_one

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        if self.plus_one:
            return (wide * (1.0 + self.weight.float())).type_as(x)
        return self.weight * wide.to(x.dtype)


class Mlp(nn.Module):
    def __init__(self, width: int = WIDTH, hidden: int = 24, gated: bool = False, bias: bool = True) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden, bias), nn.Linear(hidden, width, bias)
        self.gate = nn.Linear(width, hidden, bias) if gated else None

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(F.gelu(self.up(x)))
        return self.down(F.silu(self.gate(x)) * self.up(x))


def repeat_kv(x: Tensor, times: int) -> Tensor:
    """[B, H, L, D] to [B, H * times, L, D], as transformers does it."""
    b, h, length, d = x.shape
    return x[:, :, None].expand(b, h, times, length, d).reshape(b, h * times, length, d)


class Attention(nn.Module):
    """Grouped queries; scores and softmax spelled out."""

    def __init__(self, heads: int = 4, kv_heads: int = 2, bias: bool = False, qk_norm: bool = False) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, WIDTH // heads
        self.q, self.o = nn.Linear(WIDTH, WIDTH, bias), nn.Linear(WIDTH, WIDTH, bias)
        self.k, self.v = (nn.Linear(WIDTH, kv_heads * self.size, bias) for _ in "kv")
        self.q_norm, self.k_norm = (RMSNorm(self.size) if qk_norm else nn.Identity() for _ in "qk")

    def forward(self, x: Tensor) -> Tensor:
        b, length, _ = x.shape
        q, k, v = (y.view(b, length, -1, self.size).transpose(1, 2) for y in (self.q(x), self.k(x), self.v(x)))
        q, k = self.q_norm(q), self.k_norm(k)
        k, v = repeat_kv(k, self.heads // self.kv_heads), repeat_kv(v, self.heads // self.kv_heads)
        scores = torch.matmul(q, k.transpose(2, 3)) * self.size**-0.5
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        y = torch.matmul(weights, v).transpose(1, 2).contiguous()
        return self.o(y.reshape(b, length, -1).contiguous())


class FusedAttention(nn.Module):
    """One linear for q, k and v, taken apart by reshape and unbind."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.qkv, self.o, self.heads = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), heads

    def forward(self, x: Tensor) -> Tensor:
        b, length, _ = x.shape
        q, k, v = self.qkv(x).reshape(b, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, length, -1))


class Branch(nn.Module):
    """x + after(body(norm(x)))."""

    def __init__(self, norm: nn.Module, body: nn.Module, after: nn.Module | None = None) -> None:
        super().__init__()
        self.norm, self.body, self.after = norm, body, after if after is not None else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.after(self.body(self.norm(x)))


class Parallel(nn.Module):
    """x + a(norm(x)) + b(norm(x))."""

    def __init__(self, norm: nn.Module, a: nn.Module, b: nn.Module) -> None:
        super().__init__()
        self.norm, self.a, self.b = norm, a, b

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.a(y) + self.b(y)


class Text(nn.Module):
    """Embedding, blocks, norm, head."""

    def __init__(self, *blocks: nn.Module, norm: nn.Module | None = None, positions: int = 0, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(VOCAB, WIDTH), nn.ModuleList(blocks)
        self.positions = nn.Embedding(positions, WIDTH) if positions else None
        self.norm, self.head = norm if norm is not None else RMSNorm(), nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        if self.positions is not None:
            x = x + self.positions(torch.arange(input_ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Vision(nn.Module):
    """Patch convolution, class token, learned positions, Pre-LN blocks; the class token is dropped again."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.token, self.positions = nn.Parameter(torch.zeros(1, 1, WIDTH)), nn.Parameter(torch.zeros(1, 17, WIDTH))
        self.blocks = nn.ModuleList(blocks)

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = self.patches(pixel_values).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(len(x), -1, -1), x), dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        return x[:, 1:]


class Merger(nn.Module):
    """A norm whose output four neighbouring patches bring to one linear side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Mlp(4 * WIDTH, 32)
        self.mlp.down = nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.norm(x).view(-1, 4 * WIDTH))


class Vlm(nn.Module):
    """Image features take the places of the image tokens."""

    def __init__(self, vision: Vision, merger: Merger, text: Text) -> None:
        super().__init__()
        self.vision, self.merger, self.text = vision, merger, text

    def forward(self, input_ids: Tensor, pixel_values: Tensor) -> Tensor:
        features = self.merger(self.vision(pixel_values))
        x = self.text.embed(input_ids)
        mask = (input_ids == IMAGE).unsqueeze(-1).expand_as(x)
        x = x.masked_scatter(mask, features.to(x.dtype))
        for block in self.text.blocks:
            x = block(x)
        return self.text.head(self.text.norm(x))


def ids(length: int = 6, seed: int = 0) -> dict[str, Tensor]:
    """Two rows of token ids."""
    return {"input_ids": torch.randint(0, IMAGE, (2, length), generator=torch.Generator().manual_seed(seed))}


def pre_ln(bias: bool = True) -> Text:
    """A Pre-LN transformer with learned positions."""
    norm = lambda: nn.LayerNorm(WIDTH, bias=bias)  # noqa: E731
    return Text(Branch(norm(), Attention(bias=bias)), Branch(norm(), Mlp(bias=bias)), norm=norm(), positions=6)


def shared() -> Text:
    """The same block called twice, so that every weight of it is used at two places."""
    block = Branch(RMSNorm(), Mlp(gated=True))
    return Text(block, block, Branch(RMSNorm(), Attention()))


def vlm() -> Case:
    """Two towers: Pre-LN with class token and merger, RMSNorm with grouped queries."""
    vision = Vision(Branch(nn.LayerNorm(WIDTH), FusedAttention()), Branch(nn.LayerNorm(WIDTH), Mlp()))
    text = Text(Branch(RMSNorm(), Attention()), Branch(RMSNorm(), Mlp(gated=True, bias=False)), tied=True)
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    tokens = torch.cat((ids()["input_ids"], torch.full((2, 4), IMAGE), ids(3, 1)["input_ids"]), 1)
    return Vlm(vision, Merger(), text), {"input_ids": tokens, "pixel_values": pixels}


def _llama(**more: Any) -> Text:
    return Text(Branch(RMSNorm(), Attention(**more)), Branch(RMSNorm(), Mlp(gated=True, bias=False)))


def _gemma() -> Text:
    norm = lambda: RMSNorm(plus_one=True)  # noqa: E731
    return Text(Branch(norm(), Attention(), norm()), Branch(norm(), Mlp(gated=True), norm()), norm=norm(), tied=True)


_BUILDERS: dict[str, Callable[[], Case]] = {
    "pre_ln": lambda: (pre_ln(), ids()),
    "pre_ln_without_bias": lambda: (pre_ln(bias=False), ids()),
    "rms_gqa": lambda: (_llama(), ids()),
    "qk_norm": lambda: (_llama(qk_norm=True), ids()),
    "sandwich_plus_one": lambda: (_gemma(), ids()),
    "fused_qkv": lambda: (Text(Branch(nn.LayerNorm(WIDTH), FusedAttention()), norm=nn.LayerNorm(WIDTH)), ids()),
    "parallel": lambda: (Text(Parallel(nn.LayerNorm(WIDTH), Attention(bias=True), Mlp()), norm=nn.LayerNorm(WIDTH)), ids()),
    "shared": lambda: (shared(), ids()),
    "library_rms": lambda: (Text(Branch(nn.RMSNorm(WIDTH), Mlp()), norm=nn.RMSNorm(WIDTH, eps=1e-5)), ids()),
    "vlm": vlm,
}


def _random(build: Callable[[], Case]) -> Case:
    torch.manual_seed(0)
    model, batch = build()
    return randomise(model).eval(), batch


MODELS: dict[str, Callable[[], Case]] = {name: lambda b=build: _random(b) for name, build in _BUILDERS.items()}
