"""Programs with a visual mask, for tests of the passes that change the order of tokens."""

from typing import Any

import torch
from float64 import Float64, passed, recorded, relative_error, replayed
from torch import Tensor, nn
from torch.nn import functional as F

from mmqc.graph.program import Program
from mmqc.graph.runner import Pass
from mmqc.passes.reorder_tokens import ReorderTokens
from mmqc.passes.rewrite_mask import RewriteMask
from mmqc.passes.rewrite_rope_index import RewriteRopeIndex

BATCH, LENGTH, WIDTH, HEADS = 2, 7, 8, 2
VISUAL = torch.tensor([[0, 1, 1, 0, 0, 1, 0], [1, 1, 0, 0, 0, 0, 1]]).bool()


class Layer(nn.Module):
    """A decoder layer with rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in "qkvo")
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], how: dict[str, Any], cache: bool) -> tuple[Tensor, Tensor]:
        y = F.layer_norm(x, (WIDTH,))
        q, k, v = (f(y).view(BATCH, LENGTH, HEADS, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = (y * angles[0] + torch.cat((-y[..., 2:], y[..., :2]), -1) * angles[1] for y in (q, k))
        if cache:
            k, v = (torch.cat((y[:, :, :0], y), -2) for y in (k, v))
        if "eager" in how:
            y = (q @ k.transpose(-1, -2) + how["eager"]).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, **how)
        x = x + self.o(y.transpose(1, 2).reshape(BATCH, LENGTH, WIDTH))
        return x + self.down(F.silu(self.up(x))), k


class Decoder(nn.Module):
    """Two layers and a head; with ``cache`` the keys are outputs too, as they are when a cache keeps them."""

    def __init__(self, how: str, cache: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.head = nn.ModuleList([Layer(), Layer()]), nn.Linear(WIDTH, 5)
        self.how, self.cache = how, cache

    def attention(self, dtype: torch.dtype) -> dict[str, Any]:
        rows = torch.arange(LENGTH)
        causal = rows[:, None] >= rows
        padding = torch.tensor([[[False] * 2 + [True] * 5], [[True] * 7]])
        ways: dict[str, dict[str, Any]] = {
            "eager": {"eager": torch.where(causal, 0.0, -1e9)},
            "causal": {"is_causal": True},
            "window": {"attn_mask": causal & (rows[:, None] - rows < 3)},
            "prefix": {"attn_mask": causal | ((rows < 4) & (rows[:, None] < 4))},
            "padded": {"attn_mask": ((causal & padding) | torch.eye(LENGTH).bool())[:, None]},
            "float": {"attn_mask": torch.linspace(-1, 1, LENGTH * LENGTH, dtype=dtype).view(1, 1, LENGTH, LENGTH)},
            "free": {},
            "dropout": {"dropout_p": 1e-9},
        }
        return ways[self.how]

    def forward(self, x: Tensor) -> Any:
        turns = torch.arange(LENGTH)[:, None] * torch.tensor([1.0, 0.1, 1.0, 0.1])
        angles, how = (turns.cos(), turns.sin()), self.attention(x.dtype)
        keys = []
        for layer in self.layers:
            x, k = layer(x, angles, how, self.cache)
            keys.append(k)
        return (self.head(x), *keys) if self.cache else (self.head(x),)


HOWS = ("eager", "causal", "window", "prefix", "padded", "float", "free")


def token_passes(attention: str) -> tuple[Pass, ...]:
    return (ReorderTokens(attention), RewriteMask(attention), RewriteRopeIndex(attention))


def marked(prog: Program, visual: Tensor) -> Program:
    """The program with the mask as an input of its own: no quantized linear names one."""
    prog.visual = visual
    prog.visual_node().meta.update(shape=tuple(visual.shape), dtype=visual.dtype)
    return prog


def decoder(how: str, cache: bool = False, visual: Tensor = VISUAL) -> Program:
    torch.manual_seed(1)
    return marked(recorded(Decoder(how, cache), {"x": torch.randn(BATCH, LENGTH, WIDTH)}), visual)


def outputs(prog: Program) -> list[Tensor]:
    with Float64(), torch.no_grad():
        return prog.replay()


def check_exact_after_each(prog: Program, passes: tuple[Pass, ...], bound: float) -> None:
    """Every pass alone leaves all outputs as they were."""
    before = outputs(prog)
    for item in passes:
        passed(prog, [item])
        for actual, expected in zip(outputs(prog), before, strict=True):
            assert relative_error(actual, expected) < bound, item.name


def gathers(prog: Program) -> int:
    return len(prog.nodes("gather_rows", "gather_tokens"))


__all__ = ["HOWS", "VISUAL", "check_exact_after_each", "decoder", "gathers", "marked", "replayed", "token_passes"]
